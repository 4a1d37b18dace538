"""Route "block" in Pallas: one branch of one key-value head a program, its queries times its keys as matrix products.

Rows are queries times query heads of the key-value head. The forward takes a chunk of rows a program; the backward goes
through the chunks in a loop, since the gradients of the keys are sums over all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.branch_attention.records import Rule
from pallas_kernels.branch_attention.tuning import SMALLEST_DOT, Dims, Launch
from pallas_kernels.gpu import power_above

Ref = Any


class _Rows(NamedTuple):
    index: tuple[Any, ...]  # branch, query, head
    ok: Array  # bool[rows]
    wide: tuple[Any, ...]  # branch, query, head, lane
    wide_ok: Array  # bool[rows, lanes]


class _Keys(NamedTuple):
    index: tuple[Any, ...]  # branch, key, key-value head, lane
    place: Array  # i32[keys]
    readable: Array  # bool[keys, lanes] of a live branch
    writable: Array  # bool[keys, lanes]
    live: Array  # bool[]


def chunks(dims: Dims, launch: Launch) -> int:
    """Chunks of rows of a branch."""
    return pl.cdiv(dims.rows, launch.rows)


def _lanes(dims: Dims) -> tuple[Array, Array]:
    lane = jnp.arange(dims.lanes, dtype=jnp.int32)[None, :]
    return lane, lane < dims.width


def _rows(branch: Array, kv_head: Array, chunk: Array | int, dims: Dims, launch: Launch) -> _Rows:
    row = chunk * launch.rows + jnp.arange(launch.rows, dtype=jnp.int32)
    group = jnp.full_like(row, dims.group)
    query, head = lax.div(row, group), kv_head * dims.group + lax.rem(row, group)
    lane, inside = _lanes(dims)
    ok = row < dims.rows
    wide = (branch, query[:, None], head[:, None], lane)
    return _Rows((branch, query, head), ok, wide, ok[:, None] & inside)


def _keys(live_ref: Ref, branch: Array, kv_head: Array, dims: Dims) -> _Keys:
    place = jnp.arange(max(power_above(dims.keys), SMALLEST_DOT), dtype=jnp.int32)
    lane, inside = _lanes(dims)
    live = live_ref[branch] != 0
    writable = (place < dims.keys)[:, None] & inside
    return _Keys((branch, place[:, None], kv_head, lane), place, writable & live, writable, live)


def _seen(rows: _Rows, keys: _Keys, dims: Dims, rule: Rule) -> Array:
    """bool[rows, keys]."""
    seen = (rows.ok & keys.live)[:, None] & (keys.place < dims.keys)[None, :]
    return seen & (keys.place[None, :] <= rows.index[1][:, None]) if rule == "causal" else seen


def _dot(a: Array, b: Array) -> Array:
    """float32 product; of float32 numbers without the shortened mantissa of TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _read(ref: Ref, index: tuple[Any, ...], mask: Array) -> Array:
    return plgpu.load(ref.at[index], mask=mask, other=0.0)


def forward_kernel(*refs: Ref, dims: Dims, launch: Launch, scale: float, rule: Rule, sinks: bool) -> None:
    """Refs: q, trunk out, trunk lse, keys, values, live[, sinks] -> out, lse."""
    q_ref, trunk_ref, trunk_lse_ref, k_ref, v_ref, live_ref = refs[:6]
    out_ref, lse_ref = refs[-2:]
    program, count = pl.program_id(0), chunks(dims, launch)
    chunk, pair = lax.rem(program, count), lax.div(program, count)
    kv_head, branch = lax.rem(pair, dims.kv_heads), lax.div(pair, dims.kv_heads)
    rows, keys = _rows(branch, kv_head, chunk, dims, launch), _keys(live_ref, branch, kv_head, dims)
    trunk_lse = plgpu.load(trunk_lse_ref.at[rows.index], mask=rows.ok, other=-jnp.inf)
    scores = _dot(_read(q_ref, rows.wide, rows.wide_ok), _read(k_ref, keys.index, keys.readable).T) * scale
    scores = jnp.where(_seen(rows, keys, dims, rule), scores, -jnp.inf)
    top = jnp.maximum(trunk_lse, jnp.max(scores, axis=1))
    if sinks:
        sink = plgpu.load(refs[6].at[rows.index[2]], mask=rows.ok, other=-jnp.inf)
        top = jnp.maximum(top, sink)
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    trunk_weight, weights = jnp.exp(trunk_lse - safe), jnp.exp(scores - safe[:, None])
    total = trunk_weight + jnp.sum(weights, axis=1)
    if sinks:
        total += jnp.exp(sink - safe)  # pyright: ignore[reportPossiblyUnboundVariable]
    values = _read(v_ref, keys.index, keys.readable)
    out = _read(trunk_ref, rows.wide, rows.wide_ok) * trunk_weight[:, None] + _dot(weights.astype(values.dtype), values)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    plgpu.store(out_ref.at[rows.wide], (out / total[:, None]).astype(out_ref.dtype), mask=rows.wide_ok)
    plgpu.store(lse_ref.at[rows.index], jnp.where(some, safe + jnp.log(total), -jnp.inf), mask=rows.ok)


def backward_kernel(*refs: Ref, dims: Dims, launch: Launch, scale: float, rule: Rule, sinks: bool) -> None:
    """Refs: q, dout, lse, delta, keys, values, live[, sinks] -> dq, dk, dv[, dsinks of each query]."""
    q_ref, d_out_ref, lse_ref, delta_ref, k_ref, v_ref, live_ref = refs[:7]
    dq_ref, dk_ref, dv_ref = refs[8:11] if sinks else refs[7:10]
    program = pl.program_id(0)
    kv_head, branch = lax.rem(program, dims.kv_heads), lax.div(program, dims.kv_heads)
    keys = _keys(live_ref, branch, kv_head, dims)
    k, v = _read(k_ref, keys.index, keys.readable), _read(v_ref, keys.index, keys.readable)

    def add_chunk(chunk: Array | int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = _rows(branch, kv_head, chunk, dims, launch)
        q, d_out = _read(q_ref, rows.wide, rows.wide_ok), _read(d_out_ref, rows.wide, rows.wide_ok)
        lse = plgpu.load(lse_ref.at[rows.index], mask=rows.ok, other=-jnp.inf)
        delta = plgpu.load(delta_ref.at[rows.index], mask=rows.ok, other=0.0)
        empty = lse == -jnp.inf
        lse = jnp.where(empty, 0.0, lse)
        scores = _dot(q, k.T) * scale
        # Masked before exp: what is not seen may lie far above lse.
        weights = jnp.exp(jnp.where(_seen(rows, keys, dims, rule), scores - lse[:, None], -jnp.inf))
        d_scores = (weights * (_dot(d_out, v.T) - delta[:, None]) * scale).astype(k.dtype)
        plgpu.store(dq_ref.at[rows.wide], _dot(d_scores, k), mask=rows.wide_ok)
        if sinks:
            sink = plgpu.load(refs[7].at[rows.index[2]], mask=rows.ok, other=-jnp.inf)
            taken = jnp.where(empty, 0.0, jnp.exp(sink - lse) * delta)
            plgpu.store(refs[11].at[rows.index], -taken, mask=rows.ok)
        dk, dv = sums
        return dk + _dot(d_scores.T, q), dv + _dot(weights.astype(k.dtype).T, d_out)

    zeros = jnp.zeros((keys.place.shape[0], dims.lanes), jnp.float32)
    count = chunks(dims, launch)
    sums = add_chunk(0, (zeros, zeros)) if count == 1 else lax.fori_loop(0, count, add_chunk, (zeros, zeros))
    plgpu.store(dk_ref.at[keys.index], sums[0], mask=keys.writable)
    plgpu.store(dv_ref.at[keys.index], sums[1], mask=keys.writable)
