"""Forward of block attention in Pallas: a program has a tile of queries of a head and loops over the keys it sees."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from pallas_kernels.block_attention.pallas_common import LOG2_E, Tiles, call, check, dot, sees
from pallas_kernels.block_attention.records import KeyRange, Partial
from pallas_kernels.block_attention.tuning import Tuning, pick


def forward(
    q: Array,
    k: Array,
    v: Array,
    seen: KeyRange,
    key_index: Int32[Array, " Tk"],
    *,
    scale: float,
    tuning: Tuning | None,
    interpret: bool,
) -> Partial:
    """See `api.block_attention`. All inputs vary over the same mesh axes."""
    check(interpret, q, k, v)
    blocks = (tuning or pick(q.shape[-1], q.dtype)).forward
    cut = Tiles(q, k, seen, key_index, blocks)
    specs = cut.query_specs()
    run = call(
        functools.partial(block_attention_forward, scale=scale, u=cut.u),
        grid=(cut.tiles_q, cut.heads, cut.rows),
        in_specs=specs,
        out_specs=[specs[0], pl.BlockSpec((None, cut.t, None), lambda a, n, r: (r, a, n))],
        out_shapes=[(cut.rows, cut.padded_q, cut.heads, cut.padded_width), (cut.rows, cut.padded_q, cut.heads)],
        like=q,
        blocks=blocks,
        interpret=interpret,
    )
    out, lse = run(cut.queries(q), cut.keys(k), cut.keys(v), cut.first, cut.last, cut.index, cut.low, cut.high)
    return Partial(out[:, : cut.count_q, :, : cut.width], lse[:, : cut.count_q])


def block_attention_forward(
    q_ref: Any,  # [t, H]
    k_ref: Any,  # [Tk, H]
    v_ref: Any,  # [Tk, H]
    first_ref: Any,  # i32[t]
    last_ref: Any,  # i32[t]
    index_ref: Any,  # i32[Tk]
    low_ref: Any,  # i32[]
    high_ref: Any,  # i32[]
    out_ref: Any,  # f32[t, H]
    lse_ref: Any,  # f32[t]
    *,
    scale: float,
    u: int,
) -> None:
    """The kernel. Running maximum, sum and output are float32, scores in base 2."""
    queries, first, last = q_ref[...], first_ref[...][:, None], last_ref[...][:, None]
    t, width = queries.shape

    def step(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        tile = pl.ds(b * u, u)
        visible = sees(first, last, index_ref[tile][None, :])
        scores = jnp.where(visible, dot(queries, k_ref[tile, :], (1, 1)) * (scale * LOG2_E), -jnp.inf)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp2(scores - safe[:, None])  # 0 where not visible
        keep = jnp.exp2(top - safe)
        values = v_ref[tile, :]
        added = dot(weights.astype(values.dtype), values, (1, 0))
        return new, total * keep + jnp.sum(weights, axis=1), out * keep[:, None] + added

    start = (jnp.full((t,), -jnp.inf, jnp.float32), jnp.zeros((t,), jnp.float32), jnp.zeros((t, width), jnp.float32))
    top, total, out = lax.fori_loop(low_ref[...], high_ref[...], step, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out_ref[...] = out / total[:, None]
    lse_ref[...] = jnp.where(some, top * math.log(2.0) + jnp.log(total), -jnp.inf)
