"""Loss of DFlash on packed rows."""

from __future__ import annotations

import jax
from jaxtyping import Array, Bool, Float32, Int

from draftco_jax.drafts.base import DraftReport, Target, TrainingContext
from draftco_jax.drafts.blocks.training import draft_acceptance, forward, on_chosen_anchors
from draftco_jax.drafts.dflash.module import DFlash
from draftco_jax.drafts.labels import draft_loss, report
from draftco_jax.types import PackedBatch


def loss_at(
    draft: DFlash,
    target: Target,
    batch: PackedBatch,
    anchors: Int[Array, "R C"],
    keep: Bool[Array, "R C"],
    *,
    denominator: Array,
    context: TrainingContext,
) -> tuple[Float32[Array, ""], DraftReport]:
    """Loss over the blocks of these anchors; those that are not kept count nothing.

    `target` is cut here. Its `hidden` may be None where the loss needs no teacher; acceptance is then estimated from
    the labels.
    """
    cfg = draft.cfg
    target = jax.lax.stop_gradient(target)
    proposes_mode = cfg.proposals == "argmax"
    with_teacher = cfg.loss.needs_teacher or (target.hidden is not None and not proposes_mode)
    run = forward(draft, target, batch, anchors, keep, context, with_teacher=with_teacher)
    loss, per_label = draft_loss(run.terms, run.labels, cfg.loss, denominator)
    accepted = draft_acceptance(run, target, context, proposes_mode=proposes_mode)
    return loss, report(per_label, accepted, run.labels.masks, context, accuracy=run.terms.label_is_mode)


blocks_loss = on_chosen_anchors(loss_at)
"""The family's loss: `loss_at` of the anchors that the step's key chooses."""
