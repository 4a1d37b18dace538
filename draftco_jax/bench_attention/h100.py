"""Memory of one rank as the compiler for H100 plans it, on a machine without a GPU (`pallas_kernels.deviceless`).

Attention of one layer: bfloat16, 32 query heads, 8 key-value heads, width 128. Nothing runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from draftco_jax.bench_attention.counts import CONTEXTS, LONG_TOKENS
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
from draftco_jax.context_parallel.memory import backward_ring_bytes, forward_ring_bytes
from draftco_jax.context_parallel.traffic import collectives, permuted_bytes
from pallas_kernels import deviceless

AXIS = "context"
HEADS, KV_HEADS, WIDTH = 32, 8, 128
IMPLEMENTATION = "pallas"
BRANCH_KEYS = {"one_pass": (3,), "three_passes": (0, 1, 2)}
"""Branch keys that a query of each pass sees: the fourth pass of EAGLE-3 alone, and the first three together."""
FORWARD, BOTH = "forward", "forward and backward"


def programs(ranks: int) -> list[tuple[str, str, int, int]]:
    """(passes, what, tokens, ranks) of all that is compiled."""
    one = [("one_pass", what, tokens, ranks) for what in (FORWARD, BOTH) for tokens in (64 * 1024, LONG_TOKENS)]
    three = [("three_passes", BOTH, tokens, ranks) for tokens in CONTEXTS]
    return [*one, *three, ("three_passes", BOTH, LONG_TOKENS, 1)]


def memory_rows(ranks: int) -> list[dict[str, Any]]:
    """Peak bytes of one rank, and bytes sent over those of the formula, of every program."""
    rows = []
    for name, what, tokens, count in programs(ranks):
        compiled = compile_program(BRANCH_KEYS[name], tokens, count, backward=what == BOTH)
        trunk = TrunkShape(
            ranks=count, rows=1, local_tokens=tokens // count, kv_heads=KV_HEADS, head_dim=WIDTH, number_bytes=2
        )
        expected = forward_ring_bytes(trunk) + (backward_ring_bytes(trunk) if what == BOTH else 0)
        sent = permuted_bytes(collectives(compiled.as_text() or ""))
        rows.append(
            {
                "program": name,
                "what": what,
                "tokens": tokens,
                "ranks": count,
                "implementation": IMPLEMENTATION,
                "bytes": deviceless.peak_bytes(compiled),
                "sent_over_formula": sent / (len(BRANCH_KEYS[name]) * expected) if expected else None,
            }
        )
    return rows


def compile_program(keys: tuple[int, ...], tokens: int, ranks: int, *, backward: bool) -> jax.stages.Compiled:
    """One read of the trunk for each entry of `keys`, the number of branch keys.

    Queries of a later read are made from the output of the one before, as in EAGLE-3, here by a factor that stands for
    its projections: reads cannot be run side by side, and queries and outputs of each are kept for the backward.
    """
    spec = RingSpec(
        layout=Zigzag(ranks=ranks, tokens=tokens), axis=AXIS, scale=WIDTH**-0.5, implementation=IMPLEMENTATION
    )

    def forward(q: Array, k: Array, v: Array, bk: Array, bv: Array, segments: Array, positions: Array) -> Any:
        seen = causal_range(segments, positions, local_index(spec.layout, AXIS))
        seen = KeyRange(seen.first[:, :, None], seen.last[:, :, None])
        trunk = share_trunk(k, v, spec)
        outs = []
        for count in keys:
            branch = Branch(bk[:, :, :count], bv[:, :, :count], segments > 0) if count else None
            out, _ = branch_attention(q, trunk, seen, branch, spec=spec)
            outs.append(out)
            q = out * jnp.bfloat16(0.5)
        return outs

    def both(q: Array, k: Array, v: Array, bk: Array, bv: Array, segments: Array, positions: Array) -> Any:
        def of_numbers(q: Array, k: Array, v: Array, bk: Array, bv: Array) -> Any:
            return forward(q, k, v, bk, bv, segments, positions)

        outs, pull = jax.vjp(of_numbers, q, k, v, bk, bv)
        return outs, pull(outs)

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, *dims), jnp.bfloat16)

    trunk, branch = shape(KV_HEADS, WIDTH), shape(max(keys), KV_HEADS, WIDTH)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    split = PartitionSpec(None, AXIS)
    return deviceless.compile_for(
        deviceless.gpu_mesh("h100", context=ranks),
        both if backward else forward,
        shape(1, HEADS, WIDTH), trunk, trunk, branch, branch, ids, ids,
        in_specs=split,
        out_specs=split,
    )  # fmt: skip
