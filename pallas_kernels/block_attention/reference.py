"""Block attention in plain JAX: tiles of queries, each looping over the tiles of keys it sees, online softmax.

Memory is that of one tile of scores. The bounds of the inner loop come from the ranges of the tile's queries, so keys
that no query of a tile sees cost nothing. Rows that fit one tile are no loops at all: they are worked on side by side.
Nothing here is differentiated: forward and backward are both given.

Letters beside those of `records.py`: A query tiles of t, B key tiles of u, G = N / K, x = G t: all queries of a tile
that read one key-value head, so that every product is one plain matrix product for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.block_attention.records import KeyGrads, KeyRange, Partial, statistics_dtype
from pallas_kernels.manual_axes import fresh, varying_axes

Carry = TypeVar("Carry")
NO_KEY = jnp.iinfo(jnp.int32).max
"""Index of a padding key: above every `last`."""


class _Row(NamedTuple):
    """One row, cut into tiles."""

    q: jax.Array  # [A, K, x, H]
    k: jax.Array  # [B, K, u, H]
    v: jax.Array  # [B, K, u, H]
    first: jax.Array  # i32[A, x]
    last: jax.Array  # i32[A, x]
    low: jax.Array  # i32[A] first key tile seen
    high: jax.Array  # i32[A] one past the last


class _Query(NamedTuple):
    """What the backward knows of a tile of queries beside the queries."""

    lse: jax.Array  # [A, K, x]
    delta: jax.Array  # [A, K, x]
    d_out: jax.Array  # [A, K, x, H]


def forward(
    q: Array, k: Array, v: Array, seen: KeyRange, key_index: Int32[Array, " Tk"], *, scale: float, tile: int
) -> Partial:
    """See `api.block_attention`. All inputs vary over the same mesh axes."""
    cut = _Cut(q, k, tile)
    indices = cut.keys(key_index, NO_KEY)
    axes, stat = varying_axes(q), cut.stat

    def tile_of(row: _Row, a: Array) -> tuple[Array, Array]:
        queries, first, last = row.q[a], row.first[a], row.last[a]
        top = fresh(queries.shape[:-1], -jnp.inf, stat, axes)
        start = (top, jnp.zeros_like(top), fresh(queries.shape, 0.0, stat, axes))

        def step(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            visible = _visible(first, last, indices[b])
            scores = _scores(queries, row.k[b], visible, scale, stat)
            new = jnp.maximum(top, jnp.max(scores, axis=-1))
            safe = jnp.where(jnp.isneginf(new), 0.0, new)
            weights = jnp.exp(scores - safe[..., None])  # 0 where not visible
            keep = jnp.exp(top - safe)
            values = row.v[b]
            added = jnp.einsum("kxj,kjh->kxh", weights.astype(values.dtype), values, preferred_element_type=stat)
            return new, total * keep + jnp.sum(weights, axis=-1), out * keep[..., None] + added

        top, total, out = cut.loop(row.low[a], row.high[a], step, start)
        some = total > 0
        total = jnp.where(some, total, 1.0)
        return out / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)

    def one_row(row: _Row) -> tuple[Array, Array]:
        return cut.map(lambda a: tile_of(row, a), cut.tile_numbers)

    out, lse = cut.map(one_row, cut.rows(q, k, v, seen, indices))
    return Partial(cut.queries_back(out), cut.queries_back(lse[..., None])[..., 0])


def backward(
    q: Array,
    k: Array,
    v: Array,
    seen: KeyRange,
    key_index: Int32[Array, " Tk"],
    lse: Array,
    delta: Array,
    d_out: Array,
    *,
    scale: float,
    tile: int,
) -> KeyGrads:
    """See `api.block_attention_backward`. All inputs vary over the same mesh axes."""
    cut = _Cut(q, k, tile)
    indices = cut.keys(key_index, NO_KEY)
    axes, stat = varying_axes(q), cut.stat
    # A query without any key has lse -inf; it has no visible key here either, so the value put there is never used.
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    given = _Query(cut.queries(lse[..., None])[..., 0], cut.queries(delta[..., None])[..., 0], cut.queries(d_out))

    def one_row(inputs: tuple[_Row, _Query]) -> tuple[Array, Array, Array]:
        row, query = inputs
        zeros = fresh(row.k.shape, 0.0, stat, axes)

        def tile_of(kv: tuple[Array, Array], a: Array) -> tuple[tuple[Array, Array], Array]:
            queries, cotangent = row.q[a], query.d_out[a]
            start = (fresh(queries.shape, 0.0, stat, axes), *kv)

            def step(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                dq, dk, dv = carry
                keys, values = row.k[b], row.v[b]
                visible = _visible(row.first[a], row.last[a], indices[b])
                scores = _scores(queries, keys, visible, scale, stat)
                weights = jnp.exp(scores - query.lse[a][..., None])
                d_weights = jnp.einsum("kxh,kjh->kxj", cotangent, values, preferred_element_type=stat)
                d_scores = weights * (d_weights - query.delta[a][..., None]) * scale
                low = d_scores.astype(keys.dtype)
                dq = dq + jnp.einsum("kxj,kjh->kxh", low, keys, preferred_element_type=stat)
                own_k = _over_queries(low, queries, stat)
                own_v = _over_queries(weights.astype(cotangent.dtype), cotangent, stat)
                return dq, _add_at(dk, own_k, b), _add_at(dv, own_v, b)

            dq, dk, dv = cut.loop(row.low[a], row.high[a], step, start)
            return (dk, dv), dq

        (dk, dv), dq = lax.scan(tile_of, (zeros, zeros), cut.tile_numbers)
        return dq, dk, dv

    dq, dk, dv = cut.map(one_row, (cut.rows(q, k, v, seen, indices), given))
    return KeyGrads(cut.queries_back(dq), cut.keys_back(dk), cut.keys_back(dv))


class _Cut:
    """How arrays of one call are cut into tiles and put together again."""

    def __init__(self, q: Array, k: Array, tile: int) -> None:
        _, self.count_q, heads, _ = q.shape
        self.count_k, self.kv_heads = k.shape[1], k.shape[2]
        self.group = heads // self.kv_heads
        self.tile_q, self.tile_k = max(min(tile, self.count_q), 1), max(min(tile, self.count_k), 1)
        self.tiles_q = max(-(-self.count_q // self.tile_q), 1)
        self.tiles_k = max(-(-self.count_k // self.tile_k), 1)
        self.stat = statistics_dtype(q.dtype)
        self.tile_numbers = jnp.arange(self.tiles_q, dtype=jnp.int32)

    def loop(self, low: Array, high: Array, step: Callable[[Array, Carry], Carry], start: Carry) -> Carry:
        """Fold over the tiles low..high-1 of keys; over the only one, whatever it shows, where there is one."""
        if self.tiles_k == 1:
            return step(jnp.int32(0), start)
        return lax.fori_loop(low, high, step, start)

    def map(self, fn: Callable[[Any], Any], xs: Any) -> Any:
        """One after the other, so that loop bounds stay scalars; side by side where there are no loops."""
        one_tile = self.tiles_q == 1 and self.tiles_k == 1
        return jax.vmap(fn)(xs) if one_tile else lax.map(fn, xs)

    def keys(self, x: Array, fill: int = 0) -> Array:
        """[Tk] -> [B, u], padded with `fill`."""
        return pad(x, 0, self.tiles_k * self.tile_k, fill).reshape(self.tiles_k, self.tile_k)

    def queries(self, x: Array) -> Array:
        """[R, Tq, N, H] -> [R, A, K, x, H]."""
        rows, _, _, width = x.shape
        x = pad(x, 1, self.tiles_q * self.tile_q)
        x = x.reshape(rows, self.tiles_q, self.tile_q, self.kv_heads, self.group, width)
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(rows, self.tiles_q, self.kv_heads, -1, width)

    def queries_back(self, x: Array) -> Array:
        """[R, A, K, x, H] -> [R, Tq, N, H]."""
        rows, width = x.shape[0], x.shape[-1]
        x = x.reshape(rows, self.tiles_q, self.kv_heads, self.group, self.tile_q, width).transpose(0, 1, 4, 2, 3, 5)
        return x.reshape(rows, self.tiles_q * self.tile_q, -1, width)[:, : self.count_q]

    def keys_back(self, x: Array) -> Array:
        """[R, B, K, u, H] -> [R, Tk, K, H]."""
        rows, _, _, _, width = x.shape
        x = x.transpose(0, 1, 3, 2, 4).reshape(rows, self.tiles_k * self.tile_k, self.kv_heads, width)
        return x[:, : self.count_k]

    def rows(self, q: Array, k: Array, v: Array, seen: KeyRange, indices: Int32[Array, "B u"]) -> _Row:
        """All inputs in tiles, and which tiles of keys each tile of queries sees."""
        rows, size = q.shape[0], self.tiles_k * self.tile_k
        kv = [
            pad(x, 1, size).reshape(rows, self.tiles_k, self.tile_k, self.kv_heads, -1).transpose(0, 1, 3, 2, 4)
            for x in (k, v)
        ]
        shape = (rows, self.tiles_q, self.tile_q)
        first, last = (
            pad(x, 1, self.tiles_q * self.tile_q, fill).reshape(shape) for x, fill in zip(seen, (1, 0), strict=True)
        )
        low, high = tile_bounds(first, last, indices)
        # The heads of a group stand one after the other.
        first, last = (jnp.concatenate([x] * self.group, axis=-1) for x in (first, last))
        return _Row(self.queries(q), kv[0], kv[1], first, last, low, high)


def tile_bounds(
    first: Int32[Array, "*b t"], last: Int32[Array, "*b t"], indices: Int32[Array, "B u"]
) -> tuple[Int32[Array, "*b"], Int32[Array, "*b"]]:
    """Tiles low..high-1 of keys that hold all keys a tile of queries sees; low >= high where it sees none.

    Keys are in increasing order, padding last.
    """
    some = first <= last
    lowest = jnp.min(jnp.where(some, first, NO_KEY), axis=-1)
    highest = jnp.max(jnp.where(some, last, -1), axis=-1)
    # The last real key of a tile: padding would make a tile reach further than it does.
    ends = jnp.max(jnp.where(indices == NO_KEY, -1, indices), axis=-1)
    ends = jnp.where(ends < 0, NO_KEY, ends)
    starts, ends = (x.reshape((1,) * lowest.ndim + x.shape) for x in (indices[:, 0], ends))
    low = jnp.sum(ends < lowest[..., None], axis=-1, dtype=jnp.int32)
    high = jnp.sum(starts <= highest[..., None], axis=-1, dtype=jnp.int32)
    return low, high


def _visible(first: Int32[Array, " x"], last: Int32[Array, " x"], index: Int32[Array, " u"]) -> Bool[Array, "x u"]:
    return (index[None, :] >= first[:, None]) & (index[None, :] <= last[:, None])


def _scores(q: Array, k: Array, visible: Bool[Array, "x u"], scale: float, stat: jnp.dtype) -> Array:
    """[K, x, u], -inf where not visible, so that exp of it minus anything finite is exactly 0."""
    scores = jnp.einsum("kxh,kjh->kxj", q, k, preferred_element_type=stat) * scale
    return jnp.where(visible[None], scores, -jnp.inf)


def _over_queries(weights: Array, values: Array, stat: jnp.dtype) -> Array:
    """[K, x, u], [K, x, H] -> [K, u, H]. Turned first: XLA on a CPU is three times slower at it otherwise."""
    return jnp.einsum("kjx,kxh->kjh", jnp.swapaxes(weights, 1, 2), values, preferred_element_type=stat)


def _add_at(total: Array, part: Array, place: Array) -> Array:
    row = lax.dynamic_index_in_dim(total, place, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, row + part, place, 0)


def pad(x: Array, axis: int, size: int, fill: int = 0) -> Array:
    """`x` with `fill` behind it along one axis, up to `size`; itself where it is as long."""
    if x.shape[axis] == size:
        return x
    widths = [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)
