"""Which experts a token is sent to, with which weights, and what is counted about it.

Three rules are in use (Hugging Face transformers 5.24, modelling files of the families). With l = W x (+ bias) the
logits of all E experts, in float32 and at full matmul precision whatever the dtype of x, since a rounded logit can
turn the choice:

    softmax_topk    p = softmax(l); the k largest p; weights p_i, or p_i / sum of the chosen     Qwen3-MoE, Qwen3.5-MoE
    sigmoid_bias    s = sigmoid(l); the k largest s + correction; weights s_i without it,
                    or s_i / (sum of the chosen + 1e-20), times routed_scaling_factor            Nemotron-H
    topk_softmax    the k largest l; weights softmax over those k                                GPT-OSS

Replay: given the ids of an earlier forward, those are used, and weighed by the present router.

Letters: E experts, k experts per token, D model width, b any batch dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from draftco_jax.models.layers import parameter

RouterKind = Literal["softmax_topk", "sigmoid_bias", "topk_softmax"]


class Routing(NamedTuple):
    """Where tokens went."""

    ids: jax.Array  # i32[*b, k] the chosen experts, best first; -1 in a replay: choose anew
    weights: jax.Array  # f32[*b, k]
    probabilities: jax.Array  # f32[*b, E] softmax of the logits; sigmoid_bias: sigmoids divided by their sum
    changed: jax.Array | None = None  # bool[*b, 1] a replay took other experts than the router would; None: no replay

    @classmethod
    def recorded(cls, ids: Int32[Array, "*b k"]) -> Routing:
        """A routing of which only the ids are kept, to be replayed. The rest is NaN, which shows if it is used."""
        unknown = jnp.full(ids.shape, jnp.nan, jnp.float32)
        return cls(ids, unknown, unknown[..., :0])

    def only(self, active: Bool[Array, "*b"], experts: int) -> Routing:
        """The same where `active`; elsewhere no expert: ids of E = `experts`, weights of 0."""
        here = active[..., None]
        return self._replace(ids=jnp.where(here, self.ids, experts), weights=jnp.where(here, self.weights, 0.0))


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Sizes and rule of a router; field names are those of the published config.json files."""

    num_experts: int
    num_experts_per_tok: int
    kind: RouterKind = "softmax_topk"
    norm_topk_prob: bool = True
    """Divide the weights of the chosen experts by their sum."""
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    def __post_init__(self) -> None:
        """Refuse what no rule above describes."""
        if self.num_experts < 1:
            raise ValueError(f"num_experts={self.num_experts} must be >= 1; use a dense MLP where there are none")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be in 1..num_experts={self.num_experts}; "
                "lower it or add experts"
            )
        for name in ("n_group", "topk_group"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be 1; choice by groups of experts is not supported"
                )
        if not self.routed_scaling_factor > 0:
            raise ValueError(f"routed_scaling_factor={self.routed_scaling_factor} must be > 0; 1 leaves weights as is")
        if self.kind != "sigmoid_bias" and self.routed_scaling_factor != 1:
            raise ValueError(
                f"routed_scaling_factor={self.routed_scaling_factor} must be 1 with kind={self.kind!r}; "
                "only sigmoid_bias scales its weights"
            )
        if self.kind == "topk_softmax" and not self.norm_topk_prob:
            raise ValueError("norm_topk_prob=False must be True with kind='topk_softmax'; its weights always sum to 1")


class Router(nnx.Module):
    """Logits of all experts, the choice, the weights."""

    def __init__(self, width: int, cfg: RouterConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        # Not the axis "expert": every rank chooses among all experts, also where it holds a part of them.
        self.kernel = parameter(rngs, (width, cfg.num_experts), ("embed", "router"), nnx.initializers.normal(0.02))
        if cfg.kind == "topk_softmax":
            self.bias = parameter(rngs, (cfg.num_experts,), ("router",), nnx.initializers.zeros)
        if cfg.kind == "sigmoid_bias":
            self.e_score_correction_bias = parameter(rngs, (cfg.num_experts,), ("router",), nnx.initializers.zeros)

    def __call__(self, x: Float[Array, "n D"], recorded: Int32[Array, "n k"] | None = None) -> Routing:
        """Route n tokens; `recorded` ids that are not negative take the place of the router's own choice."""
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        if self.cfg.kind == "topk_softmax":
            logits = logits + self.bias[...].astype(jnp.float32)[None, :]
        correction = None
        if self.cfg.kind == "sigmoid_bias":
            correction = self.e_score_correction_bias[...].astype(jnp.float32)
        ids, changed = choose(logits, self.cfg, correction), None
        if recorded is not None:
            own, ids = ids, jnp.where(jnp.all(recorded >= 0, axis=-1, keepdims=True), recorded, ids)
            # As sets: the order of a token's experts says nothing about its output.
            changed = jnp.any(jnp.sort(own, axis=-1) != jnp.sort(ids, axis=-1), axis=-1, keepdims=True)
        return Routing(ids, weigh(logits, ids, self.cfg), probabilities(logits, self.cfg.kind), changed)


def choose(
    logits: Float32[Array, "n E"], cfg: RouterConfig, correction: Float32[Array, " E"] | None = None
) -> Int32[Array, "n k"]:
    """The experts of each token, best first, of equals the one of lower id. `correction` is for sigmoid_bias alone."""
    logits = jax.lax.stop_gradient(logits)
    if cfg.kind == "softmax_topk":
        scores = jax.nn.softmax(logits, axis=-1)
    elif cfg.kind == "sigmoid_bias" and correction is not None:
        scores = jax.nn.sigmoid(logits) + jax.lax.stop_gradient(correction)[None, :]
    else:
        scores = logits
    return jax.lax.top_k(scores, cfg.num_experts_per_tok)[1]


def weigh(logits: Float32[Array, "n E"], ids: Int32[Array, "n k"], cfg: RouterConfig) -> Float32[Array, "n k"]:
    """Weights of the experts `ids`; NaN for an id that is not below E.

    Quotients are taken of logarithms (for softmax: the softmax of the chosen logits). That is the same number, and it
    is one, with a gradient, also where a replayed choice has become so unlikely that its scores are 0 in float32.
    """
    take = lambda values: jnp.take_along_axis(values, ids, axis=-1, mode="fill", fill_value=jnp.nan)  # noqa: E731
    if cfg.kind == "sigmoid_bias":
        logs = take(jax.nn.log_sigmoid(logits))
        if cfg.norm_topk_prob:
            logs = logs - jnp.logaddexp(jax.nn.logsumexp(logs, axis=-1, keepdims=True), math.log(1e-20))
        return cfg.routed_scaling_factor * jnp.exp(logs)
    if cfg.kind == "softmax_topk" and not cfg.norm_topk_prob:
        return take(jax.nn.softmax(logits, axis=-1))
    return jax.nn.softmax(take(logits), axis=-1)


def probabilities(logits: Float32[Array, "n E"], kind: RouterKind) -> Float32[Array, "n E"]:
    """The law over all experts that entropy and balance are taken of; rows sum to 1."""
    # The softmax of log s is s / sum s.
    return jax.nn.softmax(jax.nn.log_sigmoid(logits) if kind == "sigmoid_bias" else logits, axis=-1)


class RoutingSums(NamedTuple):
    """Sums over tokens: those of micro-batches, layers and devices add up (`jax.tree.map(jnp.add, a, b)`, `psum`)."""

    load: jax.Array  # f32[E] tokens sent to each expert; sums to k * tokens
    mass: jax.Array  # f32[E] sum of the routers' probabilities
    entropy: jax.Array  # f32[] sum of the entropies of the probabilities, nats
    tokens: jax.Array  # f32[]
    changed: jax.Array  # f32[] tokens whose replayed experts are not those that the router would have chosen


def routing_sums(routing: Routing, counted: Bool[Array, "*b"]) -> RoutingSums:
    """Sum over the tokens that count, which padding does not. Gradients flow through `mass` and `entropy`."""
    experts = routing.probabilities.shape[-1]
    some = counted[..., None]
    law = jnp.where(some, routing.probabilities, 1.0 / experts).reshape(-1, experts)
    weight = counted.reshape(-1).astype(jnp.float32)
    ids = jnp.where(some, routing.ids, -1).reshape(-1)
    changed = jnp.zeros_like(weight) if routing.changed is None else routing.changed.reshape(-1).astype(jnp.float32)
    return RoutingSums(
        load=jnp.sum(ids[:, None] == jnp.arange(experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.float32),
        mass=jnp.sum(weight[:, None] * law, axis=0),
        entropy=jnp.sum(weight * jnp.sum(jax.scipy.special.entr(law), axis=-1)),
        tokens=jnp.sum(weight),
        changed=jnp.sum(weight * changed),
    )


def balance_loss(sums: RoutingSums) -> Float32[Array, ""]:
    """E * sum over experts of (load_e / tokens) * (mass_e / tokens), without coefficient; 0 where no token counts.

    The form of the Switch Transformer (eq. 4-6) for k experts per token, as in transformers: k when all experts are
    used alike, up to E when few are. Load is a constant, the gradient is that of the probabilities.
    """
    tokens = jnp.where(sums.tokens > 0, sums.tokens, 1.0)
    load, mass = jax.lax.stop_gradient(sums.load) / tokens, sums.mass / tokens
    return sums.load.shape[0] * jnp.sum(load * mass)


def routing_metrics(sums: RoutingSums) -> dict[str, Any]:
    """Scalars for the log: mean entropy (nats), the most and least used expert's load over the mean load, the loss."""
    tokens = jnp.where(sums.tokens > 0, sums.tokens, 1.0)
    total = jnp.sum(sums.load)
    share = sums.load * sums.load.shape[0] / jnp.where(total > 0, total, 1.0)
    return {
        "entropy": sums.entropy / tokens,
        "load_max": jnp.max(share),
        "load_min": jnp.min(share),
        "balance_loss": balance_loss(sums),
    }


def distinct_experts(ids: Int32[Array, "*b T k"], counted: Bool[Array, "*b T"], experts: int) -> Int32[Array, "*b"]:
    """How many different experts the counted ones of T tokens are sent to: the weights that a verify block reads."""
    ids = jnp.where(counted[..., None], ids, -1)
    every = jnp.expand_dims(jnp.arange(experts, dtype=jnp.int32), range(ids.ndim))
    touched = jnp.any(ids[..., None] == every, axis=(-3, -2))
    return jnp.sum(touched, axis=-1, dtype=jnp.int32)
