"""Bytes that the baseline sends, read from its compiled programs: Ulysses x contiguous ring on virtual devices.

Of one row without padding, so what its padding costs (`counts`) comes on top. It exchanges queries and outputs, which
our ring leaves where they are; its ring has fewer ranks, so keys travel less far.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from draftco_jax.context_parallel import Contiguous, RingSpec, TrunkShape
from draftco_jax.context_parallel.memory import forward_ring_bytes
from draftco_jax.context_parallel.sequential_ring import UspSpec, usp_pass
from draftco_jax.context_parallel.traffic import collectives, permuted_bytes


def usp_facts(devices: list[Any], *, tokens: int, heads: int, kv_heads: int, width: int, passes: int) -> dict[str, Any]:
    """Rows of ulysses x ring over these devices: bytes a rank sends in so many forward passes, and over ours, replayed.

    float32. As many ulysses ranks as there are query heads at most; fewer key-value heads are repeated.
    """
    ranks, rows = len(devices), []
    ours = TrunkShape(
        ranks=ranks, rows=1, local_tokens=tokens // ranks, kv_heads=kv_heads, head_dim=width, number_bytes=4
    )
    for ulysses in (u for u in (1, 2, 4, 8) if u <= min(ranks, heads)):
        mesh = Mesh(np.array(devices).reshape(ranks // ulysses, ulysses), ("ring", "ulysses"))
        x = [jax.ShapeDtypeStruct((1, tokens, n, width), jnp.float32) for n in (heads, kv_heads, kv_heads)]
        found = collectives(_program(mesh, x, passes).as_text() or "")
        if strangers := {c.kind for c in found} - {"collective-permute", "all-to-all"}:
            raise ValueError(f"collectives={sorted(strangers)} must not be there; the baseline exchanges and permutes")
        # A rank keeps one part in `ulysses` of what it exchanges.
        exchanged = sum(c.total_bytes for c in found if c.kind == "all-to-all") * (ulysses - 1) // ulysses
        sent = permuted_bytes(found)
        row = {"ulysses": ulysses, "ring": ranks // ulysses, "passes": passes}
        row |= {"exchanged_bytes": exchanged, "ring_bytes": sent}
        rows.append(row | {"over_ours": (exchanged + sent) / (passes * forward_ring_bytes(ours))})
    return {"usp_bytes": rows}


def _program(mesh: Mesh, qkv: list[jax.ShapeDtypeStruct], passes: int) -> jax.stages.Compiled:
    ring, ulysses = mesh.devices.shape
    layout = Contiguous(ranks=ring, tokens=qkv[0].shape[1])
    spec = UspSpec(
        ring=RingSpec(layout=layout, axis="ring", scale=1.0, tile=16),
        ulysses_axis="ulysses" if ulysses > 1 else None,
        ulysses=ulysses,
    )

    def forward(q: Array, *kv: Array) -> Array:
        cache = None
        for i in range(passes):  # keys of their own, and queries from the output of the pass before
            q, cache = usp_pass(q, kv[2 * i], kv[2 * i + 1], cache, spec)
        return q

    split = PartitionSpec(None, ("ring", "ulysses"))
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=split, out_specs=split)
    # The program is read and never run: what LLVM makes of its loops does not matter.
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    return jax.jit(mapped).lower(qkv[0], *qkv[1:] * passes).compile(compiler_options=options)
