"""Mixture of experts: each token passes through k of E small MLPs, whose outputs are added with the router's weights.

Nothing is dropped and there is no capacity: assignments are sorted by expert, and each matmul is one grouped matmul
over rows that lie expert by expert (`models/grouped_matmul.py`). A row's result does not depend on the rows beside it.

    swiglu           gate, up = halves of W_gu x;         down(silu(gate) * up)                    Qwen3, Qwen3.5
    clamped_swiglu   gate, up = even and odd of W_gu x + b_gu; gate <= limit, |up| <= limit;
                     down(gate * sigmoid(alpha * gate) * (up + 1)) + b_down                        GPT-OSS
    relu2            down(relu(up x)^2)                                                            Nemotron-H

Matmuls take the dtype of x and accumulate in float32; activations and the weighted sum are float32.

Over devices (`PackedRows`) the experts are split over the expert axes, and the hidden width of each, and of the shared
one, over the tensor axis unless experts are: each rank then has a part of y, and one sum over that axis makes it whole.

Letters: n tokens, M = n * k assignments, E experts, D model width, I expert width, W = 2I (gated) or I, b batch dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.grouped_matmul import GroupedMatmul, grouped_matmul
from draftco_jax.models.layers import GatedMLP, Initializer, Linear, parameter, summed
from draftco_jax.models.moe_routing import Router, RouterConfig, Routing
from pallas_kernels.manual_axes import cast, varying_axes

ExpertKind = Literal["swiglu", "clamped_swiglu", "relu2"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes of one mixture layer; field names are those of the published config.json files."""

    hidden_size: int
    moe_intermediate_size: int
    router: RouterConfig
    expert: ExpertKind = "swiglu"
    shared_expert_intermediate_size: int = 0
    """Width of the expert that every token passes through; 0: none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by sigmoid(gate x), one number a token."""
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    grouped_matmul: GroupedMatmul = "blocks"
    """How the experts' matmuls are done; results are the same to rounding."""

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and parts that no family combines."""
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; set it to the model's size")
        for name in ("swiglu_limit", "swiglu_alpha"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0; GPT-OSS has 7 and 1.702")
        if self.shared_expert_intermediate_size < 0:
            raise ValueError(
                f"shared_expert_intermediate_size={self.shared_expert_intermediate_size} must be >= 0; 0 is none"
            )
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError("shared_expert_gate=True must have a shared expert; set shared_expert_intermediate_size")
        if self.expert == "clamped_swiglu" and self.shared_expert_intermediate_size:
            raise ValueError(
                f"shared_expert_intermediate_size={self.shared_expert_intermediate_size} must be 0 with "
                "expert='clamped_swiglu'; no published model has both"
            )


class SquaredReluMLP(nnx.Module):
    """down(relu(up x)^2): Nemotron-H's shared expert and its dense MLP."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs, down_init: Initializer | None = None) -> None:
        self.up_proj = Linear((width, hidden), ("embed", "mlp"), rngs=rngs)
        self.down_proj = Linear((hidden, width), ("mlp", "embed"), rngs=rngs, init=down_init)

    def __call__(self, x: Float[Array, "*b D"], packed: PackedRows = WHOLE_ROWS) -> Float[Array, "*b D"]:
        """One projection up, one down."""
        return self.down_proj(self.hidden(x), packed.tensor_axis)

    def hidden(self, x: Float[Array, "*b D"]) -> Float[Array, "*b F"]:
        """What is projected down; of this rank's part of the hidden width."""
        return jnp.square(jax.nn.relu(self.up_proj(x)))


class Experts(nnx.Module):
    """The weights of all experts, or under expert parallelism of this rank's, stacked along the first dim.

    `up_proj` [E, D, I] and `down_proj` [E, I, D], swiglu also `gate_proj` [E, D, I]: [in, out] as everywhere here. For
    clamped_swiglu `gate_up_proj` [E, D, 2I], gate and up in turn, as GPT-OSS files hold it.
    """

    def __init__(self, cfg: MoEConfig, *, rngs: nnx.Rngs, down_init: Initializer | None = None) -> None:
        self.cfg = cfg
        experts, width, hidden = cfg.router.num_experts, cfg.hidden_size, cfg.moe_intermediate_size
        normal, zeros = nnx.initializers.normal(0.02), nnx.initializers.zeros
        up, pairs = ((experts, width, hidden), ("expert", "embed", "mlp"), normal), {"mlp_pairs": hidden}
        if cfg.expert == "clamped_swiglu":
            shape, axes = (experts, width, 2 * hidden), ("expert", "embed", "mlp_pairs")
            self.gate_up_proj = parameter(rngs, shape, axes, normal, units=pairs)
            self.gate_up_proj_bias = parameter(rngs, (experts, 2 * hidden), ("expert", "mlp_pairs"), zeros, units=pairs)
            self.down_proj_bias = parameter(rngs, (experts, width), ("expert", "embed"), zeros)
        else:
            self.up_proj = parameter(rngs, *up)
        if cfg.expert == "swiglu":
            self.gate_proj = parameter(rngs, *up)
        self.down_proj = parameter(rngs, (experts, hidden, width), ("expert", "mlp", "embed"), down_init or normal)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels there are."""
        first = {"swiglu": ("gate_proj", "up_proj"), "clamped_swiglu": ("gate_up_proj",), "relu2": ("up_proj",)}
        return (*first[self.cfg.expert], "down_proj")

    @property
    def count(self) -> int:
        """Experts held here."""
        return self.down_proj[...].shape[0]

    def __call__(
        self,
        rows: Float[Array, "M D"],
        sizes: Int32[Array, " E"],
        ids: Int32[Array, " M"],
        hidden_axis: str | None = None,
    ) -> Float32[Array, "M D"]:
        """Rows that lie expert by expert, `sizes` of each; `ids` are their experts, ascending.

        Rows after the last group, whose ids are not below E, give values without meaning. `hidden_axis`: the axis that
        I is split over; what comes back is then a part of a sum over it.
        """
        hidden = self._hidden(rows, sizes, ids).astype(rows.dtype)
        out = self.product("down_proj", hidden, sizes, ids)
        if self.cfg.expert != "clamped_swiglu":
            return out
        bias = self.down_proj_bias[...]
        if hidden_axis is not None:  # added once, not by every rank
            bias = jnp.where(jax.lax.axis_index(hidden_axis) == 0, bias, jnp.zeros_like(bias))
        return out + rows_of(bias, ids)

    def product(
        self, name: str, rows: Float[Array, "M I"], sizes: Int32[Array, " E"], ids: Int32[Array, " M"]
    ) -> Float32[Array, "M O"]:
        """Rows that lie expert by expert times the kernels of this name; `ids` are their experts."""
        del ids
        return grouped_matmul(rows, getattr(self, name)[...], sizes, self.cfg.grouped_matmul)

    def _hidden(self, rows: Array, sizes: Array, ids: Array) -> Float32[Array, "M I"]:
        """What is projected down."""
        by = lambda name: self.product(name, rows, sizes, ids)  # noqa: E731
        if self.cfg.expert == "relu2":
            return jnp.square(jax.nn.relu(by("up_proj")))
        if self.cfg.expert == "swiglu":
            return jax.nn.silu(by("gate_proj")) * by("up_proj")
        hidden, limit = by("gate_up_proj") + rows_of(self.gate_up_proj_bias[...], ids), self.cfg.swiglu_limit
        gate, up = jnp.minimum(hidden[:, 0::2], limit), jnp.clip(hidden[:, 1::2], -limit, limit)
        return gate * jax.nn.sigmoid(self.cfg.swiglu_alpha * gate) * (up + 1.0)


def rows_of(bias: Float[Array, "E O"], ids: Int32[Array, " M"]) -> Float32[Array, "M O"]:
    """Each row's bias; 0 for an id that is not below E."""
    return bias.astype(jnp.float32).at[ids].get(mode="fill", fill_value=0)


def mix(
    experts: Experts,
    x: Float[Array, "n D"],
    ids: Int32[Array, "n k"],
    weights: Float32[Array, "n k"],
    first: Int32[Array, ""] | int = 0,
    hidden_axis: str | None = None,
) -> Float32[Array, "n D"]:
    """Sum over a token's experts of weight * expert(x), for the experts first, first + 1, ... that are held here."""
    tokens, k = ids.shape
    # Cast before there are k rows of each token, so that its gradient is summed over a tensor axis once.
    x = cast(x, varying_axes(x, ids, experts.down_proj[...]))
    local = ids.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < experts.count), local, experts.count)  # those held elsewhere come last
    # Cast: inside shard_map a sort gives each result the type of its own operand.
    place = cast(jnp.arange(tokens * k, dtype=jnp.int32), varying_axes(local))
    local, order = jax.lax.sort((local, place), num_keys=1)
    _, inverse = jax.lax.sort((order, place), num_keys=1)
    sizes = jnp.sum(local[:, None] == jnp.arange(experts.count, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)
    here = (local < experts.count)[:, None]
    # By way of float32, so that the gradient of a token adds up those of its k rows in float32.
    rows = x.astype(jnp.float32).at[order // k].get(mode="promise_in_bounds").astype(x.dtype)
    # Both sides of the matmuls: what they make of rows outside all groups is not defined, and nor is its gradient.
    out = experts(jnp.where(here, rows, jnp.zeros_like(rows)), sizes, local, hidden_axis)
    out = jnp.where(here, out, 0.0).at[inverse].get(mode="promise_in_bounds", unique_indices=True)
    return jnp.sum(weights[..., None] * out.reshape(tokens, k, -1), axis=1)


def mix_over_axes(
    experts: Experts, x: Float[Array, "n D"], routing: Routing, packed: PackedRows, total: int
) -> Float32[Array, "n D"]:
    """`mix` inside shard_map, where each rank of the expert axes holds total / ranks consecutive experts.

    Over axes where tokens differ, all go to every rank, each rank adds its experts' part for all of them, and the parts
    are summed and split again. Exact whatever the load. It moves n * ranks rows in and out of each rank, and sorts all
    their assignments there, however few are for its experts. On a tensor axis tokens are the same, so that nothing is
    moved: what comes back is a part of a sum over that axis.
    """
    axes = packed.expert_axes
    if experts.count * jax.lax.axis_size(axes) != total:
        raise ValueError(
            f"experts.count={experts.count} must be num_experts={total} / {jax.lax.axis_size(axes)} ranks of "
            f"{'|'.join(axes)!r}; split the expert dim of the weights over that axis"
        )
    first = jax.lax.axis_index(axes) * experts.count
    apart = tuple(axis for axis in axes if axis != packed.tensor_axis)
    hidden_axis = None if packed.tensor_axis in axes else packed.tensor_axis
    if not apart:
        return mix(experts, x, routing.ids, routing.weights, first, hidden_axis)
    gather = partial(jax.lax.all_gather, axis_name=apart, tiled=True)
    parts = mix(experts, gather(x), gather(routing.ids), gather(routing.weights), first, hidden_axis)
    return jax.lax.psum_scatter(parts, apart, scatter_dimension=0, tiled=True)


class MoE(nnx.Module):
    """Router, experts, and a shared expert where there is one."""

    def __init__(self, cfg: MoEConfig, *, rngs: nnx.Rngs, down_init: Initializer | None = None) -> None:
        self.cfg = cfg
        self.gate = Router(cfg.hidden_size, cfg.router, rngs=rngs)
        self.experts = Experts(cfg, rngs=rngs, down_init=down_init)
        if cfg.shared_expert_intermediate_size:
            build = SquaredReluMLP if cfg.expert == "relu2" else GatedMLP
            self.shared_expert = build(
                cfg.hidden_size, cfg.shared_expert_intermediate_size, rngs=rngs, down_init=down_init
            )
        if cfg.shared_expert_gate:
            self.shared_expert_gate = Linear((cfg.hidden_size, 1), ("embed", "unit"), rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*b D"],
        packed: PackedRows = WHOLE_ROWS,
        *,
        routing: Routing | None = None,
        active: Bool[Array, "*b"] | None = None,
    ) -> tuple[Float[Array, "*b D"], Routing]:
        """Output in the dtype of x, and where the tokens went.

        `routing`: replay; its ids are used (but for tokens with an id of -1), the weights are the present router's.
        `packed` says over which axes, inside shard_map, experts and hidden widths are split.
        `active`: the other tokens are sent to no expert (their ids are E) and get the shared expert's output alone.
        """
        flat = x.reshape(-1, x.shape[-1])
        recorded = None if routing is None else routing.ids.reshape(-1, self.cfg.router.num_experts_per_tok)
        chosen = self.gate(flat, recorded)
        if active is not None:
            chosen = chosen.only(active.reshape(-1), self.cfg.router.num_experts)
        if packed.expert_axes:
            y = mix_over_axes(self.experts, flat, chosen, packed, self.cfg.router.num_experts)
        else:
            y = mix(self.experts, flat, chosen.ids, chosen.weights, hidden_axis=packed.tensor_axis)
        if self.cfg.shared_expert_intermediate_size:
            y = y + self.shared(flat)
        y = summed(y, packed.tensor_axis)
        chosen = jax.tree.map(lambda part: part.reshape(*x.shape[:-1], -1), chosen)
        return y.astype(x.dtype).reshape(x.shape), chosen

    def shared(self, x: Float[Array, "n D"]) -> Float32[Array, "n D"]:
        """The shared expert, gated or not; over a tensor axis this rank's part of the sum."""
        y = self.shared_expert.down_proj(self.shared_expert.hidden(x)).astype(jnp.float32)
        if self.cfg.shared_expert_gate:
            y = jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32)) * y
        return y
