"""The config of `draftco pretrain-draft`: a draft, the policy it is for, and how it is trained before any run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftco_jax.config import CheckpointConfig, EvaluationConfig, RunConfig
from draftco_jax.config_io import apply_overrides, load_python_config
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import family_of
from draftco_jax.environments.catalog import TaskConfig
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.models.compute import ComputeConfig, DtypeConfig
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class OwnRolloutsConfig:
    """What the draft is trained on: the policy's own answers to prompts of the task's train split, decoded plainly."""

    sequences: int = 4096
    """Answers in all. They are generated once, and every epoch goes through them in another order."""
    samples_per_prompt: int = 1
    sequences_per_call: int = 256
    """Answers of one generate call: what fits the device."""
    max_new_tokens: int | None = None
    """Response limit in tokens; none: what the task's full answers need."""
    sampling: SamplingConfig = SamplingConfig()
    """That of the rollouts the draft will be used in."""

    def __post_init__(self) -> None:
        """Refuse counts that do not divide."""
        for name in ("sequences", "samples_per_prompt", "sequences_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; 4096 sequences suit the demo")
        if self.sequences % self.sequences_per_call or self.sequences_per_call % self.samples_per_prompt:
            raise ValueError(
                f"sequences_per_call={self.sequences_per_call} must divide sequences={self.sequences} and be a "
                f"multiple of samples_per_prompt={self.samples_per_prompt}; choose powers of two"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be >= 1; use none for the task's own limit")


@dataclass(frozen=True, kw_only=True)
class AdaptationConfig:
    """A second phase on another loss, with a fresh optimizer: from likelihood to acceptance (Bebop, arXiv 2606.12370).

    Bebop pre-trains on cross-entropy, then trains on what decides acceptance, the total variation of both laws.
    """

    steps: int
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, schedule="cosine", warmup_steps=10)
    loss: DraftLossConfig = DraftLossConfig(end_to_end_tv=1.0)

    def __post_init__(self) -> None:
        """Refuse an empty phase."""
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be >= 1; use adaptation=none for no second phase")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Everything the pre-training of a draft depends on. Two runs of one config on one machine give the same draft."""

    steps: int
    """Optimizer steps on the draft's own loss; those of `adaptation` come after them."""
    task: TaskConfig
    policy: DecoderConfig
    policy_checkpoint: str | None
    """Folder in Hugging Face layout, `shipped:NAME`, or none for random weights."""
    policy_compute: ComputeConfig = ComputeConfig()
    """Dtypes of the policy, and how its layers are gone through."""
    draft: DraftConfig
    """Config of any family with weights. With `draft_vocab_size` below the policy's, the tokens that the rollouts hold
    most often are kept."""
    draft_checkpoint: str | None = None
    """Folder to continue from in the family's official layout, `shipped:NAME`, or none for fresh weights."""
    draft_compute: DtypeConfig = DtypeConfig()
    """Dtypes of the draft; they need not be the policy's."""
    draft_length: int = 4
    """k of the held-out evaluation, and the reach of tau_prob."""
    rollout: OwnRolloutsConfig = OwnRolloutsConfig()
    batch_rows: int = 64
    """Packed rows of a step; a row is as long as the longest prompt and answer together."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=10)
    adaptation: AdaptationConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every_steps=100)
    chunk_tokens: int = 4096
    """Tokens whose logits exist at one time."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Run the checks that need more than one component."""
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in 0..{2**32 - 1}; choose another number")
        for name in ("steps", "draft_length", "batch_rows", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; see the shipped configs for usual values")
        sampling = self.rollout.sampling
        if sampling.greedy or sampling.top_k == 1:
            raise ValueError(
                f"rollout.sampling.temperature={sampling.temperature} must be > 0 and top_k={sampling.top_k} must not "
                "be 1: a one-hot policy is no law to learn; use temperature 1.0 and top_k 0"
            )
        family, longest = family_of(self.draft), self.draft.max_draft_length
        if not family.trained:
            raise ValueError(
                f"draft={family.name} must be a family with weights, there is nothing to train; see `draft`"
            )
        self.draft.check_target(self.policy)
        if longest is not None and self.draft_length > longest:
            raise ValueError(
                f"draft_length={self.draft_length} must be <= {longest}, the most this {family.name} draft proposes in "
                "a round; lower it, or use a draft of a larger block"
            )

    @property
    def total_steps(self) -> int:
        """Optimizer steps of both phases."""
        return self.steps + (self.adaptation.steps if self.adaptation else 0)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The stretches of the training, one after another."""
        first = Phase(1, 1, self.steps, self.draft, self.optimizer)
        if self.adaptation is None:
            return (first,)
        adapted: DraftConfig = replace(self.draft, **{"loss": self.adaptation.loss})
        return first, Phase(2, self.steps + 1, self.total_steps, adapted, self.adaptation.optimizer)


@dataclass(frozen=True)
class Phase:
    """One stretch of the training with its own loss and optimizer."""

    number: int
    first_step: int
    """Counted from 1 over all phases."""
    last_step: int
    draft: DraftConfig
    """The draft with the loss of this phase."""
    optimizer: OptimizerConfig

    @property
    def steps(self) -> int:
        """Optimizer steps of this phase."""
        return self.last_step - self.first_step + 1


AnyConfig = RunConfig | PretrainConfig
"""Configs that name a policy, a draft and a task in the same fields."""


def load_pretrain_config(path: str | Path, overrides: Sequence[str] = ()) -> PretrainConfig:
    """Read a config file, apply `a.b=value` overrides, check the whole."""
    return apply_overrides(load_python_config(Path(path), PretrainConfig), overrides)
