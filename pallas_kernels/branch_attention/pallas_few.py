"""Route "few" in Pallas: several branches of one key-value head a program, keys one after another, on vector units.

Tiles are [rows, branches, lanes]: rows first, so that adding up the rows of a key (dk, dv) stays within a thread.
Keys of a branch that is not live are never read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.branch_attention.records import Rule
from pallas_kernels.branch_attention.tuning import Dims, Launch
from pallas_kernels.gpu import power_above

Ref = Any


class _Tile(NamedTuple):
    number: Array  # which tile of branches
    kv_head: Array
    row: tuple[Array, Array, Array]  # branch, query, head of each row, [rows, branches] when broadcast
    row_ok: Array  # bool[rows, branches]
    branch: Array  # i32[branches]
    live: Array  # bool[branches]
    lane: Array  # i32[lanes]


def _tile(live_ref: Ref, dims: Dims, launch: Launch) -> _Tile:
    program = pl.program_id(0)
    kv_head, number = lax.rem(program, dims.kv_heads), lax.div(program, dims.kv_heads)
    branch = number * launch.branches + jnp.arange(launch.branches, dtype=jnp.int32)
    row = jnp.arange(power_above(dims.rows), dtype=jnp.int32)[:, None]
    query = lax.div(row, jnp.full_like(row, dims.group))
    head = kv_head * dims.group + lax.rem(row, jnp.full_like(row, dims.group))
    there = branch < dims.branches
    live = plgpu.load(live_ref.at[branch], mask=there, other=0) != 0
    return _Tile(
        number=number,
        kv_head=kv_head,
        row=(branch[None, :], query, head),
        row_ok=(row < dims.rows) & there[None, :],
        branch=branch,
        live=live & there,
        lane=jnp.arange(dims.lanes, dtype=jnp.int32),
    )


def _wide(tile: _Tile, dims: Dims) -> tuple[tuple[Array, ...], Array]:
    """Index and mask of [rows, branches, lanes]."""
    branch, query, head = tile.row
    lane = tile.lane[None, None, :]
    return (branch[:, :, None], query[:, :, None], head[:, :, None], lane), tile.row_ok[:, :, None] & (
        lane < dims.width
    )


def _key(tile: _Tile, dims: Dims, i: int) -> tuple[tuple[Any, ...], Array, Array]:
    """Index of key i, mask for reading it (live branches) and for writing it (all), [branches, lanes]."""
    lane = tile.lane[None, :]
    inside = lane < dims.width
    index = (tile.branch[:, None], i, tile.kv_head, lane)
    return index, tile.live[:, None] & inside, (tile.branch < dims.branches)[:, None] & inside


def _read(ref: Ref, index: tuple[Any, ...], mask: Array) -> Array:
    return plgpu.load(ref.at[index], mask=mask, other=0.0).astype(jnp.float32)


def _seen(tile: _Tile, i: int, rule: Rule) -> Array:
    """Rows that see key i, [rows, branches]."""
    live = tile.row_ok & tile.live[None, :]
    return live & (tile.row[1] >= i) if rule == "causal" else live


def forward_kernel(*refs: Ref, dims: Dims, launch: Launch, scale: float, rule: Rule, sinks: bool) -> None:
    """Refs: q, trunk out, trunk lse, keys, values, live[, sinks] -> out, lse."""
    q_ref, trunk_ref, trunk_lse_ref, k_ref, v_ref, live_ref = refs[:6]
    out_ref, lse_ref = refs[-2:]
    tile = _tile(live_ref, dims, launch)
    wide, wide_ok = _wide(tile, dims)
    q = _read(q_ref, wide, wide_ok)
    trunk_lse = plgpu.load(trunk_lse_ref.at[tile.row], mask=tile.row_ok, other=-jnp.inf)
    top, scores = trunk_lse, []
    for i in range(dims.keys):
        index, readable, _ = _key(tile, dims, i)
        score = jnp.sum(q * _read(k_ref, index, readable)[None], axis=-1) * scale
        scores.append(jnp.where(_seen(tile, i, rule), score, -jnp.inf))
        top = jnp.maximum(top, scores[-1])
    if sinks:
        sink = plgpu.load(refs[6].at[tile.row[2]], mask=tile.row[1] < dims.queries, other=-jnp.inf)
        top = jnp.maximum(top, sink)
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    total = jnp.exp(trunk_lse - safe)
    out = _read(trunk_ref, wide, wide_ok) * total[:, :, None]
    for i in range(dims.keys):
        index, readable, _ = _key(tile, dims, i)
        weight = jnp.exp(scores[i] - safe)
        total += weight
        out += weight[:, :, None] * _read(v_ref, index, readable)[None]
    if sinks:
        total += jnp.exp(sink - safe)  # pyright: ignore[reportPossiblyUnboundVariable]
    some = total > 0
    total = jnp.where(some, total, 1.0)
    plgpu.store(out_ref.at[wide], (out / total[:, :, None]).astype(out_ref.dtype), mask=wide_ok)
    plgpu.store(lse_ref.at[tile.row], jnp.where(some, safe + jnp.log(total), -jnp.inf), mask=tile.row_ok)


def backward_kernel(*refs: Ref, dims: Dims, launch: Launch, scale: float, rule: Rule, sinks: bool) -> None:
    """Refs: q, dout, lse, delta, keys, values, live[, sinks] -> dq, dk, dv[, dsinks of each tile]."""
    q_ref, d_out_ref, lse_ref, delta_ref, k_ref, v_ref, live_ref = refs[:7]
    dq_ref, dk_ref, dv_ref = refs[8:11] if sinks else refs[7:10]
    tile = _tile(live_ref, dims, launch)
    wide, wide_ok = _wide(tile, dims)
    q, d_out = _read(q_ref, wide, wide_ok), _read(d_out_ref, wide, wide_ok)
    lse = plgpu.load(lse_ref.at[tile.row], mask=tile.row_ok, other=-jnp.inf)
    delta = plgpu.load(delta_ref.at[tile.row], mask=tile.row_ok, other=0.0)
    empty = lse == -jnp.inf
    lse = jnp.where(empty, 0.0, lse)
    dq = jnp.zeros_like(q)
    for i in range(dims.keys):
        index, readable, writable = _key(tile, dims, i)
        k, v = _read(k_ref, index, readable), _read(v_ref, index, readable)
        score = jnp.sum(q * k[None], axis=-1) * scale
        # Masked before exp: what is not seen may lie far above lse.
        weight = jnp.exp(jnp.where(_seen(tile, i, rule), score - lse, -jnp.inf))
        d_score = weight * (jnp.sum(d_out * v[None], axis=-1) - delta) * scale
        dq += d_score[:, :, None] * k[None]
        plgpu.store(dk_ref.at[index], jnp.sum(d_score[:, :, None] * q, axis=0), mask=writable)
        plgpu.store(dv_ref.at[index], jnp.sum(weight[:, :, None] * d_out, axis=0), mask=writable)
    plgpu.store(dq_ref.at[wide], dq, mask=wide_ok)
    if sinks:
        _, query, head = tile.row
        sink = plgpu.load(refs[7].at[head], mask=query < dims.queries, other=-jnp.inf)
        taken = jnp.where(empty, 0.0, jnp.exp(sink - lse) * delta)
        index = (tile.number, query[:, 0], head[:, 0])
        plgpu.store(refs[11].at[index], -jnp.sum(taken, axis=1), mask=query[:, 0] < dims.queries)
