"""Backward of block attention in Pallas: one kernel for the queries, one for keys and values.

Two kernels, each of which owns what it writes, so no sum depends on the order in which programs run: the same inputs
give the same bits. The price is that scores are made twice.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32, Int32

from pallas_kernels.block_attention.pallas_common import LOG2_E, Tiles, call, check, dot, sees
from pallas_kernels.block_attention.records import KeyGrads, KeyRange
from pallas_kernels.block_attention.tuning import Blocks, Tuning, pick


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
    tuning: Tuning | None,
    interpret: bool,
) -> KeyGrads:
    """See `api.block_attention_backward`. All inputs vary over the same mesh axes."""
    check(interpret, q, k, v, d_out)
    tuning = tuning or pick(q.shape[-1], q.dtype)
    # A query without any key has lse -inf; it has no visible key here either, so the value put there is never used.
    log2 = jnp.where(jnp.isneginf(lse), 0.0, lse) * LOG2_E
    options = {"scale": scale, "interpret": interpret}
    dq = _queries(q, k, v, seen, key_index, log2, delta, d_out, blocks=tuning.dq, **options)
    dk, dv = _keys(q, k, v, seen, key_index, log2, delta, d_out, blocks=tuning.dkv, **options)
    return KeyGrads(dq, dk, dv)


def _queries(
    q: Array,
    k: Array,
    v: Array,
    seen: KeyRange,
    key_index: Int32[Array, " Tk"],
    log2: Float32[Array, "R Tq N"],
    delta: Float32[Array, "R Tq N"],
    d_out: Array,
    *,
    scale: float,
    blocks: Blocks,
    interpret: bool,
) -> Float32[Array, "R Tq N H"]:
    cut = Tiles(q, k, seen, key_index, blocks)
    specs = cut.query_specs()
    statistic = pl.BlockSpec((None, None, cut.t), lambda a, n, r: (r, n, a))
    run = call(
        functools.partial(block_attention_dq, scale=scale, u=cut.u),
        grid=(cut.tiles_q, cut.heads, cut.rows),
        in_specs=[*specs, statistic, statistic, specs[0]],
        out_specs=specs[:1],
        out_shapes=[(cut.rows, cut.padded_q, cut.heads, cut.padded_width)],
        like=q,
        blocks=blocks,
        interpret=interpret,
    )
    (dq,) = run(
        *(cut.queries(q), cut.keys(k), cut.keys(v), cut.first, cut.last, cut.index, cut.low, cut.high),
        *(cut.statistic(log2), cut.statistic(delta), cut.queries(d_out)),
    )
    return dq[:, : cut.count_q, :, : cut.width]


def _keys(
    q: Array,
    k: Array,
    v: Array,
    seen: KeyRange,
    key_index: Int32[Array, " Tk"],
    log2: Float32[Array, "R Tq N"],
    delta: Float32[Array, "R Tq N"],
    d_out: Array,
    *,
    scale: float,
    blocks: Blocks,
    interpret: bool,
) -> tuple[Float32[Array, "R Tk K H"], Float32[Array, "R Tk K H"]]:
    cut = Tiles(q, k, seen, key_index, blocks)
    specs = cut.key_specs()
    statistic = pl.BlockSpec((None, cut.group, cut.padded_q), lambda b, h, r: (r, h, 0))
    run = call(
        functools.partial(block_attention_dkv, scale=scale, t=cut.t),
        grid=(cut.tiles_k, cut.kv_heads, cut.rows),
        in_specs=[*specs, statistic, statistic, specs[0]],
        out_specs=specs[1:3],
        out_shapes=[(cut.rows, cut.padded_k, cut.kv_heads, cut.padded_width)] * 2,
        like=q,
        blocks=blocks,
        interpret=interpret,
    )
    low, high = cut.query_tiles_of_keys()
    dk, dv = run(
        *(cut.queries(q), cut.keys(k), cut.keys(v), cut.first, cut.last, cut.index, low, high),
        *(cut.statistic(log2), cut.statistic(delta), cut.queries(d_out)),
    )
    return dk[:, : cut.count_k, :, : cut.width], dv[:, : cut.count_k, :, : cut.width]


def block_attention_dq(
    q_ref: Any,  # [t, H]
    k_ref: Any,  # [Tk, H]
    v_ref: Any,  # [Tk, H]
    first_ref: Any,  # i32[t]
    last_ref: Any,  # i32[t]
    index_ref: Any,  # i32[Tk]
    low_ref: Any,  # i32[]
    high_ref: Any,  # i32[]
    log2_ref: Any,  # f32[t] merged lse in base 2
    delta_ref: Any,  # f32[t]
    d_out_ref: Any,  # [t, H]
    dq_ref: Any,  # f32[t, H]
    *,
    scale: float,
    u: int,
) -> None:
    """The kernel of the queries: a tile of them, looping over the tiles of keys it sees."""
    queries, cotangent = q_ref[...], d_out_ref[...]
    first, last = first_ref[...][:, None], last_ref[...][:, None]
    log2, delta = log2_ref[...][:, None], delta_ref[...][:, None]

    def step(b: Array, dq: Array) -> Array:
        tile = pl.ds(b * u, u)
        keys, values = k_ref[tile, :], v_ref[tile, :]
        visible = sees(first, last, index_ref[tile][None, :])
        scores = jnp.where(visible, dot(queries, keys, (1, 1)) * (scale * LOG2_E), -jnp.inf)
        weights = jnp.exp2(scores - log2)
        d_scores = weights * (dot(cotangent, values, (1, 1)) - delta)
        return dq + dot(d_scores.astype(keys.dtype), keys, (1, 0))

    dq = lax.fori_loop(low_ref[...], high_ref[...], step, jnp.zeros(queries.shape, jnp.float32))
    dq_ref[...] = dq * scale


def block_attention_dkv(
    q_ref: Any,  # [Tq, G, H]
    k_ref: Any,  # [u, H]
    v_ref: Any,  # [u, H]
    first_ref: Any,  # i32[Tq]
    last_ref: Any,  # i32[Tq]
    index_ref: Any,  # i32[u]
    low_ref: Any,  # i32[]
    high_ref: Any,  # i32[]
    log2_ref: Any,  # f32[G, Tq] merged lse in base 2
    delta_ref: Any,  # f32[G, Tq]
    d_out_ref: Any,  # [Tq, G, H]
    dk_ref: Any,  # f32[u, H]
    dv_ref: Any,  # f32[u, H]
    *,
    scale: float,
    t: int,
) -> None:
    """The kernel of keys and values: a tile of them, looping over the heads of its group and the queries that see it.

    Scores are made transposed, [u, t], so that they are the left side of both products without a transpose.
    """
    keys, values, index = k_ref[...], v_ref[...], index_ref[...][:, None]
    low, high = low_ref[...], high_ref[...]

    def head(g: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        def step(a: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            tile = pl.ds(a * t, t)
            queries, cotangent = q_ref[tile, g, :], d_out_ref[tile, g, :]
            visible = sees(first_ref[tile][None, :], last_ref[tile][None, :], index)
            scores = jnp.where(visible, dot(keys, queries, (1, 1)) * (scale * LOG2_E), -jnp.inf)
            weights = jnp.exp2(scores - log2_ref[g, tile][None, :])
            dv = dv + dot(weights.astype(cotangent.dtype), cotangent, (1, 0))
            d_scores = weights * (dot(values, cotangent, (1, 1)) - delta_ref[g, tile][None, :])
            return dk + dot(d_scores.astype(queries.dtype), queries, (1, 0)), dv

        return lax.fori_loop(low, high, step, sums)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, q_ref.shape[1], head, (zeros, zeros))
    dk_ref[...] = dk * scale
    dv_ref[...] = dv
