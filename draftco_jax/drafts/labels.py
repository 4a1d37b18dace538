"""From masks of labels to a draft's loss: the same steps for every family.

A family says where its labels are (`masks`) and how its steps weigh (`step_weights`). This file applies the weights of
samples, the normaliser and D-PACE as the loss config says, so that they mean the same for all families.

Letters: n steps (passes, slots), R packed rows and T tokens of this device, A anchors of a row (every index, where each
is one), E = tokens of a row with its halos.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from draftco_jax.context_parallel import PackedRows
from draftco_jax.drafts.base import DraftReport, TrainingContext
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
from draftco_jax.losses.law_pair import LawPairTerms, Teacher, law_pair_terms
from draftco_jax.numerics.masked import masked_sum
from draftco_jax.types import PackedBatch


class Labels(NamedTuple):
    """Which labels are trained, how they weigh, and what these rows add to the denominator."""

    masks: jax.Array  # f32[n, R, A] 1 where live
    weights: jax.Array  # f32[n, R, A] as `weighted_loss` wants them
    denominator: jax.Array  # f32[]


class Ahead:
    """A batch seen from each of its indices: what stands up to `reach` tokens further in the row.

    Halos are exchanged once, for all steps and all arrays that are looked at.
    """

    def __init__(self, batch: PackedBatch, reach: int, packed: PackedRows) -> None:
        self.batch, self.reach, self.packed = batch, reach, packed
        self.local_tokens = batch.tokens.shape[1]
        self.extended: PackedBatch = packed.extend(batch, reach)

    def at(self, name: str, steps: int) -> Shaped[Array, "R T"]:
        """The array of that name, `steps` tokens ahead of each index whatever the document; 0 past the row's end."""
        return self.packed.shifted(getattr(self.extended, name), steps, self.local_tokens)

    def same_document(self, steps: int) -> Bool[Array, "R T"]:
        """Whether t + steps lies in the document of t; False on padding."""
        own = self.batch.segment_ids
        return (own > 0) & (self.at("segment_ids", steps) == own)

    def tokens(self, steps: int) -> Int[Array, "R T"]:
        """x_{t+steps} inside the document, token 0 past its end (no live label reads that)."""
        return jnp.where(self.same_document(steps), self.at("tokens", steps), 0)

    def places(self, local: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Where these indices are in a row of `flat` arrays; the token j after one stands j places after it."""
        return self.packed.places(local, self.reach, self.local_tokens)

    def span(self, count: int, steps: int) -> int:
        """Entries of a `flat` array that hold the tokens 1..steps after each of `count` indices in a row."""
        return self.packed.span(count, self.reach, self.local_tokens) + steps

    def flat(self, name: str) -> Shaped[Array, "R E"]:
        """The extended array of that name with its pieces one after another."""
        return self.flatten(getattr(self.extended, name))

    def flatten(self, extended: Shaped[Array, "R p e *rest"]) -> Shaped[Array, "R E *rest"]:
        """Pieces one after another."""
        return extended.reshape(extended.shape[0], -1, *extended.shape[3:])


def weigh_labels(
    masks: Float32[Array, "n R A"],
    step_weights: tuple[float, ...],
    documents: Int[Array, "R A"],
    batch: PackedBatch,
    cfg: DraftLossConfig,
    *,
    rewards: Float32[Array, "n R A"],
    advantages: Float32[Array, "n R A"],
    packed: PackedRows,
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
        packed: how the rows are spread over devices; the denominator is what this device adds to the global one.
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
        max_documents=batch.segment_ids.shape[1] * packed.ranks,
        packed=packed,
    )
    return Labels(masks, scaled, denominator)


def step_terms(
    features: Float[Array, "R T n F"],
    kernel: Float[Array, "F W"],
    hidden: Float[Array, "R T D"] | None,
    head: Float[Array, "D V"],
    ahead: Ahead,
    context: TrainingContext,
    *,
    kept: Int[Array, " W"] | None = None,
    frozen_rows: int = 0,
) -> LawPairTerms:
    """Both laws of each step at every index, arrays [n, R, T].

    Step k at t speaks of x_{t+2+k} and learns from the policy at t + 1 + k. The steps of an index stand side by side,
    so that a chunk of labels learns from few of the policy's states.

    Args:
        features: what the draft's head reads of each step.
        kernel: the draft's head.
        hidden: the policy's final states; None where no loss needs its law.
        head: the policy's head.
        ahead: the batch, with a reach of n + 1.
        context: sampling, chunk and tile.
        kept: target id of each draft id; None: all ids.
        frozen_rows: leading rows of `kernel` that get no gradient, see `law_pair_terms`.
    """
    rows, tokens, steps = features.shape[:3]
    labels = jnp.stack([ahead.tokens(k + 2) for k in range(steps)], axis=-1)
    teacher, anchors = None, -(-context.chunk_tokens // steps) + 1
    if hidden is not None:
        states = ahead.flatten(ahead.packed.extend(hidden, ahead.reach))
        # Places and not states: shifted copies of the states would take n times their memory.
        at = states.shape[1] * jnp.arange(rows, dtype=jnp.int32)[:, None]
        at = at + ahead.places(jnp.arange(tokens, dtype=jnp.int32))[None, :]
        at = at[:, :, None] + jnp.arange(1, steps + 1, dtype=jnp.int32)[None, None, :]
        teacher = Teacher(states.reshape(-1, states.shape[-1]), head, at.reshape(-1))
    terms = law_pair_terms(
        features.reshape(-1, features.shape[-1]),
        kernel,
        teacher,
        labels.reshape(-1),
        kept=kept,
        sampling=context.sampling,
        tile=context.tile,
        chunk_tokens=context.chunk_tokens,
        frozen_rows=frozen_rows,
        span=ahead.span(anchors, steps),
    )
    return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(rows, tokens, steps), -1, 0), terms)


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
    context: TrainingContext,
    **extra: Float32[Array, "n R A"],
) -> DraftReport:
    """Of this device's labels; those outside the draft vocabulary are counted (they can be rejected).

    `extra`: values [n, R, A] by metric name.
    """
    sums = jax.vmap(masked_sum)
    length = context.draft_length
    reached, anchors = expected_accepted_length(acceptances[:length], masks[:length])
    return jax.lax.stop_gradient(
        DraftReport(
            loss_sums=sums(losses, masks),
            acceptance_sums=sums(acceptances, masks),
            labels=jnp.sum(masks, axis=(1, 2)),
            reached_sum=reached,
            anchors=anchors,
            extra_sums={name: masked_sum(values, masks) for name, values in extra.items()},
        )
    )
