"""The same product by XLA: from panels back to the matrix, and its own matmul."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.skinny_matmul.records import WIDTH, PackedWeight


def pack(w: Float32[Array, "K N"]) -> PackedWeight:
    """Columns in groups of 16, each [K, 16] one after the other; what is missing of the last group is zeros."""
    rows, columns = w.shape
    padded = jnp.pad(w, ((0, 0), (0, -columns % WIDTH)))
    return PackedWeight(padded.reshape(rows, -1, WIDTH).transpose(1, 0, 2), columns)


def unpack(packed: PackedWeight) -> Float32[Array, "K N"]:
    """The matrix again."""
    panels = packed.panels
    return panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)[:, : packed.columns]


def matmul(x: Float32[Array, "M K"], packed: PackedWeight) -> Float32[Array, "M N"]:
    """x @ W."""
    return x @ unpack(packed)
