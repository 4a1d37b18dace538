"""Training of multi-token prediction heads on packed rows: K recursive uses of the one layer at every index.

Step k at index t reads the data's token x_{t+1+k} (never the head's own guess) and predicts x_{t+2+k}. It is live where
that LABEL is supervised and lies in the document of t. Its teacher, for losses that have one and for acceptance, is the
policy's law at t + 1 + k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import DraftReport, Target, TrainingContext
from draftco_jax.drafts.labels import Ahead, Labels, draft_loss, report, step_terms, weigh_labels
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.mtp.module import Mtp
from draftco_jax.types import PackedBatch


def look_ahead(batch: PackedBatch, cfg: MtpConfig, packed: PackedRows = WHOLE_ROWS) -> Ahead:
    """The batch with as much of what follows as the steps ask for."""
    return Ahead(batch, cfg.label_reach, packed)


def step_masks(ahead: Ahead, steps: int) -> Float32[Array, "n R T"]:
    """1 where step k at t is live: x_{t+2+k} is supervised and in the document of t."""
    masks = [ahead.at("label_mask", k + 2) * ahead.same_document(k + 2).astype(jnp.float32) for k in range(steps)]
    return jnp.stack(masks)


def labels(ahead: Ahead, cfg: MtpConfig) -> Labels:
    """Every index of a row is an anchor; step k weighs step_decay^k, normalised."""
    of_label = lambda name: jnp.stack([ahead.at(name, k + 2) for k in range(cfg.steps)])  # noqa: E731
    return weigh_labels(
        step_masks(ahead, cfg.steps),
        cfg.step_weights,
        ahead.batch.segment_ids,
        ahead.batch,
        cfg.loss,
        rewards=of_label("label_rewards"),
        advantages=of_label("label_advantages"),
        packed=ahead.packed,
    )


def denominator(
    batch: PackedBatch, cfg: MtpConfig, key: Key[Array, ""], packed: PackedRows = WHOLE_ROWS
) -> Float32[Array, ""]:
    """What the loss of these rows is divided by; the caller adds up devices and micro-batches. `key` is not used."""
    return labels(look_ahead(batch, cfg, packed), cfg).denominator


def steps_loss(
    draft: Mtp,
    target: Target,
    batch: PackedBatch,
    *,
    denominator: Array,
    key: Key[Array, ""],
    context: TrainingContext,
) -> tuple[Float32[Array, ""], DraftReport]:
    """Loss over all steps, and what each step would have been accepted with.

    Gradients reach the head's own parameters only: hidden states, embedding and the policy's output head are cut here.

    Args:
        draft: the draft model.
        target: the policy's forward on `batch`; `hidden` is this draft's input, so it is always needed.
        batch: packed rows.
        denominator: global sum of `denominator(batch, cfg, key)`.
        key: not used, this family draws nothing.
        context: sampling of the rollouts (losses use the temperature, acceptance the filters too), chunk of tokens,
            k of the rollouts, how the batch is spread over devices.
    """
    if target.hidden is None:
        raise ValueError("target.hidden=None must be the policy's final states, the draft's input; keep them")
    hidden, cfg = jax.lax.stop_gradient(target.hidden).astype(target.embedding.dtype), draft.cfg
    target = jax.lax.stop_gradient(target)
    ahead = look_ahead(batch, cfg, context.packed)
    embeds = [target.embedding[ahead.tokens(k + 1)] for k in range(cfg.steps)]
    outputs = draft.unroll(embeds, hidden, batch.positions, batch.segment_ids, context.packed)

    features = draft.norm(jnp.stack(outputs, axis=2))
    head = target.head
    terms = step_terms(features, head, hidden, head, ahead, context, frozen_rows=head.shape[0])
    of_batch = labels(ahead, cfg)
    loss, per_label = draft_loss(terms, of_batch, cfg.loss, denominator)
    return loss, report(per_label, terms.overlap, of_batch.masks, context)
