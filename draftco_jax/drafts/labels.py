"""From masks of labels to a draft's loss: the same steps for every family.

A family says where its labels are (`masks`) and how its steps weigh (`step_weights`). This file applies the weights of
samples, the normaliser and D-PACE as the loss config says, so that they mean the same for all families.

Letters: n steps (passes, slots), R packed rows, A anchors of a row (every index, where each is one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.drafts.base import DraftReport
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.draft import (
    DraftLossConfig,
    advantage_weights,
    d_pace_weights,
    expected_accepted_length,
    label_probability,
    per_label_loss,
    reward_weights,
    scale_labels,
    weighted_loss,
)
from draftco_jax.losses.law_pair import LawPairTerms
from draftco_jax.numerics.masked import masked_mean
from draftco_jax.numerics.shift import look_ahead, same_document
from draftco_jax.types import PackedBatch


class Labels(NamedTuple):
    """Which labels are trained, how they weigh, and what these rows add to the denominator."""

    masks: jax.Array  # f32[n, R, A] 1 where live
    weights: jax.Array  # f32[n, R, A] as `weighted_loss` wants them
    denominator: jax.Array  # f32[]


def weigh_labels(
    masks: Float32[Array, "n R A"],
    step_weights: tuple[float, ...],
    documents: Int[Array, "R A"],
    batch: PackedBatch,
    cfg: DraftLossConfig,
    *,
    rewards: Float32[Array, "n R A"],
    advantages: Float32[Array, "n R A"],
) -> Labels:
    """Weights of the labels: mask * weight of the step * weight of the sample, through the normaliser.

    Args:
        masks: 1 where a label is live.
        step_weights: n fixed weights. Under `label_weights="d_pace"` they are left out: D-PACE takes their place.
        documents: segment id of each anchor, 0 for none.
        batch: the rows, for the number of positions.
        cfg: the loss.
        rewards: of each label's answer; read where the mask is 1 only.
        advantages: likewise.
    """
    ones = jnp.ones(len(step_weights), jnp.float32)
    fixed = ones if cfg.label_weights == "d_pace" else jnp.array(step_weights, jnp.float32)
    weights = masks * fixed[:, None, None]
    if cfg.sample_weights == "reward":
        weights = weights * reward_weights(rewards, floor=cfg.reward_floor)
    elif cfg.sample_weights == "advantage":
        weights = weights * advantage_weights(advantages, scale=cfg.advantage_scale)
    scaled, denominator = scale_labels(
        weights,
        documents,
        normaliser=cfg.normaliser,
        positions=jnp.sum(batch.segment_ids > 0).astype(jnp.float32),
        max_documents=batch.segment_ids.shape[1],
    )
    return Labels(masks, scaled, denominator)


def map_steps(
    fn: Callable[..., LawPairTerms],
    features: Float[Array, "n R T F"],
    batch: PackedBatch,
    hidden: Float[Array, "R T D"] | None,
    chunk_tokens: int,
) -> LawPairTerms:
    """Both laws of each step at every index: step k at t speaks of x_{t+2+k} and learns from the policy at t + 1 + k.

    All steps go through one loop over chunks: the backward pass then accumulates the head's gradient once, where a loop
    for each step would hold one more copy of it for each.

    Args:
        fn: ``fn(features [c, F], labels i32[c], teacher [c, D] or None)`` for c tokens.
        features: what the head reads of each step.
        batch: the rows.
        hidden: the policy's final states; None where no loss needs its law.
        chunk_tokens: upper bound of c.
    """
    steps, (rows, tokens) = features.shape[0], batch.tokens.shape
    labels = jnp.stack([tokens_ahead(batch, k + 2) for k in range(steps)])
    # Indices and not states: shifted copies of the states would take n times their memory.
    index = jnp.arange(rows * tokens, dtype=jnp.int32).reshape(rows, tokens)
    teachers = jnp.stack([look_ahead(index, k + 1) for k in range(steps)])
    flat = None if hidden is None else hidden.reshape(rows * tokens, -1)

    def terms(features: Array, labels: Array, teachers: Array) -> LawPairTerms:
        return fn(features, labels, None if flat is None else flat[teachers])

    merged = [a.reshape(steps * rows, *a.shape[2:]) for a in (features, labels, teachers)]
    out = map_tokens(terms, tuple(merged), chunk_tokens=chunk_tokens)
    return jax.tree.map(lambda a: a.reshape(steps, rows, tokens), out)


def tokens_ahead(batch: PackedBatch, steps: int) -> Int[Array, "R T"]:
    """x_{t+steps} inside the document, token 0 past its end (no live label reads that)."""
    inside = same_document(batch.segment_ids, steps)
    return jnp.where(inside, look_ahead(batch.tokens, steps), 0)


def draft_loss(
    terms: LawPairTerms, labels: Labels, cfg: DraftLossConfig, denominator: Array
) -> tuple[Float32[Array, ""], Float32[Array, "n R A"]]:
    """sum(weight * loss of the label) / the global denominator, and the loss of each label."""
    per_label = per_label_loss(terms, labels.masks, cfg)
    weights = labels.weights
    if cfg.label_weights == "d_pace":
        weights = weights * d_pace_weights(label_probability(terms), labels.masks, alpha=cfg.d_pace_alpha)
    return weighted_loss(per_label, weights, denominator), per_label


def report(
    losses: Float32[Array, "n R A"],
    acceptances: Float32[Array, "n R A"],
    masks: Float32[Array, "n R A"],
    draft_length: int,
    **extra: Array,
) -> DraftReport:
    """Means of each step over its live labels, labels outside the draft vocabulary counted (they can be rejected)."""
    counts = jnp.sum(masks, axis=(1, 2))
    mean = jax.vmap(lambda v, m, c: masked_mean(v, m, count=c))
    total, anchors = expected_accepted_length(acceptances[:draft_length], masks[:draft_length])
    means = mean(losses, masks, counts), mean(acceptances, masks, counts)
    return jax.lax.stop_gradient(DraftReport(*means, total / jnp.maximum(anchors, 1.0), extra))
