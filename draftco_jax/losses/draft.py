"""Losses of drafts, label by label, and how labels are weighed and averaged; the same for every family.

A family lays its labels out as [n, R, A]: n steps (EAGLE-3 passes, DFlash and DSpark slots, MTP steps) of A anchors in
R packed rows. `losses/law_pair.py` says what both laws think of a label, `per_label_loss` makes one number of it, and

    loss = weighted_loss(per_label, weights, denominator) = sum(w * l) / denominator

with weights = mask * weight of the step * weight of the sample, through `scale_labels`. Denominators of micro-batches
or shards are added up BEFORE the division, so that a split changes nothing. All statistics float32.

What the denominator is decides who counts. "valid_labels" is the global mean over labels: a long answer then weighs as
much as it is long, and DeepSpec (deepspec/modeling/eagle3/loss.py) reports that accepted length falls over training
with it. "all_positions" is what EAGLE, SpecForge and DeepSpec do, "per_sequence" gives each answer the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.losses.law_pair import LawPairTerms
from draftco_jax.numerics.masked import masked_sum, safe_count

# Acceptances below this cost -log(1e-8) = 18.4 nats in `lk_alpha` and get no gradient: 1 / a overflows beyond.
SMALLEST_ACCEPTANCE = 1e-8

_TERMS = (
    "soft_cross_entropy",
    "hard_cross_entropy",
    "l1",
    "total_variation",
    "end_to_end_tv",
    "lk_alpha",
    "lk_lambda",
)

Normaliser = Literal["valid_labels", "all_positions", "per_sequence", "sequences"]


@dataclass(frozen=True, kw_only=True)
class DraftLossConfig:
    """What a draft is trained on: weights of terms that are added up, >= 0. a = sum_v min(p(v), q(v))."""

    soft_cross_entropy: float = 0.0
    """-sum_v p~(v) log q(v): forward KL to the policy restricted to draft ids (EAGLE-3)."""
    hard_cross_entropy: float = 0.0
    """-log q(label) (DFlash, MTP); the only term that needs no teacher."""
    l1: float = 0.0
    """sum_v |p - q|, the FULL norm as in DeepSpec; total variation is half of it."""
    total_variation: float = 0.0
    """1 - a."""
    end_to_end_tv: float = 0.0
    """1 - prod_{i <= j} a_i at step j: the share of rounds that do not reach it (Bebop, arXiv 2606.12370)."""
    lk_alpha: float = 0.0
    """-log a (arXiv 2602.23881)."""
    lk_lambda: float = 0.0
    """w CE + (1 - w) (1 - a), w = lk_scale exp(-lk_decay a) without gradient (arXiv 2602.23881)."""
    lk_scale: float = 1.0
    """Weight of the cross-entropy in `lk_lambda` at acceptance 0, in (0, 1]; 1 in SpecForge."""
    lk_decay: float = 1.0
    """How fast that weight falls with acceptance, >= 0; 1 in SpecForge."""
    label_weights: Literal["decay", "d_pace"] = "decay"
    """Weight of a step: the family's fixed decay, or `d_pace_weights` in its place."""
    d_pace_alpha: float = 0.5
    """Smoothing of confidences in `d_pace_weights`, in [0, 1]; 0.5 in SpecForge."""
    sample_weights: Literal["none", "reward", "advantage"] = "none"
    """Weight of an answer: 1, `reward_weights` or `advantage_weights`."""
    reward_floor: float = 0.1
    """Weight of an answer of reward 0 under `sample_weights="reward"`, in [0, 1]."""
    advantage_scale: float = 1.0
    """Log-weight per unit of advantage under `sample_weights="advantage"`, >= 0."""
    normaliser: Normaliser = "valid_labels"
    """What the loss is divided by: see `scale_labels`."""

    def __post_init__(self) -> None:
        """Refuse weights that name no loss."""
        for name in (*_TERMS, "lk_decay", "advantage_scale"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and >= 0; use 0 to leave it out")
        if not any(getattr(self, name) > 0 for name in _TERMS):
            raise ValueError(f"{_TERMS[0]}=0.0 must be > 0 where all other terms are 0; use 1.0")
        for name in ("d_pace_alpha", "reward_floor"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1]; leave it out for the default")
        if not 0.0 < self.lk_scale <= 1.0:
            raise ValueError(f"lk_scale={self.lk_scale} must be in (0, 1]; use 1.0")

    @property
    def needs_teacher(self) -> bool:
        """Whether any term with weight looks at the policy's law."""
        return any(getattr(self, name) > 0 for name in _TERMS if name != "hard_cross_entropy")


def per_label_loss(
    terms: LawPairTerms,
    masks: Float32[Array, "n R A"],
    cfg: DraftLossConfig,
    *,
    step_acceptance: Float32[Array, " n"] | None = None,
) -> Float32[Array, "n R A"]:
    """Return sum_i cfg.weight_i * term_i of each label; exactly 0, without gradient, where the mask is 0.

    A term with weight 0 is not looked at. Cross-entropies of labels that the draft cannot learn are 0: the policy's
    mode (soft) or the label (hard) is no draft id. Terms in a keep such labels, which can be rejected but not left
    out. Under top-k, top-p or min-p the losses take a of the unfiltered laws.

    Args:
        terms: of labels [n, R, A].
        masks: > 0 where a label is live. A label that is not is left out of the products of `end_to_end_tv`.
        cfg: the weights.
        step_acceptance: mean acceptance of each step, from which `lk_lambda` takes its mix, as SpecForge does. None
            takes each label's own a, so that splitting a batch changes nothing.
    """
    live = masks > 0
    overlap = terms.overlap if terms.unfiltered_overlap is None else terms.unfiltered_overlap
    accepted = jnp.where(live, overlap, 1.0)
    loss = jnp.zeros_like(masks)
    if cfg.soft_cross_entropy > 0:
        loss += cfg.soft_cross_entropy * _learnable(terms.soft_cross_entropy, live, terms.mode_kept)
    if cfg.hard_cross_entropy > 0:
        loss += cfg.hard_cross_entropy * _learnable(terms.hard_cross_entropy, live, terms.label_kept)
    if cfg.l1 > 0:
        loss += cfg.l1 * jnp.where(live, terms.l1, 0.0)
    if cfg.total_variation > 0:
        loss += cfg.total_variation * (1.0 - accepted)
    if cfg.end_to_end_tv > 0:
        loss += cfg.end_to_end_tv * jnp.where(live, 1.0 - jnp.cumprod(accepted, axis=0), 0.0)
    if cfg.lk_alpha > 0:
        loss -= cfg.lk_alpha * jnp.log(jnp.maximum(accepted, SMALLEST_ACCEPTANCE))
    if cfg.lk_lambda > 0:
        measured = accepted if step_acceptance is None else step_acceptance[:, None, None]
        mix = cfg.lk_scale * jnp.exp(-cfg.lk_decay * lax.stop_gradient(measured))
        entropy = _learnable(terms.soft_cross_entropy, live, terms.mode_kept)
        loss += cfg.lk_lambda * (mix * entropy + (1.0 - mix) * (1.0 - accepted))
    return loss


def _learnable(entropy: Array, live: Array, kept: Array) -> Array:
    return jnp.where(live & (kept > 0), entropy, 0.0)


def scale_labels(
    weights: Float32[Array, "n R A"],
    documents: Int[Array, "R A"],
    *,
    normaliser: Normaliser,
    positions: Float32[Array, ""],
    max_documents: int,
    packed: PackedRows = WHOLE_ROWS,
) -> tuple[Float32[Array, "n R A"], Float32[Array, ""]]:
    """Return the weights as `weighted_loss` wants them, and the denominator of these rows.

    valid_labels: (w, sum w). per_sequence: (w / sum of w over the document, number of documents with a label): the mean
    over answers of each answer's mean. all_positions: (w, positions), so the loss is sum_k w_k sum_t l / positions.
    sequences: (w, number of documents with a label), the sum over an answer's labels, as D-PACE has it.
    Rows are independent: denominators of micro-batches and shards add up.

    Args:
        weights: mask * weight of the step * weight of the sample, >= 0. Not D-PACE's, which come after.
        documents: segment id of each anchor within its row; an anchor of 0 has no document, and its weights become 0.
        normaliser: which of the above.
        positions: number of real tokens (segment id > 0) of these rows.
        max_documents: the largest segment id that can occur; the row length will do.
        packed: how rows are spread over devices: labels of one document may lie on several.
    """
    weights = jnp.where((documents > 0)[None], weights, 0.0)
    if normaliser == "valid_labels":
        return weights, jnp.sum(weights)
    if normaliser == "all_positions":
        return weights, positions
    count = max_documents + 1  # a segment sum per row; id 0 collects zeros
    segment_sum = jax.vmap(lambda w, d: jax.ops.segment_sum(w, d, num_segments=count))
    of_document = packed.row_total(segment_sum(jnp.sum(weights, axis=0), documents))
    denominator = packed.once_a_row(jnp.sum((of_document > 0).astype(jnp.float32)))
    if normaliser == "sequences":
        return weights, denominator
    total = jnp.take_along_axis(of_document, documents, axis=1)
    return weights * jnp.where(total > 0, 1.0 / total, 0.0)[None], denominator


def weighted_loss(
    per_label: Float32[Array, "n R A"], weights: Float32[Array, "n R A"], denominator: Float32[Array, ""] | float
) -> Float32[Array, ""]:
    """sum(w * l) / denominator, and 0 where the denominator is 0. Labels of weight 0 count 0 even if l is NaN there.

    `denominator` is the global one: the sum of what `scale_labels` says of each micro-batch and shard.
    """
    return masked_sum(per_label, weights) / safe_count(denominator)


def label_probability(terms: LawPairTerms) -> Float32[Array, "*b"]:
    """q(label), 0 where the draft lacks the label; no gradient. What `d_pace_weights` calls confidence."""
    return lax.stop_gradient(terms.label_kept * jnp.exp(-terms.hard_cross_entropy))


def d_pace_weights(
    confidence: Float32[Array, "n R A"], masks: Float32[Array, "n R A"], *, alpha: float
) -> Float32[Array, "n R A"]:
    """Weight of step j = sum_{i >= j} m_i prod_{l <= i} ((1 - alpha) c_l + alpha): D-PACE, arXiv 2605.18810, SpecForge.

    That is how much of the expected accepted length hangs on step j, c being the draft's own q(label). Steps that are
    not live are left out of product and sum and get weight 0. No gradient.

    These weights multiply the numerator ONLY: in the official loss, sum_j m_j w_j CE_j over the batch is divided by the
    number of sequences ("sequences"), not by the sum of weights, and there is no other decay.
    """
    live = masks > 0
    smooth = jnp.where(live, (1.0 - alpha) * lax.stop_gradient(confidence) + alpha, 1.0)
    reached = jnp.where(live, jnp.cumprod(smooth, axis=0), 0.0)
    return jnp.where(live, lax.cumsum(reached, axis=0, reverse=True), 0.0)


def reward_weights(rewards: Float32[Array, "*b"], *, floor: float) -> Float32[Array, "*b"]:
    """floor + (1 - floor) * r, r = the reward clipped to [0, 1]: answers that were right teach the draft more.

    After ReSpec (arXiv 2510.26475), which weighs distillation by reward; the linear form with a floor is ours. The
    weight goes into numerator and denominator: the loss is a weighted mean. No gradient.
    """
    return lax.stop_gradient(floor + (1.0 - floor) * jnp.clip(rewards, 0.0, 1.0))


def advantage_weights(advantages: Float32[Array, "*b"], *, scale: float) -> Float32[Array, "*b"]:
    """exp(scale * A), A clipped to [-1, 1]: more of what the policy is being moved towards.

    The form of advantage-weighted regression (arXiv 1910.00177), clipped so that no answer counts more than
    exp(2 * scale) times another. In numerator and denominator, as `reward_weights`. No gradient.
    """
    return lax.stop_gradient(jnp.exp(scale * jnp.clip(advantages, -1.0, 1.0)))


class DraftTerms(NamedTuple):
    """What one pass says about each token."""

    cross_entropy: Array  # nats, - sum_v p(v) log q(v)
    acceptance: Array  # sum_v min(p(v), q(v)) = 1 - TV(p, q), in [0, 1]; no gradient


def soft_cross_entropy(
    teacher_log_law: Float32[Array, "*b W"], draft_log_law: Float32[Array, "*b W"]
) -> Float32[Array, "*b"]:
    """- sum_v p(v) log q(v), p = exp(teacher_log_law) without gradient: forward KL up to the teacher's entropy.

    Entries with p = 0 add 0 also where q = 0.
    """
    p = jax.lax.stop_gradient(jnp.exp(teacher_log_law))
    return -jnp.sum(jnp.where(p > 0, p * draft_log_law, 0.0), axis=-1)


def acceptance(p: Float32[Array, "*b V"], q: Float32[Array, "*b V"]) -> Float32[Array, "*b"]:
    """Probability that rejection sampling accepts a draft from q under p: sum_v min(p(v), q(v)) = 1 - TV(p, q)."""
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def pass_weighted_mean(
    values: Float[Array, "n *b"], masks: Float[Array, "n *b"], weights: tuple[float, ...], denominator: Array
) -> Float32[Array, ""]:
    """sum_k w_k sum(mask_k * value_k) / denominator; the global denominator is sum_k w_k count_k over the whole step.

    One denominator over all passes: splitting a batch into micro-batches or shards changes nothing.
    """
    sums = [w * masked_sum(v, m) for w, v, m in zip(weights, values, masks, strict=True)]
    return sum(sums[1:], sums[0]) / safe_count(denominator)


def expected_accepted_length(
    acceptances: Float[Array, "n *b"], masks: Float[Array, "n *b"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """tau_prob = 1 + sum_k prod_{j <= k} a_j summed over anchors, and the number of anchors.

    An anchor is a token whose pass 0 is live. A pass that is not live (its label lies past the end of the document or
    is not supervised) ends the product, as a stop token ends a round.
    """
    reached = jnp.cumprod(jnp.where(masks > 0, acceptances, 0.0), axis=0)
    anchors = (masks[0] > 0).astype(jnp.float32)
    return jnp.sum(anchors * (1.0 + jnp.sum(reached, axis=0))), jnp.sum(anchors)
