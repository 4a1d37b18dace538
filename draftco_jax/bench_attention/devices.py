"""What needs several devices, virtual ones: bytes of compiled rings, and anchors that ranks agree on.

Sizes are tiny, since neither bytes over their formula nor agreement depends on them. Numbers are float32: XLA sends
bfloat16 as float32 on a CPU, so bytes of it are read from programs compiled for H100 (`h100`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool

from draftco_jax.bench_attention.usp import usp_facts
from draftco_jax.context_parallel import (
    Branch,
    KeyRange,
    PackedRows,
    RingSpec,
    TrunkMode,
    TrunkShape,
    Zigzag,
    branch_attention,
    from_ranks,
    share_trunk,
    to_ranks,
)
from draftco_jax.context_parallel.memory import forward_ring_bytes, passes_bytes
from draftco_jax.context_parallel.traffic import collectives, permuted_bytes
from draftco_jax.drafts.blocks.anchors import select_anchors
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.labels import Ahead
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.types import PackedBatch

AXIS = "context"
TOKENS, HEADS, KV_HEADS, WIDTH = 128, 4, 2, 8
BRANCHES = {
    "ttt_1_key": (TOKENS, 1, 1),
    "ttt_4_keys": (TOKENS, 1, 4),
    "ttt_7_keys": (TOKENS, 1, 7),
    "blocks_64_anchors": (64, 4, 4),
    "blocks_512_anchors": (512, 4, 4),
}
"""Branches in all, queries of one, keys of one."""
PASSES = 3
ROW_TOKENS, BLOCK = 1024, 16
ROW_LENGTHS = ((203, 1, 417, 95, 250), (1000,), (61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74))
"""Documents of three packed rows: none ends where a rank's piece does, one is shared by all ranks, many are short."""


def device_facts(ranks: int, documents_seed: int) -> dict[str, Any]:
    """Everything of this module. Needs so many devices."""
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), (AXIS,))
    sizes = {"tokens": TOKENS, "heads": HEADS, "kv_heads": KV_HEADS, "width": WIDTH, "passes": PASSES}
    return ring_facts(mesh) | usp_facts(list(mesh.devices.flat), **sizes) | anchor_facts(mesh, documents_seed)


def ring_facts(mesh: Mesh) -> dict[str, Any]:
    """Bytes of the permutes in compiled programs beside 2 (C-1) (N/C) d_kv b and its sums over passes."""
    shape = TrunkShape(
        ranks=mesh.size, rows=1, local_tokens=TOKENS // mesh.size, kv_heads=KV_HEADS, head_dim=WIDTH, number_bytes=4
    )
    formula = forward_ring_bytes(shape)
    one = {name: _bytes_of(mesh, sizes, 1, "replay", backward=False) / formula for name, sizes in BRANCHES.items()}
    passes = []
    for mode in ("replay", "gathered"):
        for backward in (False, True):
            sent = _bytes_of(mesh, BRANCHES["ttt_4_keys"], PASSES, mode, backward=backward)
            forward = formula * (PASSES if mode == "replay" else 1)
            expected = passes_bytes(shape, PASSES, mode) if backward else forward
            what = "forward and backward" if backward else "forward"
            passes.append({"mode": mode, "what": what, "passes": PASSES, "bytes": sent, "formula": expected})
    return {"ring_forward_bytes_over_formula": one, "ring_forward_bytes_formula": formula, "passes_bytes": passes}


def _bytes_of(mesh: Mesh, sizes: tuple[int, int, int], passes: int, mode: TrunkMode, *, backward: bool) -> int:
    """What one device sends in the program of so many dependent reads of one trunk."""
    spec = RingSpec(layout=Zigzag(ranks=mesh.size, tokens=TOKENS), axis=AXIS, scale=1.0, tile=16)

    def forward(q: Array, k: Array, v: Array, bk: Array, bv: Array, first: Array, last: Array, live: Array) -> Any:
        trunk, lse = share_trunk(k, v, spec, mode=mode), None
        for _ in range(passes):  # as in EAGLE-3, queries of a pass come from the output of the one before
            q, lse = branch_attention(q, trunk, KeyRange(first, last), Branch(bk, bv, live), spec=spec)
        return q, lse

    def both(*x: Array) -> Any:
        out, pull = jax.vjp(lambda *given: forward(*given, *x[5:]), *x[:5])
        return pull(out)

    groups, count, keys = sizes
    q = jax.ShapeDtypeStruct((1, groups, count, HEADS, WIDTH), jnp.float32)
    trunk = jax.ShapeDtypeStruct((1, TOKENS, KV_HEADS, WIDTH), jnp.float32)
    branch = jax.ShapeDtypeStruct((1, groups, keys, KV_HEADS, WIDTH), jnp.float32)
    place, live = (
        jax.ShapeDtypeStruct((1, groups, count), jnp.int32),
        jax.ShapeDtypeStruct((1, groups), jnp.bool_),
    )
    args = (q, trunk, trunk, branch, branch, place, place, live)
    split = PartitionSpec(None, AXIS)
    mapped = jax.shard_map(both if backward else forward, mesh=mesh, in_specs=split, out_specs=split)
    # The program is read and never run: what LLVM makes of its loops does not matter.
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(mapped).lower(*args).compile(compiler_options=options)
    found = collectives(compiled.as_text() or "")
    strangers = {c.kind for c in found} - {"collective-permute"}
    if strangers:
        raise ValueError(f"collectives={sorted(strangers)} must not be there; the ring sends permutes only")
    return permuted_bytes(found)


def anchor_facts(mesh: Mesh, seed: int) -> dict[str, Any]:
    """Anchors of a block draft on ragged packed rows: those of all ranks together against those of one device."""
    batch = _batch()
    cfg = DFlashConfig.for_target(Qwen3Config.tiny(vocab_size=32), mask_token_id=31, block_size=BLOCK, num_anchors=64)
    key = jax.random.key(seed)
    packed = PackedRows(ranks=mesh.size, context_axis=AXIS)
    layout = packed.layout(ROW_TOKENS // mesh.size)

    def chosen(rows: PackedRows) -> Callable[[PackedBatch], Array]:
        def one(batch: PackedBatch) -> Bool[Array, "R L"]:
            anchors, keep = select_anchors(key, Ahead(batch, cfg.max_draft_length, rows), cfg)
            none = jnp.zeros_like(batch.tokens, dtype=bool)
            return jax.vmap(lambda mask, at, taken: mask.at[at].max(taken))(none, anchors, keep)

        return one

    alone = np.asarray(jax.jit(chosen(PackedRows()))(batch))
    split = PartitionSpec(None, AXIS)
    spread = jax.jit(jax.shard_map(chosen(packed), mesh=mesh, in_specs=split, out_specs=split))
    there = spread(jax.tree.map(lambda x: to_ranks(x, layout), batch))
    together = np.asarray(from_ranks(jnp.asarray(np.asarray(there)), layout))
    owner = np.asarray(layout.owner(jnp.arange(ROW_TOKENS, dtype=jnp.int32)))
    crossing = 0
    for row, anchor in np.argwhere(alone):
        stretch = np.arange(anchor, min(anchor + BLOCK, ROW_TOKENS))
        inside = stretch[np.asarray(batch.segment_ids)[row, stretch] == batch.segment_ids[row, anchor]]
        crossing += int((owner[inside] != owner[anchor]).any())
    return {
        "anchors_kept_c1": int(alone.sum()),
        "anchors_dropped": int((alone & ~together).sum()),
        "anchors_added": int((together & ~alone).sum()),
        "anchors_whose_block_crosses_ranks": crossing,
    }


def _batch() -> PackedBatch:
    """Packed rows in which every token but the first of a document is supervised."""
    shape = (len(ROW_LENGTHS), ROW_TOKENS)
    segments, positions, samples = (np.zeros(shape, np.int32) for _ in range(3))
    for row, lengths in enumerate(ROW_LENGTHS):
        start = 0
        for number, length in enumerate(lengths, 1):
            span = slice(start, start + length)
            segments[row, span], positions[row, span], samples[row, span] = (
                number,
                np.arange(length),
                100 * row + number,
            )
            start += length
    zeros, ids = jnp.zeros(shape, jnp.float32), jnp.asarray(segments)
    return PackedBatch(
        tokens=ids,
        positions=jnp.asarray(positions),
        segment_ids=ids,
        sample_ids=jnp.asarray(samples),
        label_mask=((ids > 0) & (jnp.asarray(positions) > 0)).astype(jnp.float32),
        label_logprobs=zeros,
        label_advantages=zeros,
        label_rewards=zeros,
    )
