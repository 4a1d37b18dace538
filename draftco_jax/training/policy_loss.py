"""The policy's loss of an update from the log-probs of its labels: what `GrpoConfig` names, and what is logged.

What is known before the forward (weights, advantages under a KL in the reward or normalised over the batch) is part of
`labels_of`, which sees all rows of the devices. `policy_loss` sees one micro-batch. Arrays [R, T], float32, nats.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from draftco_jax.context_parallel import PackedRows
from draftco_jax.losses.advantages import batch_normalised
from draftco_jax.losses.aggregation import scale_tokens
from draftco_jax.losses.correction import (
    Correction,
    icepop_weights,
    sequence_error_weights,
    sequence_mask_weights,
    truncated_weights,
)
from draftco_jax.losses.documents import document_means
from draftco_jax.losses.kl import kl_k3, kl_tokens, penalised_advantages
from draftco_jax.losses.policy import TokenTerms, cispo_tokens, clip_tokens, gspo_tokens
from draftco_jax.numerics.masked import masked_max, masked_mean
from draftco_jax.training.algorithm import GRPO, GrpoConfig
from draftco_jax.types import PackedBatch


class Labels(NamedTuple):
    """What is known of the token after each index, arrays [R, T]."""

    tokens: jax.Array  # i32
    generator_logprobs: jax.Array  # f32
    advantages: jax.Array  # f32
    mask: jax.Array  # f32, 1 where it is trained on
    weights: jax.Array  # f32, of each token in the loss, 0 under the mask
    documents: jax.Array  # i32, segment id, 0 on padding
    reference_logprobs: jax.Array | None  # f32 by the policy of the penalty; None without one


class PolicySums(NamedTuple):
    """Of one micro-batch on one device, over the global count: these add up. float32 scalars."""

    surrogate: jax.Array
    entropy: jax.Array
    clip_low_fraction: jax.Array
    clip_high_fraction: jax.Array
    kl_k3: jax.Array  # of generator and trainer
    kl_reference: jax.Array  # 0 without a reference policy
    extra: dict[str, jax.Array]  # by metric name: what the usual loss does not have


class PolicyMaxima(NamedTuple):
    """Of one micro-batch on one device: the largest counts. float32 scalars."""

    ratio: jax.Array
    logprob_diff: jax.Array


def label_mask_ahead(batch: PackedBatch, packed: PackedRows) -> Float32[Array, "R T"]:
    """1 at indices whose next token is trained on and of the same document: the first token of one has no law."""
    return packed.ahead(batch.label_mask, 1) * packed.same_document(batch.segment_ids, 1).astype(jnp.float32)


def weights_of(
    mask: Array, batch: PackedBatch, packed: PackedRows, algorithm: GrpoConfig
) -> tuple[Float32[Array, "R T"], Float32[Array, ""]]:
    """`scale_tokens` as the config says; a label is of the document of the index before it."""
    return scale_tokens(
        mask,
        batch.segment_ids,
        aggregation=algorithm.aggregation,
        fixed_length=algorithm.fixed_length,
        packed=packed,
    )


def labels_of(
    batch: PackedBatch,
    packed: PackedRows,
    reference_logprobs: Array | None,
    algorithm: GrpoConfig = GRPO,
) -> Labels:
    """Brings what is known of each token one index back, over the borders of devices."""
    of_tokens = (batch.tokens, batch.label_logprobs, batch.label_advantages)
    tokens, logprobs, advantages = (packed.ahead(x, 1) for x in of_tokens)
    mask = label_mask_ahead(batch, packed)
    if reference_logprobs is not None and algorithm.kl_in == "reward":
        advantages = penalised_advantages(
            advantages,
            logprobs,
            reference_logprobs,
            mask,
            coefficient=algorithm.kl_coefficient,
            estimator=algorithm.kl_estimator,
        )
    if algorithm.batch_normalise:
        advantages = batch_normalised(advantages, mask, packed=packed)
    weights, _ = weights_of(mask, batch, packed, algorithm)
    return Labels(tokens, logprobs, advantages, mask, weights, batch.segment_ids, reference_logprobs)


def policy_loss(
    logprobs: Float32[Array, "R T"],
    entropies: Float32[Array, "R T"],
    labels: Labels,
    token_count: Float32[Array, ""],
    denominator: Float32[Array, ""],
    algorithm: GrpoConfig,
    packed: PackedRows,
) -> tuple[Float32[Array, ""], PolicySums, PolicyMaxima]:
    """``-mean(c objective) + kl_coefficient mean(kept kl) - entropy_coefficient mean(kept entropy)`` of these rows.

    Means of the loss are by `labels.weights` over `denominator`, statistics by tokens over `token_count`; both are the
    global ones. c is the weight of the correction; tokens of weight 0 are not `kept`: nothing is learnt from them.
    """
    mask, trained = labels.mask, jax.lax.stop_gradient(logprobs)
    mean = partial(masked_mean, mask=mask, count=token_count)
    loss_mean = partial(masked_mean, mask=labels.weights, count=denominator)
    terms = _terms(logprobs, trained, labels, algorithm, packed)
    objective, extra, kept = terms.objective, _extra(terms, algorithm, mean), lambda x: x
    corrections = _corrections(trained, labels, algorithm, packed)
    for name, found in corrections.items():
        objective = found.weights * objective
        extra |= {f"correction/{name}_fraction": mean(found.outside.astype(jnp.float32))}
        if name != "filtered":
            extra["correction/weight_mean"] = mean(found.weights)
    if corrections:
        any_weight = [found.weights > 0 for found in corrections.values()]
        kept = lambda x: jnp.where(jnp.all(jnp.stack(any_weight), axis=0), x, 0.0)  # noqa: E731
    surrogate = -loss_mean(objective)
    penalty = distance = jnp.zeros_like(surrogate)
    if labels.reference_logprobs is not None:
        # Cleared before exp, as ratios are: the reference may differ by any number of nats on a prompt.
        label = lambda x: jnp.where(mask > 0, x, 0.0)  # noqa: E731
        own = logprobs if algorithm.kl_in == "loss" else labels.generator_logprobs
        kl = kl_tokens(label(own), label(labels.reference_logprobs), algorithm.kl_estimator)
        penalty, distance = loss_mean(kept(kl)), mean(kl)
    loss = surrogate + algorithm.kl_coefficient * penalty if algorithm.kl_in == "loss" else surrogate
    if algorithm.entropy_coefficient > 0:
        loss = loss - algorithm.entropy_coefficient * loss_mean(kept(entropies))
    sums = PolicySums(
        surrogate=surrogate,
        entropy=mean(entropies),
        clip_low_fraction=mean(terms.too_low.astype(jnp.float32)),
        clip_high_fraction=mean(terms.too_high.astype(jnp.float32)),
        kl_k3=mean(kl_k3(labels.generator_logprobs, trained)),
        kl_reference=distance,
        extra=extra,
    )
    maxima = PolicyMaxima(
        ratio=masked_max(terms.ratio, mask, empty=0.0),
        logprob_diff=masked_max(jnp.abs(trained - labels.generator_logprobs), mask, empty=0.0),
    )
    return loss, *jax.lax.stop_gradient((sums, maxima))


def _terms(logprobs: Array, trained: Array, labels: Labels, algorithm: GrpoConfig, packed: PackedRows) -> TokenTerms:
    """The loss of that name. Under a correction the old policy is the trainer's own: a batch gets one update."""
    clips = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    generator, advantages, mask = labels.generator_logprobs, labels.advantages, labels.mask
    if algorithm.policy_loss == "gspo":
        mean = document_means(trained - generator, mask, labels.documents, packed=packed)
        return gspo_tokens(logprobs, mean, advantages, mask, **clips)
    old = generator if algorithm.correction == "none" else trained
    if algorithm.policy_loss == "cispo":
        return cispo_tokens(logprobs, old, advantages, mask, **clips)
    return clip_tokens(logprobs, old, advantages, mask, **clips, dual_clip=algorithm.dual_clip)


def _corrections(trained: Array, labels: Labels, algorithm: GrpoConfig, packed: PackedRows) -> dict[str, Correction]:
    """What was done to the weights of the tokens, by what its share is called."""
    found: dict[str, Correction] = {}
    pair, rows = (trained, labels.generator_logprobs, labels.mask), {"packed": packed}
    low, high = algorithm.correction_low or 0.0, algorithm.correction_high
    if algorithm.correction != "none":
        assert high is not None, "the config refuses a correction without it"
        if algorithm.correction == "tis":
            found["truncated"] = truncated_weights(*pair, low=low, high=high)
        elif algorithm.correction == "icepop":
            found["masked"] = icepop_weights(*pair, low=low, high=high)
        else:
            found["masked"] = sequence_mask_weights(*pair, labels.documents, low=low, high=high, **rows)
    if (limit := algorithm.sequence_error_limit) is not None:
        found["filtered"] = sequence_error_weights(*pair, labels.documents, limit=limit, **rows)
    return found


def _extra(terms: TokenTerms, algorithm: GrpoConfig, mean: partial[Array]) -> dict[str, Array]:
    extra: dict[str, Array] = {}
    if algorithm.policy_loss != "clip":
        extra["policy/ratio_mean"] = mean(terms.ratio)
    if algorithm.dual_clip is not None:
        extra["policy/dual_clip_fraction"] = mean(terms.too_far.astype(jnp.float32))
    return extra


def policy_metrics(sums: PolicySums, maxima: PolicyMaxima, *, with_reference: bool) -> dict[str, Array]:
    """Names of a run; both must be those of all micro-batches and devices."""
    metrics = {
        "policy/loss": sums.surrogate,
        "policy/entropy": sums.entropy,
        "policy/clip_low_fraction": sums.clip_low_fraction,
        "policy/clip_high_fraction": sums.clip_high_fraction,
        "policy/ratio_max": maxima.ratio,
        "agreement/kl_k3": sums.kl_k3,
        "agreement/logprob_diff_max": maxima.logprob_diff,
    }
    return metrics | sums.extra | ({"policy/kl_reference": sums.kl_reference} if with_reference else {})
