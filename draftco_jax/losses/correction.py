"""Weights that correct a loss for tokens that were sampled with other log-probs than the trainer's own.

``w = exp(trainer_logprobs - generator_logprobs)``: the two differ by kernels, precision or the age of the weights. The
weights carry no gradient and multiply the objective of each token; the denominator stays that of all labels, as in
NeMo-RL, so it is known before the forward. Nats, arrays [*shape] or [R, T] of one dtype, float32 in a run. Under the
mask the weight is 0 and nothing counts as outside.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.losses.documents import document_means
from draftco_jax.numerics.masked import require_same_shape


class Correction(NamedTuple):
    """Of each token, arrays [*shape]."""

    weights: Float[Array, "..."]
    outside: Bool[Array, "..."]  # label tokens whose weight was cut, or which were left out


def truncated_weights(
    trainer_logprobs: Float[Array, "*shape"],
    generator_logprobs: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    high: float,
    low: float = 0.0,
) -> Correction:
    """``clip(w, low, high)`` of each token: truncated importance sampling; 2 is a usual bound.

    Source: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025); "tis" in
    NeMo-RL.
    """
    weights = _weights(trainer_logprobs, generator_logprobs, mask)
    outside = (mask > 0) & ((weights < low) | (weights > high))
    return Correction(jnp.where(mask > 0, jnp.clip(weights, low, high), 0.0), outside)


def icepop_weights(
    trainer_logprobs: Float[Array, "*shape"],
    generator_logprobs: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    low: float,
    high: float,
) -> Correction:
    """``w`` where low <= w <= high and 0 elsewhere: tokens on which the two disagree teach nothing.

    0.5 and 5 are usual. Source: IcePop in Ring-1T (arXiv 2510.18855); "icepop" in NeMo-RL.
    """
    weights = _weights(trainer_logprobs, generator_logprobs, mask)
    kept = (mask > 0) & (weights >= low) & (weights <= high)
    return Correction(jnp.where(kept, weights, 0.0), (mask > 0) & ~kept)


def sequence_mask_weights(
    trainer_logprobs: Float[Array, "R T"],
    generator_logprobs: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    documents: Int[Array, "R T"],
    *,
    low: float,
    high: float,
    packed: PackedRows = WHOLE_ROWS,
) -> Correction:
    """``w`` of each token of a sequence whose geometric mean of w is in [low, high]; 0 in all others.

    The geometric mean is ``exp(mean of log w over the labels)``; 0.999 and 1.002 are usual. Source: "seq-mask-tis" in
    NeMo-RL.
    """
    weights = _weights(trainer_logprobs, generator_logprobs, mask)
    differences = lax.stop_gradient(trainer_logprobs - generator_logprobs)
    geometric = jnp.exp(document_means(differences, mask, documents, packed=packed))
    kept = (mask > 0) & (geometric >= low) & (geometric <= high)
    return Correction(jnp.where(kept, weights, 0.0), (mask > 0) & ~kept)


def sequence_error_weights(
    trainer_logprobs: Float[Array, "R T"],
    generator_logprobs: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    documents: Int[Array, "R T"],
    *,
    limit: float,
    packed: PackedRows = WHOLE_ROWS,
) -> Correction:
    """1 in sequences whose mean of ``exp(|trainer - generator|)`` is at most ``limit``, 0 in all others.

    1 is no error; a limit is a little above it. The measure is NeMo-RL's ``token_mult_prob_error`` per sequence
    (``seq_logprob_error_threshold``), which takes such sequences out of the denominators too.
    """
    require_same_shape(trainer_logprobs=trainer_logprobs, generator_logprobs=generator_logprobs, mask=mask)
    differences = jnp.where(mask > 0, trainer_logprobs - generator_logprobs, 0.0)
    errors = document_means(jnp.exp(jnp.abs(lax.stop_gradient(differences))), mask, documents, packed=packed)
    kept = (mask > 0) & (errors <= limit)
    return Correction(kept.astype(mask.dtype), (mask > 0) & ~kept)


def _weights(trainer_logprobs: Array, generator_logprobs: Array, mask: Array) -> Array:
    require_same_shape(trainer_logprobs=trainer_logprobs, generator_logprobs=generator_logprobs, mask=mask)
    return lax.stop_gradient(jnp.exp(jnp.where(mask > 0, trainer_logprobs - generator_logprobs, 0.0)))
