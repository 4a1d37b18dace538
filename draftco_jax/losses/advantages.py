"""Advantages: relative to the group of a prompt (GRPO, RLOO, Dr.GRPO), or normalised over the batch (REINFORCE++).

Shape letters: P prompts, G samples per prompt (a group). Rewards are host-sized ([P, G]), so the leave-one-out form may
spend P * G * G numbers to look at "the others" directly; that keeps its ties exact, which sums minus own value are not.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.numerics.masked import require_same_shape


def group_relative_advantages(
    rewards: Float32[Array, "P G"],
    *,
    std_normalise: bool,
    leave_one_out: bool,
    sample_std: bool = False,
    eps: float = 1e-6,
) -> Float32[Array, "P G"]:
    """Return ``A = (r - baseline) / (std + eps)``, with the division only if ``std_normalise``; float32 in and out.

    - default: baseline and std are those of the whole group, the sample's own reward included; the std is the
      population one (ddof 0).
    - ``leave_one_out``: baseline and std (ddof 0 again) are those of the other G - 1 samples. Where all the others are
      equal their std is 0 and the raw ``r - baseline`` is kept, so the winner of rewards [1, 0, 0, 0] gets 1, not 1e6.
    - ``sample_std``: the std divides by n - 1 instead of n (ddof 1), n being the numbers it is taken over; the paper
      says only "std", and libraries that take torch's default have this one.

    A group whose rewards are all equal gets exactly 0, also where the float mean of equal numbers differs from them.
    A NaN reward makes its own group NaN and no other. ``eps`` is in reward units.

    Raises:
        ValueError: G = 1 together with ``std_normalise`` or ``leave_one_out``: one sample has neither a spread nor
            others. Without both, one sample is its own baseline and the advantage is 0. The same for ``sample_std``
            over fewer than two numbers.

    Source: DeepSeekMath (arXiv 2402.03300, section 4.1.1).
    """
    group_size = rewards.shape[1]
    if group_size < 2 and (std_normalise or leave_one_out):
        raise ValueError(
            f"group_size={group_size} with std_normalise={std_normalise}, leave_one_out={leave_one_out}: "
            "a group needs at least 2 samples to have a spread or others; raise the group size or turn both off"
        )
    counted = group_size - leave_one_out
    if std_normalise and sample_std and counted < 2:
        raise ValueError(
            f"group_size={group_size} with sample_std={sample_std}, leave_one_out={leave_one_out}: a sample deviation "
            "takes at least 2 numbers; raise the group size or turn one of them off"
        )
    baseline, std = _leave_one_out_moments(rewards) if leave_one_out else _group_moments(rewards)
    advantages = rewards - baseline
    if std_normalise:
        if sample_std:
            std = std * (counted / (counted - 1)) ** 0.5
        advantages = jnp.where(std == 0, advantages, advantages / (std + eps))
    tied = rewards.max(axis=1, keepdims=True) == rewards.min(axis=1, keepdims=True)
    return jnp.where(tied, 0.0, advantages)


def rloo_advantages(rewards: Float32[Array, "P G"]) -> Float32[Array, "P G"]:
    """Return ``r_i - mean of the others``; float32. Source: RLOO (arXiv 2402.14740)."""
    return group_relative_advantages(rewards, std_normalise=False, leave_one_out=True)


def dr_grpo_advantages(rewards: Float32[Array, "P G"]) -> Float32[Array, "P G"]:
    """Return ``r_i - mean of the group``, not divided by its spread; float32.

    It is RLOO's times (G - 1) / G. Source: Dr.GRPO (arXiv 2503.20783), whose loss sums each answer over a
    constant besides (`scale_tokens`, "fixed_length").
    """
    return group_relative_advantages(rewards, std_normalise=False, leave_one_out=False)


def batch_normalised(
    advantages: Float[Array, "*shape"],
    mask: Float[Array, "*shape"],
    *,
    packed: PackedRows = WHOLE_ROWS,
    smallest_variance: float = 1e-8,
) -> Float[Array, "*shape"]:
    """Return ``(A - mean) / sqrt(max(variance, smallest))`` over all label tokens of all devices, 0 under the mask.

    Population moments, each token once, so long answers weigh as much as they are long. If all are equal the result is
    exactly 0. No gradient.

    Source: REINFORCE++ (arXiv 2501.03262; advantages are rewards there, less the group's mean in its "baseline" form);
    moments as in NeMo-RL.
    """
    require_same_shape(advantages=advantages, mask=mask)
    values = lax.stop_gradient(jnp.where(mask > 0, advantages, 0.0))
    total, count = packed.total((jnp.sum(mask * values), jnp.sum(mask)))
    count = jnp.where(count > 0, count, 1.0)
    mean = total / count
    variance = packed.total(jnp.sum(mask * jnp.square(values - mean))) / count
    infinity = float("inf")
    ends = jnp.where(mask > 0, values, -infinity), jnp.where(mask > 0, -values, -infinity)
    highest, lowest = packed.largest(tuple(jnp.max(end, initial=-infinity) for end in ends))
    normal = (values - mean) * lax.rsqrt(jnp.maximum(variance, smallest_variance))
    return jnp.where((mask > 0) & (highest != -lowest), normal, 0.0)


def zero_variance_fraction(rewards: Float32[Array, "P G"]) -> Float32[Array, ""]:
    """Return the fraction in [0, 1] of groups whose rewards are all equal; they teach the policy nothing."""
    return jnp.mean((rewards.max(axis=1) == rewards.min(axis=1)).astype(jnp.float32))


def _group_moments(rewards_PG: Array) -> tuple[Array, Array]:
    """Mean and population std of each group, [P, 1] each."""
    return rewards_PG.mean(axis=1, keepdims=True), rewards_PG.std(axis=1, keepdims=True)


def _leave_one_out_moments(rewards_PG: Array) -> tuple[Array, Array]:
    """Mean and population std over the other samples of the group, [P, G] each; the std is exactly 0 where they tie."""
    group_size = rewards_PG.shape[1]
    others_GG = np.arange(group_size)[:, None] != np.arange(group_size)[None]
    values_PGG = jnp.broadcast_to(rewards_PG[:, None, :], (*rewards_PG.shape, group_size))
    mask_PGG = np.broadcast_to(others_GG[None], values_PGG.shape)
    mean_PG1 = values_PGG.mean(axis=2, keepdims=True, where=mask_PGG)
    variance_PG = jnp.square(values_PGG - mean_PG1).mean(axis=2, where=mask_PGG)
    highest_PG = values_PGG.max(axis=2, where=mask_PGG, initial=-jnp.inf)
    lowest_PG = values_PGG.min(axis=2, where=mask_PGG, initial=jnp.inf)
    return mean_PG1[..., 0], jnp.where(highest_PG == lowest_PG, 0.0, jnp.sqrt(variance_PG))
