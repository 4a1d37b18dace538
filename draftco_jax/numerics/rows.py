"""Indexing with one offset per row, in the fewest operations.

Offsets are trusted to be in range: XLA would clamp a slice that does not fit to an earlier place, silently.
A batch of one takes the plain slice operation: the batched one becomes a gather or a scatter, a loop on a CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def pick(values: Shaped[Array, "*b V"], index: Int[Array, "*b"]) -> Shaped[Array, "*b"]:
    """values[..., index], one index per row of the last axis; every index lies in 0..V-1."""
    at = index[..., None]
    return jnp.take_along_axis(values, at, axis=-1, mode="promise_in_bounds")[..., 0]


def row_at(values: Shaped[Array, "B T *rest"], index: Int[Array, " B"]) -> Shaped[Array, "B ..."]:
    """values[b, index_b]; every index lies in 0..T-1."""
    return slice_rows(values, index, 1)[:, 0]


def slice_rows(values: Shaped[Array, "B S *rest"], start: Int[Array, " B"], count: int) -> Shaped[Array, "B n *rest"]:
    """values[b, start_b : start_b + count]; the caller keeps the slice inside."""
    trailing = values.shape[2:]
    zero = jnp.zeros((), start.dtype)  # of the type of the starts: a bare 0 is another one where 64 bits are on
    zeros = (zero,) * len(trailing)
    if values.shape[0] == 1:
        return jax.lax.dynamic_slice(values, (zero, start[0], *zeros), (1, count, *trailing))
    return jax.vmap(lambda v, s: jax.lax.dynamic_slice(v, (s, *zeros), (count, *trailing)))(values, start)


def update_rows(
    buffer: Shaped[Array, "B S *rest"], rows: Shaped[Array, "B n *rest"], start: Int[Array, " B"]
) -> Shaped[Array, "B S *rest"]:
    """The buffer with rows[b] written at start_b; the caller keeps the slice inside."""
    zero = jnp.zeros((), start.dtype)
    zeros = (zero,) * (buffer.ndim - 2)
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice(buffer, rows, (zero, start[0], *zeros))
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (s, *zeros)))(buffer, rows, start)
