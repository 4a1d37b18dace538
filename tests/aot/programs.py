"""Branch attention of one layer as the draft of an 8B policy runs it on 8 H100, compiled once for all tests."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import (
    Branch,
    KeyRange,
    RingSpec,
    TrunkShape,
    Zigzag,
    branch_attention,
    causal_range,
    local_index,
    share_trunk,
)
from pallas_kernels.deviceless import compile_for, gpu_mesh

AXIS, RANKS = "context", 8
HEADS, KV_HEADS, WIDTH = 32, 8, 128
BRANCH_KEYS = 3
"""Keys of an EAGLE-3 token in its fourth pass."""
SHARDED = PartitionSpec(None, AXIS)
BLOCKWISE_TILE = 1024
"""A tile that a GPU is better filled with than with the default, which suits a CPU."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program and what is known of it in advance."""

    compiled: jax.stages.Compiled
    hlo: str
    trunk: TrunkShape


@functools.cache
def branch_program(tokens: int, implementation: str, backward: bool) -> Program:
    """Forward, or forward and backward, over `tokens` tokens in all; bfloat16."""
    tile = 1024  # of the blockwise implementation alone: larger tiles make shorter programs
    spec = RingSpec(
        layout=Zigzag(ranks=RANKS, tokens=tokens),
        axis=AXIS,
        scale=WIDTH**-0.5,
        implementation=implementation,
        tile=tile,
    )

    def attend(q, k, v, keys, values, segment_ids, positions):
        seen = causal_range(segment_ids, positions, local_index(spec.layout, AXIS))
        seen = KeyRange(*(x[:, :, None] for x in seen))
        branch = Branch(keys, values, segment_ids > 0)
        return branch_attention(q[:, :, None], share_trunk(k, v, spec), seen, branch, spec=spec)

    def pulled(q, k, v, keys, values, segment_ids, positions):
        (out, lse), pull = jax.vjp(lambda *x: attend(*x, segment_ids, positions), q, k, v, keys, values)
        return out, pull((out, jnp.zeros_like(lse)))

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, *dims), jnp.bfloat16)

    trunk, branch, ids = (
        shape(KV_HEADS, WIDTH),
        shape(BRANCH_KEYS, KV_HEADS, WIDTH),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )
    compiled = compile_for(
        gpu_mesh("h100", context=RANKS),
        pulled if backward else attend,
        shape(HEADS, WIDTH), trunk, trunk, branch, branch, ids, ids,
        in_specs=SHARDED,
        out_specs=SHARDED,
    )  # fmt: skip
    known = TrunkShape(
        ranks=RANKS, rows=1, local_tokens=tokens // RANKS, kv_heads=KV_HEADS, head_dim=WIDTH, number_bytes=2
    )
    return Program(compiled=compiled, hlo=compiled.as_text() or "", trunk=known)
