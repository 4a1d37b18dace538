# Pointers have no type that Python knows, and "tl.constexpr" is a mark for Triton, not a type.
# pyright: reportMissingParameterType=false, reportInvalidTypeForm=false
"""Route "block" in Triton's language: the kernels of `pallas_block`, pointers instead of refs."""

from __future__ import annotations

from typing import Any, no_type_check


@no_type_check  # a wrapper that checks types would hide the source from Triton
def forward_kernel(triton: Any, tl: Any) -> Any:
    """Arguments: q, trunk out, trunk lse, keys, values, live, sinks -> out, lse."""

    @triton.jit
    def branch_forward_block(
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
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        CHUNKS: tl.constexpr,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        LANES: tl.constexpr,
        CAUSAL: tl.constexpr,
        SINKS: tl.constexpr,
    ):
        GROUP: tl.constexpr = HEADS // KV_HEADS
        program = tl.program_id(0)
        pair = program // CHUNKS
        kv_head = pair % KV_HEADS
        branch = pair // KV_HEADS
        row = (program % CHUNKS) * ROWS + tl.arange(0, ROWS)
        query = row // GROUP
        head = kv_head * GROUP + row % GROUP
        lane = tl.arange(0, LANES)
        inside = lane < WIDTH
        row_ok = row < QUERIES * GROUP
        stat = (branch * QUERIES + query) * HEADS + head
        wide = stat[:, None] * WIDTH + lane[None, :]
        wide_ok = row_ok[:, None] & inside[None, :]
        live = tl.load(live_ptr + branch) != 0
        place = tl.arange(0, PLACES)
        key = ((branch * KEYS + place[:, None]) * KV_HEADS + kv_head) * WIDTH + lane[None, :]
        key_ok = ((place < KEYS) & live)[:, None] & inside[None, :]
        q = tl.load(q_ptr + wide, mask=wide_ok, other=0.0)
        k = tl.load(k_ptr + key, mask=key_ok, other=0.0)
        seen = row_ok[:, None] & ((place < KEYS) & live)[None, :]
        if CAUSAL:
            seen = seen & (place[None, :] <= query[:, None])
        # "ieee": float32 numbers are multiplied as such, not shortened to TF32.
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        trunk_lse = tl.load(trunk_lse_ptr + stat, mask=row_ok, other=float("-inf"))
        top = tl.maximum(trunk_lse, tl.max(scores, axis=1))
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf"))
            top = tl.maximum(top, sink)
        safe = tl.where(top == float("-inf"), 0.0, top)
        trunk_weight = tl.exp(trunk_lse - safe)
        weights = tl.exp(scores - safe[:, None])
        total = trunk_weight + tl.sum(weights, axis=1)
        if SINKS:
            total += tl.exp(sink - safe)
        v = tl.load(v_ptr + key, mask=key_ok, other=0.0)
        out = tl.load(trunk_ptr + wide, mask=wide_ok, other=0.0) * trunk_weight[:, None]
        out = tl.dot(weights.to(v.dtype), v, acc=out, input_precision="ieee")
        some = total > 0
        total = tl.where(some, total, 1.0)
        tl.store(out_ptr + wide, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=wide_ok)
        tl.store(lse_ptr + stat, tl.where(some, safe + tl.log(total), float("-inf")), mask=row_ok)

    return branch_forward_block


@no_type_check  # a wrapper that checks types would hide the source from Triton
def backward_kernel(triton: Any, tl: Any) -> Any:
    """Arguments: q, dout, lse, delta, keys, values, live, sinks -> dq, dk, dv, dsinks of each query."""

    @triton.jit
    def branch_backward_block(
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
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        WIDTH: tl.constexpr,
        CHUNKS: tl.constexpr,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        LANES: tl.constexpr,
        CAUSAL: tl.constexpr,
        SINKS: tl.constexpr,
    ):
        GROUP: tl.constexpr = HEADS // KV_HEADS
        program = tl.program_id(0)
        kv_head = program % KV_HEADS
        branch = program // KV_HEADS
        lane = tl.arange(0, LANES)
        inside = lane < WIDTH
        live = tl.load(live_ptr + branch) != 0
        place = tl.arange(0, PLACES)
        real = place < KEYS
        key = ((branch * KEYS + place[:, None]) * KV_HEADS + kv_head) * WIDTH + lane[None, :]
        k = tl.load(k_ptr + key, mask=(real & live)[:, None] & inside[None, :], other=0.0)
        v = tl.load(v_ptr + key, mask=(real & live)[:, None] & inside[None, :], other=0.0)
        dk = tl.zeros((PLACES, LANES), tl.float32)
        dv = tl.zeros((PLACES, LANES), tl.float32)
        for chunk in range(CHUNKS):
            row = chunk * ROWS + tl.arange(0, ROWS)
            query = row // GROUP
            head = kv_head * GROUP + row % GROUP
            row_ok = row < QUERIES * GROUP
            stat = (branch * QUERIES + query) * HEADS + head
            wide = stat[:, None] * WIDTH + lane[None, :]
            wide_ok = row_ok[:, None] & inside[None, :]
            q = tl.load(q_ptr + wide, mask=wide_ok, other=0.0)
            d_out = tl.load(d_out_ptr + wide, mask=wide_ok, other=0.0)
            lse = tl.load(lse_ptr + stat, mask=row_ok, other=float("-inf"))
            delta = tl.load(delta_ptr + stat, mask=row_ok, other=0.0)
            empty = lse == float("-inf")
            lse = tl.where(empty, 0.0, lse)
            seen = row_ok[:, None] & (real & live)[None, :]
            if CAUSAL:
                seen = seen & (place[None, :] <= query[:, None])
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            # Masked before exp: what is not seen may lie far above lse.
            weights = tl.exp(tl.where(seen, scores - lse[:, None], float("-inf")))
            d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
            d_scores = (weights * (d_weights - delta[:, None]) * scale).to(k.dtype)
            tl.store(dq_ptr + wide, tl.dot(d_scores, k, input_precision="ieee"), mask=wide_ok)
            dk = tl.dot(tl.trans(d_scores), q, acc=dk, input_precision="ieee")
            dv = tl.dot(tl.trans(weights.to(k.dtype)), d_out, acc=dv, input_precision="ieee")
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf"))
                tl.store(d_sinks_ptr + stat, -tl.where(empty, 0.0, tl.exp(sink - lse) * delta), mask=row_ok)
        tl.store(dk_ptr + key, dk, mask=real[:, None] & inside[None, :])
        tl.store(dv_ptr + key, dv, mask=real[:, None] & inside[None, :])

    return branch_backward_block
