"""What `draftco bench text` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftco_jax.bench_decode.cells import SAMPLINGS

FAMILIES = ("eagle3", "dflash")


@dataclass(frozen=True, kw_only=True)
class BenchTextConfig:
    """A policy, its prompts, and how long drafts may learn. The defaults suit 135M parameters on 2 cores and 10 GB."""

    policy: str = ""
    """Hugging Face folder with tokenizer and chat template."""
    prompts: str = ""
    """JSON lines with question and answer (`WordProblemsConfig`), to learn from."""
    held_out: str | None = None
    """The same, to measure on; none: one in eight of `prompts`."""
    minutes: float = 30.0
    """For what is learnt: the policy's own texts and the training of all drafts. Compiling, evaluating and measuring
    come on top."""
    rollout_share: float = 0.25
    """Part of the minutes in which the policy writes; the drafts share the rest evenly."""
    drafts: tuple[str, ...] = FAMILIES
    max_prompt_tokens: int = 160
    """Longer prompts are left out."""
    max_new_tokens: int = 128
    """Of the texts that drafts learn from."""
    rollout_batch: int = 32
    """Responses written at a time."""
    batch_rows: int = 2
    """Packed rows of a training step, as long as prompt and response together."""
    learning_rate: float = 1e-3
    draft_vocab_size: int = 4096
    """Of the EAGLE-3 draft: ids that the policy's texts hold most often, at most all."""
    passes: int = 3
    """Of the EAGLE-3 draft in training."""
    dflash_layers: int = 2
    dflash_block: int = 8
    evaluation_prompts: int = 16
    """Held-out prompts for the accepted length before and after training."""
    batches: tuple[int, ...] = (1, 8)
    """Requests of a timed call."""
    samplings: tuple[str, ...] = tuple(SAMPLINGS)
    """greedy and temperature_1, or one of them."""
    timed_tokens: int = 64
    """Tokens of a timed response at most."""
    calls: int = 2
    """Calls of a turn at batch 1."""
    draft_lengths: tuple[int, ...] = (2, 4)
    """k that are tried beside plain decoding."""
    repetitions: int = 3
    """Timed turns; medians are quoted."""
    choosing_turns: int = 3
    """Turns before them, in which k is chosen."""
    peer: bool = True
    """Measure transformers too, where it is installed."""
    step_matmul: Literal["xla", "skinny"] = "xla"
    """skinny: decode with the optional kernel (`pallas_kernels.skinny_matmul`), plainly too."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that learn or measure nothing."""
        if not self.drafts or set(self.drafts) - set(FAMILIES):
            raise ValueError(f"drafts={self.drafts} must name some of {', '.join(FAMILIES)}; leave it out for all")
        if not self.samplings or set(self.samplings) - set(SAMPLINGS):
            raise ValueError(
                f"samplings={self.samplings} must name some of {', '.join(SAMPLINGS)}; leave it out for all"
            )
        if not 0.0 < self.rollout_share < 1.0:
            raise ValueError(f"rollout_share={self.rollout_share} must be in (0, 1); 0.25 suits most")
        if not 0.0 < self.minutes < 1e4:
            raise ValueError(f"minutes={self.minutes} must be above 0 and below 10000; 30 is usual")
        for name in ("batches", "draft_lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={values} must be numbers >= 1; leave it out")
        for name in ("timed_tokens", "calls", "repetitions", "choosing_turns", "rollout_batch", "evaluation_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; leave it out")
        if "dflash" in self.drafts and max(self.draft_lengths) >= self.dflash_block:
            raise ValueError(
                f"draft_lengths={self.draft_lengths} must be below dflash_block={self.dflash_block}, whose first row "
                "is the token before; lower them or raise the other"
            )

    @property
    def seconds_of_rollouts(self) -> float:
        """In which the policy writes."""
        return 60.0 * self.minutes * self.rollout_share

    @property
    def seconds_of_a_draft(self) -> float:
        """In which each draft trains."""
        return 60.0 * self.minutes * (1.0 - self.rollout_share) / len(self.drafts)
