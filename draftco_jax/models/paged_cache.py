r"""Key-value cache in pages: rows of a batch share one pool, and a table says which pages a row reads.

Slot s of a row, the one of the token at position s, lies in page table[row, s // p] at place s % p. Rows take as many
pages as they need, rows with the same beginning may name the same pages, and the numbers of pages mean nothing.

Page 0 belongs to nobody. Table entries of columns that a row does not have are 0, and so is where tokens are written
that are not real (`CachedCall.active`): what stands there is never seen. A page that is taken anew holds what its last
owner left, whatever that is, NaN included: nothing of a slot that was not written by its present owner enters a sum.

Attention walks the table a few columns at a time, with a running softmax in float32:

    m' = max(m, max s),   c = exp(m - m'),   l' = c l + sum exp(s - m'),   a' = c a + sum exp(s - m') v,   y = a / l

from the first column that some row sees to the last, so the cost of a token grows with the longest text of now and not
with the capacity. For a row that sees nothing of a step, m' = m, c = 1 and the sums get zeros: its result has the same
bits whatever its neighbours are. A head's sink is where m and l begin.

Letters: B rows, T new tokens, N heads, K key-value heads, g = N / K, H head width, Q pages of p slots in the pool,
W steps of the walk, n columns each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from draftco_jax.models.calls import CachedCall
from draftco_jax.models.kv_cache import Cache, LayerCache, angles_of_slots

NOBODY = 0
"""The page that belongs to no row."""


class Pages(NamedTuple):
    """What one call sees of the table."""

    table: jax.Array  # i32[B, W, n] pages of each row, in the order of its slots
    end: jax.Array  # i32[B] slots of each row that hold something once the call has written


class PagedLayer(NamedTuple):
    """Keys and values of one attention layer, of all rows."""

    keys: jax.Array  # [K, Q, p, H]: pages side by side within a head are one run of slots when they are gathered
    values: jax.Array  # [K, Q, p, H]

    def put(self, keys: Float[Array, "B T K H"], values: Float[Array, "B T K H"], call: CachedCall) -> PagedLayer:
        """With the real ones of T consecutive tokens of each row written, beginning at `call.start`."""
        pages: Pages = call.visible
        table = pages.table.reshape(pages.table.shape[0], -1)
        page, columns = self.keys.shape[-2], table.shape[1]
        slots = call.start[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :]
        column, place = slots // page, slots % page
        owner = jnp.take_along_axis(table, jnp.minimum(column, columns - 1), axis=1)
        owner = jnp.where((slots < pages.end[:, None]) & (column < columns), owner, NOBODY)
        return PagedLayer(
            self.keys.at[:, owner, place].set(jnp.moveaxis(keys, 2, 0).astype(self.keys.dtype)),
            self.values.at[:, owner, place].set(jnp.moveaxis(values, 2, 0).astype(self.values.dtype)),
        )

    def read(
        self,
        queries: Float[Array, "B T N H"],
        call: CachedCall,
        window: int | None = None,
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """What `attention.attend` says of the same slots, summed in another order; zeros where nothing is seen."""
        pages: Pages = call.visible
        return walk(queries, self, pages, call.start, window, sinks)

    def copied(self, source: Int32[Array, " B"], target: Int32[Array, " B"]) -> PagedLayer:
        """With whole pages copied, in all layers where several are stacked; copies to page 0 are no copies."""
        return PagedLayer(*(pool.at[..., target, :, :].set(pool[..., source, :, :]) for pool in self))


class PagedCache(NamedTuple):
    """State of all layers (`PagedLayer` where it is attention, rows as ever where it is a recurrence), and angles.

    Used as `kv_cache.Cache` is.
    """

    layers: tuple[Any, ...]
    cos: jax.Array  # f32[S, h], h = 0 where nothing is turned
    sin: jax.Array  # f32[S, h]
    table: jax.Array  # i32[B, W, n]

    def angles_at(
        self, start: Int[Array, " B"], tokens: int
    ) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
        """Angles of the T slots from `start` on; start + T <= S."""
        return angles_of_slots(self.cos, self.sin, start, tokens)

    def seen(self, start: Int[Array, " B"], tokens: int, active: Array | None) -> Pages:
        """What the T queries at start, start + 1, ... are told; `active` tokens come first in each row."""
        real = tokens if active is None else jnp.sum(active, axis=1, dtype=jnp.int32)
        return Pages(self.table, start + real)


def is_paged(node: Any) -> bool:
    """Whether a node of a tree of states is a pool of pages."""
    return isinstance(node, PagedLayer)


def paged(cache: Cache, pages: int, page: int, table: Int32[Array, "B W n"]) -> PagedCache:
    """An empty cache of this kind in place of an empty dense one of as many rows, whose angles it takes over.

    The zeros of the dense one are read for their shapes only: in a compiled program they never exist.

    Args:
        cache: `Decoder.empty_cache`; its capacity is what a row may hold.
        pages: Q, page 0 included.
        page: slots of a page.
        table: of the rows; W * n pages hold the capacity.
    """
    if table.shape[1] * table.shape[2] * page < cache.capacity:
        raise ValueError(
            f"table={table.shape} of pages of {page} slots must hold capacity={cache.capacity}; give it more columns"
        )

    def pool(rows: Array) -> Array:
        *stacked, _, kv_heads, _, width = rows.shape
        return jnp.zeros((*stacked, kv_heads, pages, page, width), rows.dtype)

    def layer(state: Any) -> Any:
        return PagedLayer(pool(state.keys), pool(state.values)) if isinstance(state, LayerCache) else state

    layers = jax.tree.map(layer, cache.layers, is_leaf=lambda node: isinstance(node, LayerCache))
    return PagedCache(layers, cache.cos, cache.sin, table)


def walk(
    queries: Float[Array, "B T N H"],
    layer: PagedLayer,
    pages: Pages,
    start: Int[Array, " B"],
    window: int | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "B T N H"]:
    """Attention of T queries at start, start + 1, ... of each row over the slots of its pages that they see."""
    batch, tokens, heads, width = queries.shape
    kv_heads, _, page, _ = layer.keys.shape
    _, steps, columns = pages.table.shape
    group, reach = heads // kv_heads, columns * page  # slots of one step
    q = (queries * (width**-0.5)).reshape(batch, tokens, kv_heads, group, width).transpose(2, 0, 1, 3, 4)
    q = q.reshape(kv_heads, batch, tokens * group, width)
    places = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]

    def gathered(pool: Array, names: Array) -> Array:
        return pool.at[:, names].get(mode="promise_in_bounds").reshape(kv_heads, batch, reach, width)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, summed = carry
        names = jax.lax.dynamic_index_in_dim(pages.table, i, axis=1, keepdims=False)
        slots = i * reach + jnp.arange(reach, dtype=jnp.int32)[None]
        held = slots < pages.end[:, None]  # [B, n p]
        k, v = gathered(layer.keys, names), gathered(layer.values, names)  # [K, B, n p, H]
        v = jnp.where(held[None, :, :, None], v, jnp.zeros((), v.dtype))  # 0 * NaN would be NaN
        seen = held[:, None] & (slots[:, None] <= places[:, :, None])
        if window is not None:
            seen &= slots[:, None] > (places - window)[:, :, None]
        scores = jnp.einsum("kbxh,kbsh->kbxs", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.repeat(seen, group, axis=1)[None], scores, -jnp.inf)
        higher = jnp.maximum(most, jnp.max(scores, axis=-1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)  # nothing seen yet
        weights, kept = jnp.exp(scores - base[..., None]), jnp.exp(most - base)
        new = jnp.einsum("kbxs,kbsh->kbxh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total = total * kept + jnp.sum(weights, axis=-1)
        return higher, total, summed * kept[..., None] + new

    shape = (kv_heads, batch, tokens * group)
    if sinks is None:
        most, total = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, 1, 1, group)
        most = jnp.broadcast_to(sink, (kv_heads, batch, tokens, group)).reshape(shape)
        total = jnp.ones(shape, jnp.float32)
    carry = most, total, jnp.zeros((*shape, width), jnp.float32)
    if steps == 1:  # a loop of one turn keeps the compiler from fusing what is in it with what is around it
        _, total, summed = step(jnp.int32(0), carry)
    else:
        first = jnp.int32(0)
        if window is not None:  # by rows that have tokens: the others stand at 0
            earliest = jnp.min(jnp.where(pages.end > start, start, jnp.iinfo(jnp.int32).max))
            first = jnp.maximum(earliest - window + 1, 0) // reach
        last = jnp.minimum((jnp.max(pages.end) + reach - 1) // reach, steps)
        _, total, summed = jax.lax.fori_loop(first, last, step, carry)
    total = total[..., None]
    out = jnp.where(total > 0, summed / jnp.where(total > 0, total, 1.0), 0.0)
    out = out.reshape(kv_heads, batch, tokens, group, width).transpose(1, 2, 0, 3, 4)
    return out.reshape(batch, tokens, heads, width).astype(queries.dtype)
