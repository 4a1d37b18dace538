# Pointers have no type that Python knows, and "tl.constexpr" is a mark for Triton, not a type.
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
"""Route "few" in Triton's language: the kernels of `pallas_few`, pointers instead of refs.

Kernels are made inside of functions, since Triton is only imported where they are used; it reads their source.
"""

from __future__ import annotations

from typing import Any, no_type_check


@no_type_check  # a wrapper that checks types would hide the source from Triton
def forward_kernel(triton: Any, tl: Any) -> Any:
    """Arguments: q, trunk out, trunk lse, keys, values, live, sinks -> out, lse."""

    @triton.jit
    def branch_forward_few(
        q_ptr,
        trunk_ptr,
        trunk_lse_ptr,
        k_ptr,
        v_ptr,
        live_ptr,
        sinks_ptr,
        out_ptr,
        lse_ptr,
        scale: tl.constexpr,
        BRANCHES: tl.constexpr,
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        TILE: tl.constexpr,
        ROWS: tl.constexpr,
        LANES: tl.constexpr,
        CAUSAL: tl.constexpr,
        SINKS: tl.constexpr,
    ):
        GROUP: tl.constexpr = HEADS // KV_HEADS
        program = tl.program_id(0)
        kv_head = program % KV_HEADS
        branch = (program // KV_HEADS) * TILE + tl.arange(0, TILE)
        there = branch < BRANCHES
        live = (tl.load(live_ptr + branch, mask=there, other=0) != 0) & there
        row = tl.arange(0, ROWS)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        lane = tl.arange(0, LANES)
        row_ok = (row < QUERIES * GROUP)[:, None] & there[None, :]
        stat = (branch[None, :] * QUERIES + query[:, None]) * HEADS + head[:, None]
        wide = stat[:, :, None] * WIDTH + lane[None, None, :]
        wide_ok = row_ok[:, :, None] & (lane < WIDTH)[None, None, :]
        q = tl.load(q_ptr + wide, mask=wide_ok, other=0.0).to(tl.float32)
        trunk_lse = tl.load(trunk_lse_ptr + stat, mask=row_ok, other=float("-inf"))
        # Running maximum, sum and output start as those of the trunk; keys then join one after another.
        top = trunk_lse
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=row < QUERIES * GROUP, other=float("-inf"))[:, None]
            top = tl.maximum(top, sink)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(trunk_lse - safe)
        total = weight
        if SINKS:
            total += tl.exp(sink - safe)
        out = tl.load(trunk_ptr + wide, mask=wide_ok, other=0.0) * weight[:, :, None]
        key_ok = live[:, None] & (lane < WIDTH)[None, :]
        for i in tl.static_range(KEYS):
            key = ((branch[:, None] * KEYS + i) * KV_HEADS + kv_head) * WIDTH + lane[None, :]
            k = tl.load(k_ptr + key, mask=key_ok, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + key, mask=key_ok, other=0.0).to(tl.float32)
            seen = row_ok & live[None, :]
            if CAUSAL:
                seen = seen & (query >= i)[:, None]
            score = tl.where(seen, tl.sum(q * k[None, :, :], axis=2) * scale, float("-inf"))
            higher = tl.maximum(top, score)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            keep = tl.exp(top - safe)
            weight = tl.exp(score - safe)
            total = total * keep + weight
            out = out * keep[:, :, None] + weight[:, :, None] * v[None, :, :]
            top = higher
        safe = tl.where(top == float("-inf"), 0.0, top)
        some = total > 0
        total = tl.where(some, total, 1.0)
        tl.store(out_ptr + wide, (out / total[:, :, None]).to(out_ptr.dtype.element_ty), mask=wide_ok)
        tl.store(lse_ptr + stat, tl.where(some, safe + tl.log(total), float("-inf")), mask=row_ok)

    return branch_forward_few


@no_type_check  # a wrapper that checks types would hide the source from Triton
def backward_kernel(triton: Any, tl: Any) -> Any:
    """Arguments: q, dout, lse, delta, keys, values, live, sinks -> dq, dk, dv, dsinks of each tile."""

    @triton.jit
    def branch_backward_few(
        q_ptr,
        d_out_ptr,
        lse_ptr,
        delta_ptr,
        k_ptr,
        v_ptr,
        live_ptr,
        sinks_ptr,
        dq_ptr,
        dk_ptr,
        dv_ptr,
        d_sinks_ptr,
        scale: tl.constexpr,
        BRANCHES: tl.constexpr,
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        TILE: tl.constexpr,
        ROWS: tl.constexpr,
        LANES: tl.constexpr,
        CAUSAL: tl.constexpr,
        SINKS: tl.constexpr,
    ):
        GROUP: tl.constexpr = HEADS // KV_HEADS
        program = tl.program_id(0)
        kv_head = program % KV_HEADS
        tile = program // KV_HEADS
        branch = tile * TILE + tl.arange(0, TILE)
        there = branch < BRANCHES
        live = (tl.load(live_ptr + branch, mask=there, other=0) != 0) & there
        row = tl.arange(0, ROWS)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        lane = tl.arange(0, LANES)
        inside = lane < WIDTH
        row_ok = (row < QUERIES * GROUP)[:, None] & there[None, :]
        stat = (branch[None, :] * QUERIES + query[:, None]) * HEADS + head[:, None]
        wide = stat[:, :, None] * WIDTH + lane[None, None, :]
        wide_ok = row_ok[:, :, None] & inside[None, None, :]
        q = tl.load(q_ptr + wide, mask=wide_ok, other=0.0).to(tl.float32)
        d_out = tl.load(d_out_ptr + wide, mask=wide_ok, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + stat, mask=row_ok, other=float("-inf"))
        delta = tl.load(delta_ptr + stat, mask=row_ok, other=0.0)
        empty = lse == float("-inf")
        lse = tl.where(empty, 0.0, lse)
        dq = tl.zeros_like(q)
        for i in tl.static_range(KEYS):
            key = ((branch[:, None] * KEYS + i) * KV_HEADS + kv_head) * WIDTH + lane[None, :]
            k = tl.load(k_ptr + key, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            v = tl.load(v_ptr + key, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            seen = row_ok & live[None, :]
            if CAUSAL:
                seen = seen & (query >= i)[:, None]
            # Masked before exp: what is not seen may lie far above lse.
            score = tl.sum(q * k[None, :, :], axis=2) * scale
            weight = tl.exp(tl.where(seen, score - lse, float("-inf")))
            d_score = weight * (tl.sum(d_out * v[None, :, :], axis=2) - delta) * scale
            dq += d_score[:, :, None] * k[None, :, :]
            writable = there[:, None] & inside[None, :]
            tl.store(dk_ptr + key, tl.sum(d_score[:, :, None] * q, axis=0), mask=writable)
            tl.store(dv_ptr + key, tl.sum(weight[:, :, None] * d_out, axis=0), mask=writable)
        tl.store(dq_ptr + wide, dq, mask=wide_ok)
        if SINKS:
            real = row < QUERIES * GROUP
            sink = tl.load(sinks_ptr + head, mask=real, other=float("-inf"))
            taken = tl.where(empty, 0.0, tl.exp(sink[:, None] - lse) * delta)
            tl.store(d_sinks_ptr + (tile * QUERIES + query) * HEADS + head, -tl.sum(taken, axis=1), mask=real)

    return branch_backward_few
