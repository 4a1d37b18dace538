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
    Striped,
    TrunkMode,
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
PASSES = 3
"""Of EAGLE-3, as in the paper's figure 6."""
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
def branch_program(tokens: int, implementation: str, backward: bool, stripe: int | None = None) -> Program:
    """One read of the trunk with three branch keys a token, forward or forward and backward."""
    spec = spec_of(tokens, implementation, stripe)

    def attend(q, k, v, keys, values, segment_ids, positions):
        branch = Branch(keys, values, segment_ids > 0)
        trunk, seen = share_trunk(k, v, spec), causal(segment_ids, positions, spec)
        return branch_attention(q[:, :, None], trunk, seen, branch, spec=spec)

    def pulled(q, k, v, keys, values, segment_ids, positions):
        (out, lse), pull = jax.vjp(lambda *x: attend(*x, segment_ids, positions), q, k, v, keys, values)
        return out, pull((out, jnp.zeros_like(lse)))

    return compiled_of(pulled if backward else attend, tokens, BRANCH_KEYS)


@functools.cache
def passes_program(tokens: int, implementation: str, passes: int = PASSES, mode: TrunkMode = "replay") -> Program:
    """EAGLE-3 training: pass k reads the trunk and k branch keys, its queries come from pass k - 1; and backward."""
    spec = spec_of(tokens, implementation)

    def attend(q, k, v, keys, values, segment_ids, positions):
        trunk, seen = share_trunk(k, v, spec, mode=mode), causal(segment_ids, positions, spec)
        q, outs = q[:, :, None], []
        for passed in range(passes):
            branch = Branch(keys[:, :, :passed], values[:, :, :passed], segment_ids > 0) if passed else None
            q, _ = branch_attention(q, trunk, seen, branch, spec=spec)
            outs.append(q)
        return outs

    def pulled(q, k, v, keys, values, segment_ids, positions):
        outs, pull = jax.vjp(lambda *x: attend(*x, segment_ids, positions), q, k, v, keys, values)
        return pull(outs)

    return compiled_of(pulled, tokens, passes - 1)


def spec_of(tokens: int, implementation: str, stripe: int | None = None) -> RingSpec:
    zigzag = Zigzag(ranks=RANKS, tokens=tokens)
    layout = zigzag if stripe is None else Striped(ranks=RANKS, tokens=tokens, stripe=stripe)
    return RingSpec(layout=layout, axis=AXIS, scale=WIDTH**-0.5, implementation=implementation, tile=BLOCKWISE_TILE)


def causal(segment_ids, positions, spec: RingSpec) -> KeyRange:
    seen = causal_range(segment_ids, positions, local_index(spec.layout, AXIS))
    return KeyRange(*(x[:, :, None] for x in seen))


def compiled_of(function, tokens: int, branch_keys: int) -> Program:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, *dims), jnp.bfloat16)

    trunk, branch = shape(KV_HEADS, WIDTH), shape(branch_keys, KV_HEADS, WIDTH)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    args = (shape(HEADS, WIDTH), trunk, trunk, branch, branch, ids, ids)
    mesh = gpu_mesh("h100", context=RANKS)
    compiled = compile_for(mesh, function, *args, in_specs=SHARDED, out_specs=SHARDED)
    local = tokens // RANKS
    known = TrunkShape(ranks=RANKS, rows=1, local_tokens=local, kv_heads=KV_HEADS, head_dim=WIDTH, number_bytes=2)
    return Program(compiled=compiled, hlo=compiled.as_text() or "", trunk=known)
