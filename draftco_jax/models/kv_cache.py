"""Static key-value cache, with the rotary angles of its slots, that is rolled back by position.

A slot holds the key of the token at that position. Queries at position t see slots <= t only, so a slot written by a
rejected draft is never read: it is overwritten before any query reaches its position. Rolling back is therefore
nothing but continuing from an earlier position.

A call over the nodes of a token tree is the one time at which a slot holds the key of another position: node i lies in
slot start + i, and its key is that of position start + depth. `compacted` moves the nodes of the kept path to the slots
of their positions, and what is left of the others is overwritten as ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.models.attention import attend
from draftco_jax.models.calls import CachedCall
from draftco_jax.models.layers import rotary_angles
from draftco_jax.models.token_tree import Tree
from draftco_jax.numerics.rows import slice_rows


class LayerCache(NamedTuple):
    """Keys and values of one attention layer, heads first so that attention reads them contiguously."""

    keys: jax.Array  # [B, K, S, H]
    values: jax.Array  # [B, K, S, H]

    def put(self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], call: CachedCall) -> LayerCache:
        """With T consecutive slots of each request written, beginning at `call.start`."""
        return write(self, keys, values, call.start)

    def read(
        self,
        queries: Float[Array, "B T N H"],
        call: CachedCall,
        window: int | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attention of the queries at call.start, call.start + 1, ... over the slots they see, at most `window`."""
        mask = call.visible
        if window is not None and call.tree is None:
            place = call.start[:, None] + jnp.arange(queries.shape[1], dtype=call.start.dtype)[None, :]
            slots = jnp.arange(mask.shape[2], dtype=call.start.dtype)[None, None, :]
            mask = mask & (slots > (place - window)[:, :, None])
        elif window is not None and call.tree is not None:
            place, held = positions_in_tree(mask.shape[2], call.start, call.tree)
            mask = mask & (held[:, None, :] > (place - window)[:, :, None])
        return attend(queries, self.keys, self.values, mask, sinks)


class Cache(NamedTuple):
    """State of all layers of a model (`LayerCache` where it is attention), and cos and sin of every slot's position.

    The angles are computed once for all slots. Computed where they are used, they would be evaluated again for every
    head of every layer of every token, which costs a small model more than its matmuls.
    """

    layers: tuple[Any, ...]
    cos: jax.Array  # f32[S, h], h = 0 where nothing is turned
    sin: jax.Array  # f32[S, h]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.cos.shape[0]

    def angles_at(
        self, start: Int[Array, " B"], tokens: int
    ) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
        """Angles of the T slots from `start` on; start + T <= capacity."""
        return angles_of_slots(self.cos, self.sin, start, tokens)

    def seen(self, start: Int[Array, " B"], tokens: int, active: Array | None) -> Bool[Array, "B T S"]:
        """Which slots the T queries at start, start + 1, ... see."""
        del active  # what is written for other tokens is overwritten before it is seen
        return visible_slots(self.capacity, start, tokens)

    def tree_angles(
        self, start: Int[Array, " B"], tree: Tree
    ) -> tuple[Float[Array, "B N 1 h"], Float[Array, "B N 1 h"]]:
        """Angles of the nodes of a tree whose root stands at `start`."""
        cos, sin = self.angles_at(start, tree.depth + 1)
        depths = np.array(tree.depths)
        return cos[:, depths], sin[:, depths]


def angles_of_slots(
    cos: Float[Array, "S h"], sin: Float[Array, "S h"], start: Int[Array, " B"], tokens: int
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """Rows start, start + 1, ... of the tables of all slots."""
    batch = start.shape[0]
    rows = [
        slice_rows(jnp.broadcast_to(table[None], (batch, *table.shape)), start, tokens)[:, :, None]
        for table in (cos, sin)
    ]
    return rows[0], rows[1]


def empty_cache(
    layers: int, batch: int, kv_heads: int, capacity: int, head_width: int, theta: float, dtype: jnp.dtype
) -> Cache:
    """A cache of zeros with `capacity` slots per request."""
    zeros = jnp.zeros((batch, kv_heads, capacity, head_width), dtype)
    cos, sin = rotary_angles(jnp.arange(capacity)[None], head_width, theta)
    return Cache(tuple(LayerCache(zeros, zeros) for _ in range(layers)), cos[0, :, 0], sin[0, :, 0])


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


def visible_branches(capacity: int, start: Int[Array, " B"], reads: np.ndarray) -> Bool[Array, "B T S"]:
    """Which slots T queries see, of which query i reads row j of a block that lies at start, start + 1, ... if
    reads[i, j]: these rows, and all slots before the block."""
    rows = reads.shape[1]
    row = jnp.arange(capacity, dtype=start.dtype)[None, :] - start[:, None]  # [B, S]
    within = jnp.asarray(reads.T)[jnp.clip(row, 0, rows - 1)] & (row < rows)[:, :, None]
    return jnp.swapaxes(within | (row < 0)[:, :, None], 1, 2)


def positions_in_tree(
    capacity: int, start: Int[Array, " B"], tree: Tree
) -> tuple[Int[Array, "B N"], Int[Array, "B S"]]:
    """Of the nodes of a tree, and of what the slots hold once it is written: slots are positions before it, and after
    it hold nothing that is seen."""
    depths = jnp.asarray(tree.depths, start.dtype)
    slots = jnp.arange(capacity, dtype=start.dtype)[None, :]
    row = jnp.clip(slots - start[:, None], 0, len(tree.depths) - 1)
    held = jnp.where(slots < start[:, None], slots, start[:, None] + depths[row])
    return start[:, None] + depths[None, :], held


def compacted(cache: Cache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Cache:
    """The cache with what lay in slots start + path[:, 0], start + path[:, 1], ... in start + 1, start + 2, ...

    The states of layers one by one or stacked; all of them are keys and values. start + D < capacity.
    """
    source = start[:, None] + path

    def moved(buffer: Array) -> Array:
        if buffer.ndim > 4:  # layers of a run
            return jax.vmap(moved)(buffer)
        rows = jax.vmap(lambda b, s: b.at[:, s].get(mode="promise_in_bounds"))(buffer, source)
        if buffer.shape[0] == 1:
            return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, start[0] + 1, 0))
        return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (0, s, 0)))(buffer, rows, start + 1)

    return cache._replace(layers=jax.tree.map(moved, cache.layers))
