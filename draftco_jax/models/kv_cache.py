"""Static key-value cache that is rolled back by position.

A slot holds the key of the token at that position. Queries at position t see slots <= t only, so a slot written by a
rejected draft is never read: it is overwritten before any query reaches its position. Rolling back is therefore
nothing but continuing from an earlier position.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class LayerCache(NamedTuple):
    """Keys and values of one attention layer, heads first so that attention reads them contiguously."""

    keys: jax.Array  # [B, K, S, H]
    values: jax.Array  # [B, K, S, H]


def empty_cache(batch: int, kv_heads: int, capacity: int, head_width: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros with `capacity` slots per request."""
    zeros = jnp.zeros((batch, kv_heads, capacity, head_width), dtype)
    return LayerCache(zeros, zeros)


def write(
    cache: LayerCache, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], start: Int[Array, " B"]
) -> LayerCache:
    """Write T consecutive slots per request, beginning at `start`.

    The caller guarantees start + T <= capacity: XLA would silently move a slice that does not fit to an earlier slot.
    """

    def put(buffer: Array, rows: Array) -> Array:
        rows = jnp.swapaxes(rows, 1, 2).astype(buffer.dtype)
        if rows.shape[0] == 1:  # a plain slice update; batched ones become a scatter, which is a loop on a CPU
            return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, start[0], 0))
        return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (0, s, 0)))(buffer, rows, start)

    return LayerCache(put(cache.keys, keys), put(cache.values, values))


def visible_slots(capacity: int, start: Int[Array, " B"], tokens: int) -> Bool[Array, "B T S"]:
    """Which slots the T queries at start, start + 1, ... see: those at or before their own position."""
    positions = start[:, None] + jnp.arange(tokens, dtype=start.dtype)[None, :]
    return jnp.arange(capacity, dtype=start.dtype)[None, None, :] <= positions[:, :, None]
