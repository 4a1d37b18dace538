"""The policy's loss token by token: clipped ratios of tokens (PPO, GRPO, DAPO) or sequences (GSPO), or weights (CISPO).

Shapes are free (``*shape``, one entry per label token, usually [R, T]): every function works token by token. All arrays
of a call have one dtype, float32 in a run. What is made of the tokens is `losses/aggregation.py`; `clipped_surrogate`
is the whole of the usual case.

Its aggregation is "token" (DAPO, arXiv 2503.14476, section 3.3): each token weighs the same, so a long answer weighs
more than a short one, and the loss of the first on-policy step is not 0 although the advantages of a group sum to 0.
The denominator is an argument. The default of the training step is the number of label tokens of the whole step, tokens
of tied groups (advantage 0) included and tokens taken out of the mask, such as those of cut answers, left out. A caller
who wants tied groups out of the denominator takes them out of the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from draftco_jax.numerics.masked import masked_max, masked_mean, require_same_shape


class TokenTerms(NamedTuple):
    """What a policy loss says of each token, arrays [*shape]. Entries under the mask are finite and mean nothing."""

    objective: Array  # to be made large; its gradient reaches the policy's log-probs and nothing else
    ratio: Array  # of the token (clip, CISPO) or of its sequence (GSPO); no gradient
    too_low: Array  # bool: advantage < 0 and ratio < 1 - clip_low
    too_high: Array  # bool: advantage > 0 and ratio > 1 + clip_high
    too_far: Array  # bool: cut by the dual clip


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
    tokens = clip_tokens(logprobs, generator_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    loss = -masked_mean(tokens.objective, mask, count=token_count)
    aux = SurrogateAux(
        clip_low_fraction=masked_mean(tokens.too_low.astype(jnp.float32), mask, count=token_count),
        clip_high_fraction=masked_mean(tokens.too_high.astype(jnp.float32), mask, count=token_count),
        ratio_mean=masked_mean(tokens.ratio, mask, count=token_count),
        ratio_max=masked_max(tokens.ratio, mask, empty=0.0),
    )
    return loss, lax.stop_gradient(aux)


def clip_tokens(
    logprobs: Float[Array, "*shape"],
    old_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenTerms:
    """``min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = exp(logprobs - old_logprobs)`` (nats).

    ``dual_clip`` c > 1 bounds it from below where the advantage is negative, ``max(that, c A)``: a token that has
    become many times likelier than it was would otherwise weigh as much as its ratio. None leaves it out.

    Sources: PPO (arXiv 1707.06347, eq. 7); two bounds: DAPO (arXiv 2503.14476, eq. 8); dual clip: arXiv 1912.09729.
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    old_logprobs, advantages = lax.stop_gradient((old_logprobs, jnp.where(mask > 0, advantages, 0.0)))
    # Masked entries are cleared before exp: an overflow there would turn the gradient into 0 * inf.
    ratio = jnp.exp(jnp.where(mask > 0, logprobs - old_logprobs, 0.0))
    return _clipped(ratio, advantages, clip_low, clip_high, dual_clip)


def gspo_tokens(
    logprobs: Float[Array, "*shape"],
    sequence_log_ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenTerms:
    """``min(s A, clip(s) A)`` with ``s = sg[s_i] pi / sg[pi]``: the token form of the sequence's clipped ratio.

    ``s_i = exp(sequence_log_ratio)`` is the ratio of the token's whole sequence, ``(pi(o) / pi_old(o))^(1 / |o|)``:
    give the mean over its labels of ``logprobs - old_logprobs`` (`document_means`). The value of ``s`` is ``s_i``.
    With one advantage per sequence and the mean over each sequence's tokens (`scale_tokens`, "sequence") value and
    gradient are those of the sequence form, and no gradient has to go through the sequence's mean.

    Source: GSPO (arXiv 2507.18071, sections 4.1 and 4.3; clips there are 3e-4 and 4e-4, since s_i is a mean).
    """
    require_same_shape(logprobs=logprobs, sequence_log_ratio=sequence_log_ratio, advantages=advantages, mask=mask)
    sequence_log_ratio, advantages = lax.stop_gradient((sequence_log_ratio, jnp.where(mask > 0, advantages, 0.0)))
    own = jnp.where(mask > 0, logprobs, 0.0)
    ratio = jnp.exp(jnp.where(mask > 0, sequence_log_ratio, 0.0)) * jnp.exp(own - lax.stop_gradient(own))
    return _clipped(ratio, advantages, clip_low, clip_high, None)


def cispo_tokens(
    logprobs: Float[Array, "*shape"],
    old_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenTerms:
    """``sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi``: the weight is clipped, and no token loses its gradient.

    ``clip_low`` = 1 leaves the lower bound out, as the paper does; its upper bound is tuned and larger than PPO's.
    ``too_low`` and ``too_high`` mark tokens whose weight was cut, whatever the sign of the advantage.

    Source: CISPO in MiniMax-M1 (arXiv 2506.13585, section 3.1).
    """
    require_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    own = jnp.where(mask > 0, logprobs, 0.0)
    difference = jnp.where(mask > 0, logprobs - old_logprobs, 0.0)
    ratio, advantages = lax.stop_gradient((jnp.exp(difference), advantages))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    objective = jnp.clip(ratio, low, high) * jnp.where(mask > 0, advantages, 0.0) * own
    return TokenTerms(objective, ratio, ratio < low, ratio > high, jnp.zeros_like(ratio, bool))


def _clipped(ratio: Array, advantages: Array, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenTerms:
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_far = jnp.zeros_like(too_low)
    if dual_clip is not None:
        objective = jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)
        too_far = (ratio > dual_clip) & (advantages < 0)
    return TokenTerms(objective, lax.stop_gradient(ratio), too_low, too_high, too_far)
