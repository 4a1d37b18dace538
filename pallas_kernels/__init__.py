"""Kernel ops of draftco, one folder per op. This package imports nothing of draftco_jax."""
