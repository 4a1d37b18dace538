"""Loss of DSpark on packed rows: what the drafts are trained on, plus the confidence head's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from draftco_jax.drafts.base import DraftReport, Target, TrainingContext
from draftco_jax.drafts.blocks.training import (
    Forward,
    draft_acceptance,
    forward,
    label_terms,
    on_chosen_anchors,
    teacher_of,
)
from draftco_jax.drafts.dspark.module import DSpark
from draftco_jax.drafts.labels import draft_loss, report
from draftco_jax.losses.draft import weighted_loss
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch


def loss_at(
    draft: DSpark,
    target: Target,
    batch: PackedBatch,
    anchors: Int[Array, "R C"],
    keep: Bool[Array, "R C"],
    *,
    denominator: Array,
    context: TrainingContext,
) -> tuple[Float32[Array, ""], DraftReport]:
    """Loss over the blocks of these anchors; those that are not kept count nothing.

    `target` is cut here. Its `hidden` may be None where nothing with weight needs it.
    """
    cfg = draft.cfg
    target = jax.lax.stop_gradient(target)
    if target.hidden is None and (cfg.loss.needs_teacher or cfg.trains_confidence):
        raise ValueError(
            "target.hidden=None must be the policy's states where the loss compares laws; pass them, or set l1 and "
            "confidence_loss_weight to 0"
        )
    run = forward(draft, target, batch, anchors, keep, context, with_teacher=target.hidden is not None)
    loss, per_label = draft_loss(run.terms, run.labels, cfg.loss, denominator)
    extra = {"accuracy": run.terms.label_is_mode}
    if cfg.trains_confidence:
        accepted = confidence_target(run, target, context)
        logits = jnp.moveaxis(draft.confidence(run.states, run.previous), -1, 0)
        entropy = binary_cross_entropy(logits, accepted)
        loss += cfg.confidence_loss_weight * weighted_loss(entropy, run.labels.weights, denominator)
        extra |= {
            "confidence_loss": entropy,
            "confidence_abs_error": jnp.abs(jax.nn.sigmoid(logits) - accepted),
        }
    accepted = draft_acceptance(run, target, context, proposes_mode=False)
    return loss, report(per_label, accepted, run.labels.masks, context, **extra)


blocks_loss = on_chosen_anchors(loss_at)
"""The family's loss: `loss_at` of the anchors that the step's key chooses."""


def confidence_target(run: Forward, target: Target, context: TrainingContext) -> Float32[Array, "d R C"]:
    """1 - |q - p|_1 / 2 of each draft at temperature 1, in [0, 1]; no gradient."""
    terms = run.terms
    if context.sampling.temperature != 1.0:
        plain = context._replace(sampling=SamplingConfig())
        features, kernel = jax.lax.stop_gradient((run.features, run.kernel))
        teacher = teacher_of(target, run.ahead, run.blocks)
        terms = label_terms(features, kernel, teacher, run.ahead, run.blocks, plain, frozen_rows=kernel.shape[0])
    return jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * terms.l1, 0.0, 1.0))


def binary_cross_entropy(logits: Float32[Array, "*b"], target: Float32[Array, "*b"]) -> Float32[Array, "*b"]:
    """-(t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))) in nats, from logits: finite for every finite z."""
    return target * jax.nn.softplus(-logits) + (1.0 - target) * jax.nn.softplus(logits)
