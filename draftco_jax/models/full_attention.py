"""The attention of all families: grouped-query over the whole document, with what each family adds by a field.

    q, k, v = projections of x (+ biases);  q, k = per-head norms (`qk_norm`), then rotation
    heads   = softmax over the visible keys, at most `window` of them, and the head's sink (`sinks`)
    y       = o_proj(heads * sigmoid(gate)) (`gated`: q_proj gives each head its query and then its gate)

Over a tensor axis a rank has some of the query heads and the key-value heads that these read: its part of them, or,
where there are fewer than ranks, one of all of them, which every rank then projects.

Letters: B rows of a batch (R packed), T tokens, D width, N heads, K key-value heads, H head width, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.calls import CachedCall, PackedCall
from draftco_jax.models.kv_cache import LayerCache
from draftco_jax.models.layers import Linear, LinearGroup, NormRule, RMSNorm, parameter, rotate
from draftco_jax.models.paged_cache import PagedLayer

AttentionState = LayerCache | PagedLayer
"""Both are written and read alike."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What kind of attention a layer has."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qk_norm: NormRule | None = None
    """Rule of the norms of each head's queries and keys; None: no such norms."""
    bias: bool = False
    """Of all four projections."""
    gated: bool = False
    sinks: bool = False
    window: int | None = None
    """Keys a query sees at most, its own included."""
    out_scale: float = 0.02
    """Standard deviation that the output projection is drawn with."""


class FullAttention(nnx.Module):
    """A `Mixer`."""

    def __init__(self, spec: AttentionSpec, *, rngs: nnx.Rngs) -> None:
        self.spec = spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = LinearGroup(
            spec.hidden_size,
            {"q_proj": 2 * q if spec.gated else q, "k_proj": kv, "v_proj": kv},
            {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"},
            rngs=rngs,
            bias=spec.bias,
            units={"heads": spec.heads, "kv_heads": spec.kv_heads},
        )
        self.o_proj = Linear(
            (q, spec.hidden_size),
            ("heads", "embed"),
            rngs=rngs,
            init=nnx.initializers.normal(spec.out_scale),
            bias=spec.bias,
            units={"heads": spec.heads},
        )
        if spec.qk_norm is not None:
            self.q_norm, self.k_norm = (
                RMSNorm(spec.head_dim, eps=spec.eps, rngs=rngs, axis="head_dim", rule=spec.qk_norm) for _ in range(2)
            )
        if spec.sinks:
            self.sinks = parameter(rngs, (spec.heads,), ("heads",), nnx.initializers.zeros)

    def __call__(self, x: Float[Array, "R T D"], call: PackedCall) -> Float[Array, "R T D"]:
        """Packed rows: keys are those of the row itself, wherever they are."""
        q, k, v, gate = self._project(x, call.angles, call.packed)
        seen = call.packed.causal(call.segment_ids, call.positions, window=self.spec.window)
        heads = call.packed.attention(q, k, v, seen, self._sinks())
        return self._output(heads, gate, call.packed)

    def empty_state(self, batch: int, capacity: int, lookahead: int, dtype: Any) -> LayerCache:
        """A key-value cache of zeros; what lies past `start` is overwritten, so there is nothing to roll back."""
        del lookahead
        heads = self.o_proj.inputs // self.spec.head_dim  # of this rank
        kv_heads = read_count(heads, self.spec)
        zeros = jnp.zeros((batch, kv_heads, capacity, self.spec.head_dim), dtype)
        return LayerCache(zeros, zeros)

    def step(
        self, x: Float[Array, "B T D"], state: AttentionState, call: CachedCall
    ) -> tuple[Float[Array, "B T D"], AttentionState]:
        """New tokens: their keys are written to the cache and read from it."""
        q, k, v, gate = self._project(x, call.angles, call.packed)
        state = state.put(k, v, call)
        return self._output(state.read(q, call, self.spec.window, self._sinks()), gate, call.packed), state

    def _project(
        self, x: Array, angles: tuple[Array, Array] | None, packed: PackedRows = WHOLE_ROWS
    ) -> tuple[Array, Array, Array, Array | None]:
        """Rotated queries and keys, values, and the gate before its sigmoid."""
        spec = self.spec
        q, k, v = self.qkv(x)
        q = q.reshape(*x.shape[:2], -1, spec.head_dim * (2 if spec.gated else 1))
        k, v = (y.reshape(*x.shape[:2], -1, spec.head_dim) for y in (k, v))
        if packed.tensor_axis is not None and k.shape[2] == spec.kv_heads:
            k, v = (read_heads(y, q.shape[2], spec, packed.tensor_axis) for y in (k, v))
        gate = q[..., spec.head_dim :] if spec.gated else None
        q = q[..., : spec.head_dim]
        if spec.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v, gate

    def _output(
        self, heads: Float[Array, "B T N H"], gate: Array | None, packed: PackedRows = WHOLE_ROWS
    ) -> Float[Array, "B T D"]:
        if gate is not None:
            heads = heads * jax.nn.sigmoid(gate)
        return self.o_proj(heads.reshape(*heads.shape[:2], -1), packed.tensor_axis)

    def _sinks(self) -> Array | None:
        return self.sinks[...] if self.spec.sinks else None


def read_heads(y: Float[Array, "R T K H"], queries: int, spec: AttentionSpec, axis: str) -> Float[Array, "R T k H"]:
    """Of all key-value heads those that this rank's query heads read: heads rank * queries, ... of the tensor axis."""
    group = spec.heads // spec.kv_heads
    if queries % group and group % queries:
        raise ValueError(
            f"heads={spec.heads} over {spec.heads // queries} ranks of {axis!r} must leave each rank whole groups of "
            f"{group} query heads or an even part of one; use a number of ranks that divides kv_heads={spec.kv_heads} "
            "or is a multiple of it"
        )
    first = jax.lax.axis_index(axis) * queries // group
    return jax.lax.dynamic_slice_in_dim(y, first, read_count(queries, spec), axis=2)


def read_count(queries: int, spec: AttentionSpec) -> int:
    """Key-value heads that so many neighbouring query heads read."""
    return max(queries * spec.kv_heads // spec.heads, 1)
