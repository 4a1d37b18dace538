"""Config of the policy's loss: from GRPO over DAPO to GSPO and CISPO (docs/losses.md has the recipes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Array, Float32, Int

from draftco_jax.losses.advantages import group_relative_advantages
from draftco_jax.losses.aggregation import Aggregation
from draftco_jax.losses.kl import KlEstimator
from draftco_jax.losses.shaping import overlong_penalty, scale_rewards

PolicyLoss = Literal["clip", "gspo", "cispo"]
KlPlace = Literal["loss", "reward"]
CorrectionName = Literal["none", "tis", "icepop", "sequence_mask"]

_NAMES = {
    "policy_loss": PolicyLoss,
    "aggregation": Aggregation,
    "kl_estimator": KlEstimator,
    "kl_in": KlPlace,
    "correction": CorrectionName,
}


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Group-relative policy optimisation and its relatives. The defaults are GRPO with DAPO's clips and token mean."""

    std_normalise: bool = True
    """Divide advantages by the group's standard deviation."""
    leave_one_out: bool = False
    """Baseline and deviation from the other samples of the group."""
    clip_low: float = 0.2
    """Probability ratios below 1 - clip_low get no gradient where the advantage is negative."""
    clip_high: float = 0.28
    """Probability ratios above 1 + clip_high get no gradient where the advantage is positive."""
    kl_coefficient: float = 0.0
    """Weight of the penalty towards the initial policy; 0 skips its forward."""
    router_balance_coefficient: float = 0.0
    """Weight of the load-balancing loss of a policy with experts, mean over its layers; 0 leaves it out."""
    sample_std: bool = False
    """The standard deviation divides by one less than it is taken over."""
    group_baseline: bool = True
    """Take the group's mean off; false: advantages are rewards."""
    batch_normalise: bool = False
    """Normalise advantages over all label tokens of the step (REINFORCE++)."""
    policy_loss: PolicyLoss = "clip"
    """clip: ratios of tokens (PPO). gspo: ratios of sequences. cispo: clipped weights."""
    dual_clip: float | None = None
    """Bound of ratio times advantage where the advantage is negative, > 1; 10 in DAPO's recipes. none: no bound."""
    aggregation: Aggregation = "token"
    """Mean over tokens, mean over sequences of each one's mean, or each sequence's sum over `fixed_length`."""
    fixed_length: int | None = None
    """Tokens; the longest response in Dr.GRPO."""
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    """A term of the loss, or taken off each token's advantage."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; the entropy is logged in any case."""
    correction: CorrectionName = "none"
    """What is done about a trainer that disagrees with the generator on the policy's log-probs. none: ratios are taken
    to the generator's. Otherwise ratios are taken to the trainer's own, 1 in the one update that a batch gets, and each
    token is weighed by trainer over generator: cut at `correction_high` (tis), 0 outside of `correction_low` and
    `correction_high` (icepop), 0 in sequences whose geometric mean is outside of these (sequence_mask)."""
    correction_low: float | None = None
    """none: 0 with tis."""
    correction_high: float | None = None
    sequence_error_limit: float | None = None
    """Sequences whose mean of exp(|trainer - generator|) is above it are not trained on; > 1."""
    reward_range: tuple[float, float] | None = None
    """Rewards 0 to 1 are mapped to this range, before their length is looked at."""
    overlong_buffer: int = 0
    """Tokens before the response limit in which the reward falls, by `overlong_penalty` at the limit (DAPO)."""
    overlong_penalty: float = 1.0
    overlong_filter: bool = False
    """Answers that were cut at the limit are not trained on (DAPO)."""

    def __post_init__(self) -> None:
        """Refuse clips, weights and combinations that mean nothing."""
        _check_names_and_clips(self)
        _check_coefficients(self)
        _check_advantages(self)
        _check_losses(self)
        _check_correction(self)

    @property
    def by_sequence(self) -> bool:
        """Whether the loss looks at what the policy says of whole sequences."""
        return self.policy_loss == "gspo" or self.correction == "sequence_mask" or self.sequence_error_limit is not None


def advantages_of(
    algorithm: GrpoConfig,
    rewards: Float32[Array, "P G"],
    response_tokens: Int[Array, "P G"],
    *,
    max_response_tokens: int,
) -> tuple[Float32[Array, "P G"], Float32[Array, "P G"]]:
    """Advantages of a step, and the rewards they were made of: scaled, then shaped by length.

    What is normalised over the tokens of the batch is so later, when it is known which they are.
    """
    if algorithm.reward_range is not None:
        rewards = scale_rewards(rewards, target=algorithm.reward_range)
    if algorithm.overlong_buffer > 0:
        rewards = rewards + overlong_penalty(
            response_tokens,
            max_length=max_response_tokens,
            buffer=algorithm.overlong_buffer,
            penalty=algorithm.overlong_penalty,
        )
    if not algorithm.group_baseline:
        return rewards, rewards
    advantages = group_relative_advantages(
        rewards,
        std_normalise=algorithm.std_normalise,
        leave_one_out=algorithm.leave_one_out,
        sample_std=algorithm.sample_std,
    )
    return advantages, rewards


def _check_names_and_clips(cfg: GrpoConfig) -> None:
    for name, known in _NAMES.items():
        if getattr(cfg, name) not in get_args(known):
            raise ValueError(f"{name}={getattr(cfg, name)} must be one of {', '.join(get_args(known))}")
    if not 0.0 < cfg.clip_low <= 1.0:
        raise ValueError(f"clip_low={cfg.clip_low} must be in (0, 1]; 0.2 is usual")
    if not cfg.clip_high > 0.0:
        raise ValueError(f"clip_high={cfg.clip_high} must be > 0; 0.2 is usual, 0.28 in DAPO")


def _check_coefficients(cfg: GrpoConfig) -> None:
    if not cfg.kl_coefficient >= 0.0:
        raise ValueError(f"kl_coefficient={cfg.kl_coefficient} must be >= 0; 0 switches the penalty off")
    if cfg.kl_in == "reward" and cfg.kl_coefficient == 0.0:
        raise ValueError("kl_coefficient=0.0 must be > 0 with kl_in=reward, which takes nothing off; change one")
    if not cfg.router_balance_coefficient >= 0.0:
        raise ValueError(
            f"router_balance_coefficient={cfg.router_balance_coefficient} must be >= 0; 0 leaves the loss out, "
            "0.001 is usual"
        )
    for name in ("entropy_coefficient", "overlong_buffer", "overlong_penalty"):
        if not getattr(cfg, name) >= 0:
            raise ValueError(f"{name}={getattr(cfg, name)} must be >= 0; leave it out for the default")
    if cfg.reward_range is not None and not cfg.reward_range[0] < cfg.reward_range[1]:
        raise ValueError(f"reward_range={cfg.reward_range} must be a low and a high end; use -1,1, or none")


def _check_advantages(cfg: GrpoConfig) -> None:
    if not cfg.group_baseline and (cfg.std_normalise or cfg.leave_one_out):
        raise ValueError(
            f"group_baseline=False must come with std_normalise=False and leave_one_out=False, but "
            f"std_normalise={cfg.std_normalise}, leave_one_out={cfg.leave_one_out}; change one of them"
        )
    if cfg.leave_one_out and cfg.std_normalise and cfg.overlong_buffer > 0:
        raise ValueError(
            f"overlong_buffer={cfg.overlong_buffer} must be 0 with leave_one_out=True and std_normalise=True: rewards "
            "that differ by a few tokens of length alone are divided by next to nothing; change one of them"
        )
    if cfg.sample_std and not cfg.std_normalise:
        raise ValueError("sample_std=True must be False with std_normalise=False, which divides by nothing; change one")


def _check_losses(cfg: GrpoConfig) -> None:
    if cfg.dual_clip is not None and cfg.correction != "none":
        raise ValueError(
            f"dual_clip={cfg.dual_clip} must be none with correction={cfg.correction}, under which ratios are 1 and "
            "nothing is clipped; change one of them"
        )
    if cfg.dual_clip is not None and (cfg.policy_loss != "clip" or cfg.dual_clip <= 1.0):
        raise ValueError(
            f"dual_clip={cfg.dual_clip} must be > 1 with policy_loss=clip and none otherwise, but "
            f"policy_loss={cfg.policy_loss}; 10 is usual, or use none"
        )
    if (cfg.fixed_length is None) is (cfg.aggregation == "fixed_length"):
        raise ValueError(
            f"fixed_length={cfg.fixed_length} must be a number with aggregation=fixed_length and none otherwise, but "
            f"aggregation={cfg.aggregation}; change one of them"
        )
    if cfg.fixed_length is not None and cfg.fixed_length < 1:
        raise ValueError(f"fixed_length={cfg.fixed_length} must be >= 1; give the longest response in tokens")
    if cfg.policy_loss == "gspo" and cfg.aggregation != "sequence":
        raise ValueError(
            f"aggregation={cfg.aggregation} must be sequence with policy_loss=gspo, whose gradient it would change"
        )
    if cfg.policy_loss == "gspo" and cfg.kl_in == "reward":
        raise ValueError("kl_in=reward must be loss with policy_loss=gspo: a sequence has one advantage; change one")
    if cfg.kl_estimator == "k1" and cfg.kl_in == "loss":
        raise ValueError(
            "kl_estimator=k1 must be k2 or k3 with kl_in=loss, where k1's gradient is 0 on average; use k2, or "
            "kl_in=reward"
        )


def _check_correction(cfg: GrpoConfig) -> None:
    low, high, name = cfg.correction_low, cfg.correction_high, cfg.correction
    if cfg.sequence_error_limit is not None and cfg.sequence_error_limit <= 1.0:
        raise ValueError(f"sequence_error_limit={cfg.sequence_error_limit} must be > 1, which is no error; use none")
    if name == "none":
        if low is not None or high is not None:
            raise ValueError(
                f"correction_low={low} and correction_high={high} must be none with correction=none; name a correction"
            )
        return
    if cfg.policy_loss == "gspo":
        raise ValueError(
            f"correction={name} must be none with policy_loss=gspo, whose ratio is to the generator already; use "
            "sequence_error_limit"
        )
    if high is None or high <= 0 or (low is None and name != "tis") or not 0.0 <= (low or 0.0) < high:
        raise ValueError(
            f"correction_low={low} and correction_high={high} must be 0 <= low < high with correction={name}; usual "
            "are 2 for tis, 0.5 and 5 for icepop, 0.999 and 1.002 for sequence_mask"
        )


GRPO = GrpoConfig()
"""The defaults."""
