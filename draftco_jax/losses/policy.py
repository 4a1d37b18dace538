"""The policy's loss: the clipped surrogate of PPO and GRPO with a token-level mean.

Shapes are free (``*shape``, one entry per label token, usually [R, T]): every function works token by token, then sums.
Statistics are float32.

Aggregation is "token" (DAPO, arXiv 2503.14476, section 3.3): each token weighs the same, so a long answer weighs more
than a short one, and the loss of the first on-policy step is not 0 although the advantages of a group sum to 0. The
denominator is an argument. The default of the training step is the number of label tokens of the whole step, tokens of
tied groups (advantage 0) included and tokens taken out of the mask, such as those of cut answers, left out. A caller
who wants tied groups out of the denominator takes them out of the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from draftco_jax.numerics.masked import masked_max, masked_mean, require_same_shape

# Below this |d| the four-term series of exp(d) - 1 - d is exact to float32 (next term: d^3 / 60 of the value, 2e-8),
# and above it the subtraction in expm1(d) - d loses fewer than 8 of 24 bits.
K3_SERIES_BELOW = 1e-2


class SurrogateAux(NamedTuple):
    """Statistics of one clipped surrogate, float32 scalars.

    Fractions and the mean are divided by the global token count, so shards add theirs up; shards take the maximum of
    ``ratio_max``.
    """

    clip_low_fraction: Array  # of tokens, in [0, 1]: advantage < 0 and ratio < 1 - clip_low, so no gradient
    clip_high_fraction: Array  # of tokens, in [0, 1]: advantage > 0 and ratio > 1 + clip_high, so no gradient
    ratio_mean: Array  # of pi / pi_generator; 1 on policy
    ratio_max: Array  # 0 if there are no tokens


def clipped_surrogate(
    logprobs: Float32[Array, "*shape"],
    generator_logprobs: Float32[Array, "*shape"],
    advantages: Float32[Array, "*shape"],
    mask: Float32[Array, "*shape"],
    *,
    token_count: Float32[Array, ""] | float,
    clip_low: float,
    clip_high: float,
) -> tuple[Float32[Array, ""], SurrogateAux]:
    """Return ``-sum(mask * min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)) / token_count`` with its statistics.

    ``rho = exp(logprobs - generator_logprobs)``: the ratio to the log-probs the tokens were sampled with (nats), not to
    a copy of ``logprobs``, so that a second update on the same rollouts is corrected. Only ``logprobs`` gets a
    gradient. ``token_count`` is the global count of label tokens (module docstring); 0 gives a loss of 0. Losses of
    micro-batches or shards made with the same count add up to the loss of the whole.

    Source: PPO (arXiv 1707.06347, eq. 7), with the two clip bounds set apart as in DAPO (arXiv 2503.14476, eq. 8).
    """
    require_same_shape(logprobs=logprobs, generator_logprobs=generator_logprobs, advantages=advantages, mask=mask)
    generator_logprobs, advantages = lax.stop_gradient((generator_logprobs, advantages))
    # Masked entries are cleared before exp: an overflow there would turn the gradient into 0 * inf.
    ratio = jnp.exp(jnp.where(mask > 0, logprobs - generator_logprobs, 0.0))
    clipped_ratio = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    surrogate = jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    loss = -masked_mean(surrogate, mask, count=token_count)

    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    aux = SurrogateAux(
        clip_low_fraction=masked_mean(too_low.astype(jnp.float32), mask, count=token_count),
        clip_high_fraction=masked_mean(too_high.astype(jnp.float32), mask, count=token_count),
        ratio_mean=masked_mean(ratio, mask, count=token_count),
        ratio_max=masked_max(ratio, mask, empty=0.0),
    )
    return loss, lax.stop_gradient(aux)


def kl_k3(logprobs: Float32[Array, "*shape"], reference_logprobs: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return ``exp(d) - 1 - d`` per token with ``d = reference_logprobs - logprobs``: the k3 estimate of a KL in nats.

    It estimates KL(pi || reference) for tokens drawn from pi, is never negative, and is exactly 0 where d is 0. The
    textbook form cancels in float32 (it cannot see values below 6e-8), hence ``expm1(d) - d``, and a series for small
    |d| where that cancels as well. Not clamped: d > 88 is infinite. float32 in and out; gradients flow to both.

    Source: J. Schulman, "Approximating KL divergence" (2020); GRPO (arXiv 2402.03300, eq. 4).
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    d = reference_logprobs - logprobs
    small = jnp.abs(d) < K3_SERIES_BELOW
    # Each branch sees only its own range, so that an infinite value of the other cannot reach the gradient.
    near, far = jnp.where(small, d, 0.0), jnp.where(small, 0.0, d)
    series = jnp.square(near) * (0.5 + near * (1.0 / 6.0 + near * (1.0 / 24.0)))
    return jnp.where(small, series, jnp.expm1(far) - far)
