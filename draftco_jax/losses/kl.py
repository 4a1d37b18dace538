"""Estimates of a KL divergence from the log-probs of sampled tokens, as a term of the loss or of the reward.

Shapes are free (``*shape``, one entry per token); the arrays of a call have one dtype, float32 in a run. All are in
nats and not clamped. Source: J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from draftco_jax.numerics.masked import require_same_shape

KlEstimator = Literal["k1", "k2", "k3"]

# Below this |d| the four-term series of exp(d) - 1 - d is exact to float32 (next term: d^3 / 60 of the value, 2e-8),
# and above it the subtraction in expm1(d) - d loses fewer than 8 of 24 bits.
K3_SERIES_BELOW = 1e-2


def kl_k1(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return ``logprobs - reference_logprobs`` per token: unbiased, and negative for many tokens.

    For a reward. In a loss its gradient is that of ``logprobs``, whose mean over tokens of the policy is 0: there it
    pulls towards no reference.
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    return logprobs - reference_logprobs


def kl_k2(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return ``(logprobs - reference_logprobs)^2 / 2`` per token: biased, never negative.

    On policy the mean of its gradient is that of the KL itself.
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def kl_k3(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return ``exp(d) - 1 - d`` per token with ``d = reference_logprobs - logprobs``: the k3 estimate of a KL in nats.

    It estimates KL(pi || reference) for tokens drawn from pi, is never negative, and is exactly 0 where d is 0. The
    textbook form cancels in float32 (it cannot see values below 6e-8), hence ``expm1(d) - d``, and a series for small
    |d| where that cancels as well. Not clamped: d > 88 is infinite. float32 in and out; gradients flow to both.

    Source: GRPO (arXiv 2402.03300, eq. 4).
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    d = reference_logprobs - logprobs
    small = jnp.abs(d) < K3_SERIES_BELOW
    # Each branch sees only its own range, so that an infinite value of the other cannot reach the gradient.
    near, far = jnp.where(small, d, 0.0), jnp.where(small, 0.0, d)
    series = jnp.square(near) * (0.5 + near * (1.0 / 6.0 + near * (1.0 / 24.0)))
    return jnp.where(small, series, jnp.expm1(far) - far)


def kl_tokens(
    logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"], estimator: KlEstimator
) -> Float[Array, "*shape"]:
    """The estimate of that name, token by token."""
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](logprobs, reference_logprobs)


def penalised_advantages(
    advantages: Float[Array, "*shape"],
    logprobs: Float[Array, "*shape"],
    reference_logprobs: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    coefficient: float,
    estimator: KlEstimator,
) -> Float[Array, "*shape"]:
    """Return ``A - coefficient * k`` of each label token, 0 elsewhere, without gradient: the KL in the reward.

    ``logprobs`` are those that the tokens were sampled with. Each token pays for itself alone; normalisation over the
    batch comes after (`batch_normalised`), as in NeMo-RL.

    Source: NeMo-RL. (In REINFORCE++, arXiv 2501.03262, a token pays for all that follow it as well.)
    """
    require_same_shape(advantages=advantages, logprobs=logprobs, reference_logprobs=reference_logprobs, mask=mask)
    label = lambda x: jnp.where(mask > 0, x, 0.0)  # noqa: E731
    kl = kl_tokens(label(logprobs), label(reference_logprobs), estimator)
    return lax.stop_gradient(label(advantages) - coefficient * kl)
