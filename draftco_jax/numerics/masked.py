"""Reductions over the unmasked entries of an array.

All of them replace masked entries BEFORE any arithmetic, so that a NaN or an infinity under the mask reaches neither
the value nor the gradient (``0 * inf`` is NaN; ``where(mask, x, 0)`` is not).

Nothing here counts tokens: a mean gets its denominator from the caller, because the right one is the global count of
the whole step, and a function that sees one micro-batch or one shard cannot know it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32


def masked_sum(values: Float32[Array, "*shape"], mask: Float32[Array, "*shape"]) -> Float32[Array, ""]:
    """Return ``sum(mask * values)`` over entries whose mask is positive; 0 if there are none. float32 throughout."""
    require_same_shape(values=values, mask=mask)
    return jnp.sum(mask * jnp.where(mask > 0, values, 0.0))


def masked_mean(
    values: Float32[Array, "*shape"], mask: Float32[Array, "*shape"], *, count: Float32[Array, ""] | float
) -> Float32[Array, ""]:
    """Return ``sum(mask * values) / count``, and 0 where ``count`` is 0. float32 throughout.

    ``count`` is the number of unmasked entries in the whole step, over all micro-batches and shards: partial means made
    with it add up to the mean of the whole. It is a constant: no gradient flows through it.
    """
    return masked_sum(values, mask) / safe_count(count)


def masked_max(values: Float32[Array, "*shape"], mask: Float32[Array, "*shape"], *, empty: float) -> Float32[Array, ""]:
    """Return the largest unmasked value; ``empty`` if there are none or all are below it. float32."""
    require_same_shape(values=values, mask=mask)
    return jnp.max(jnp.where(mask > 0, values, empty), initial=empty)


def safe_count(count: Float32[Array, "*b"] | float) -> Float32[Array, "*b"]:
    """Return ``count`` as float32 with 0 replaced by 1: an empty step has a zero numerator, so its mean becomes 0."""
    return jnp.where(count > 0, jnp.float32(count), jnp.float32(1.0))


def require_same_shape(**arrays: Array) -> None:
    """Raise ``ValueError`` unless all arrays have one shape: broadcasting [B] against [B, T] is silent when B = T."""
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        stated = ", ".join(f"{name}.shape={shape}" for name, shape in shapes.items())
        raise ValueError(f"{stated}: the shapes must be equal; expand per-sequence values to tokens first")
