"""Pure loss functions on arrays."""
