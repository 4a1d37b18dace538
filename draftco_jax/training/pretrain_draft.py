"""One step of training a draft alone on a fixed policy, and what it starts from.

The loss is that of the joint update: the policy's own forward on packed rows, cut from its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, Int32, Int64

from draftco_jax.drafts.base import DraftConfig, DraftReport, Target, TrainingContext
from draftco_jax.drafts.catalog import family_of
from draftco_jax.drafts.vocabulary import graph_with_map
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.models.compute import FloatName
from draftco_jax.models.functional import ModelGraph, Params
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.masked import masked_sum
from draftco_jax.numerics.sampling import SamplingConfig, law
from draftco_jax.numerics.shift import look_ahead, same_document
from draftco_jax.training.optimizer import apply_gradients
from draftco_jax.training.update import TrainState
from draftco_jax.types import PackedBatch


@dataclass(frozen=True, kw_only=True)
class PretrainSpec:
    """What is fixed when the step is compiled."""

    policy_graph: ModelGraph
    draft_cfg: DraftConfig
    """With the loss of this phase: a model takes its loss from the config it was built with."""
    kept: Int32[np.ndarray, " W"] | None
    """Target ids of a reduced draft vocabulary."""
    context: TrainingContext
    draft_dtype: FloatName = "float32"
    seed: int = 0
    """Root of what a draft's loss draws at random (its anchors), with the optimizer steps taken as in a run."""


StepFn = Callable[[TrainState, Params, PackedBatch], tuple[TrainState, dict[str, Array]]]


def init_state(draft: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0. The policy is no part of the state: it does not change."""
    return TrainState(jnp.int32(0), None, draft, optax.EmptyState(), optimizer.init(draft))


def draft_of(state: TrainState) -> Params:
    """The draft of a state of this training, which always has one."""
    assert state.draft is not None
    return state.draft


def make_step(spec: PretrainSpec, optimizer: optax.GradientTransformation) -> StepFn:
    """Compile ``step(state, policy, batch) -> (state, metrics)``; metrics are float32 scalars.

    The new state takes the memory of the old one, which cannot be read any more.
    """
    family = family_of(spec.draft_cfg)
    assert family.loss is not None and family.denominator is not None, "families without weights are refused before"
    family_loss, family_denominator = family.loss, family.denominator
    draft_graph = graph_with_map(spec.draft_cfg, spec.kept)

    def loss_fn(draft: Params, policy: Params, batch: PackedBatch, key: Array) -> tuple[Array, DraftReport]:
        target_model: Decoder = spec.policy_graph.merge(policy)
        taps_of = spec.draft_cfg.tap_layers
        output = target_model(batch.tokens, batch.positions, batch.segment_ids, tap_layers=taps_of)
        target = Target.of(target_model, output, spec.draft_dtype)
        denominator = family_denominator(batch, spec.draft_cfg, key)
        model = draft_graph.merge(draft)
        return family_loss(model, target, batch, denominator=denominator, key=key, context=spec.context)

    # The policy is an argument: closed over, its weights would be constants of the program.
    def step(state: TrainState, policy: Params, batch: PackedBatch) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(spec.seed), state.step)
        (loss, report), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.draft, policy, batch, key)
        assert state.draft_optimizer is not None
        draft, moments = apply_gradients(optimizer, gradients, state.draft_optimizer, state.draft)
        metrics = {"draft/loss": loss, "draft/gradient_norm": optax.tree.norm(gradients)} | draft_metrics(report)
        return TrainState(state.step + 1, None, draft, state.policy_optimizer, moments), metrics

    return jax.jit(step, donate_argnums=0)


def draft_metrics(report: DraftReport) -> dict[str, Array]:
    """Names as in a run, steps of the draft counted from 1; tv is 1 - acceptance."""
    metrics = {"draft/tau_prob": report.tau_prob}
    for k in range(report.losses.shape[0]):
        metrics[f"draft/loss_position_{k + 1}"] = report.losses[k]
        metrics[f"draft/tv_position_{k + 1}"] = 1.0 - report.acceptances[k]
    return metrics | {f"draft/{name}": value for name, value in report.extra.items()}


def token_counts(batch: PackedBatch, vocab_size: int) -> Int64[np.ndarray, " V"]:
    """How often the policy itself sampled each token; prompts and padding are not counted."""
    tokens = np.asarray(batch.tokens)[np.asarray(batch.label_mask) > 0]
    return np.bincount(tokens, minlength=vocab_size).astype(np.int64)


def keep_rows(policy: Params, kept: Int32[np.ndarray, " W"] | None) -> Params:
    """The policy with the head of the kept ids only, [D, W]: what a draft of a reduced vocabulary starts from."""
    if kept is None:
        return policy
    head = policy["lm_head"]["kernel"] if "lm_head" in policy else policy["embed_tokens"].T
    return policy | {"lm_head": {"kernel": head[:, kept]}}


def make_mass_outside(
    policy_graph: ModelGraph, kept: Int32[np.ndarray, " W"], sampling: SamplingConfig, chunk_tokens: int
) -> Callable[[Params, PackedBatch], tuple[Float32[Array, ""], Float32[Array, ""]]]:
    """Compile ``(policy, batch) -> (sum, count)`` over labels of the policy's mass outside the kept ids.

    sum / count is the mass; 1 - mass is the most that the draft's tokens can be accepted with: TV(p, q) is at least
    the mass where q = 0.
    """

    def mass_outside(policy: Params, batch: PackedBatch) -> tuple[Array, Array]:
        model: Decoder = policy_graph.merge(policy)
        hidden = model(batch.tokens, batch.positions, batch.segment_ids).hidden
        outside = jnp.ones(model.head_kernel().shape[1], jnp.float32).at[kept].set(0.0)

        def mass(states: Any) -> Array:
            return law(model.logits(states), sampling) @ outside

        predicts = look_ahead(batch.label_mask, 1) * same_document(batch.segment_ids, 1).astype(jnp.float32)
        masses = map_tokens(mass, (hidden,), chunk_tokens=chunk_tokens)
        return masked_sum(masses, predicts), jnp.sum(predicts)

    return jax.jit(mass_outside)
