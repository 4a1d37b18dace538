"""Scores of a step's rollouts, by whatever verifier the task has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from draftco_jax.errors import UserError
from draftco_jax.rewards.scores import Score
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Prompt, Rollouts


@runtime_checkable
class Verifier(Protocol):
    """The part of a task that scoring needs."""

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """Reward of one response to one prompt."""
        ...


@runtime_checkable
class BatchVerifier(Protocol):
    """A task that scores many responses at once, with their parts."""

    def score_responses(
        self, prompts: Sequence[Prompt], response_texts: Sequence[str], finished: Sequence[bool]
    ) -> list[Score]:
        """One score a response; the three arguments are of one length."""
        ...


@dataclass(frozen=True)
class RolloutScores:
    """Scores of P prompts with G responses each."""

    rewards: Float32[np.ndarray, "P G"]
    scores: tuple[Score, ...]
    """P x G of them, prompt by prompt."""

    def metrics(self) -> dict[str, float]:
        """Mean of each component over all responses, and the fraction of responses with a fault.

        A response without a component (a fault, one that was cut) counts 0 in its mean, so that all means are over the
        same responses and can be compared. Empty where the task gives rewards alone.
        """
        names = sorted({name for score in self.scores for name in score.components})
        sums = {name: sum(score.components.get(name, 0.0) for score in self.scores) for name in names}
        metrics = {f"reward/component_{name}": total / len(self.scores) for name, total in sums.items()}
        faults = sum(score.fault is not None for score in self.scores)
        return metrics | {"reward/faults_fraction": faults / len(self.scores)} if names or faults else {}


def score_all(
    task: Verifier, prompts: Sequence[Prompt], rollouts: Rollouts, tokenizer: Tokenizer, samples_per_prompt: int
) -> RolloutScores:
    """Scores of a step's rollouts; sequence b answers prompt ``b // samples_per_prompt``.

    A response is cut out by the recorded lengths alone. Token values say nothing about where it ends: the cells after
    it may hold anything, and pad or end-of-sequence ids inside it are part of what the policy wrote.
    """
    tokens = np.asarray(rollouts.tokens)
    if tokens.shape[0] != len(prompts) * samples_per_prompt:
        raise UserError(
            f"rollouts={tokens.shape[0]} must be prompts x samples_per_prompt = {len(prompts)} x {samples_per_prompt}; "
            "score the rollouts with the prompts that made them"
        )
    finished = np.asarray(rollouts.finished)
    starts = np.asarray(rollouts.prompt_lengths)
    # The last token of a finished response is the stop token, whichever of the stop ids it was.
    ends = np.asarray(rollouts.lengths) - finished
    responses = [tokens[b, starts[b] : ends[b]] for b in range(tokens.shape[0])]
    # A policy's vocabulary is often padded past the tokenizer's: an id without a text answers nothing.
    readable = [b for b, ids in enumerate(responses) if not ids.size or ids.max() < tokenizer.vocab_size]
    texts = [tokenizer.decode(responses[b].tolist(), skip_special=False) for b in readable]
    asked = [prompts[b // samples_per_prompt] for b in readable]
    ended = [bool(finished[b]) for b in readable]
    if isinstance(task, BatchVerifier):
        wrong, found = Score(0.0, {"correct": 0.0}), task.score_responses(asked, texts, ended)
    else:
        wrong, found = Score(0.0), [Score(task.reward(*one)) for one in zip(asked, texts, ended, strict=True)]
    scores = [wrong] * tokens.shape[0]
    for b, one in zip(readable, found, strict=True):
        scores[b] = one
    rewards = np.array([one.total for one in scores], np.float32)
    return RolloutScores(rewards.reshape(len(prompts), samples_per_prompt), tuple(scores))


def score(
    task: Verifier, prompts: Sequence[Prompt], rollouts: Rollouts, tokenizer: Tokenizer, samples_per_prompt: int
) -> Float32[np.ndarray, "P G"]:
    """The rewards of `score_all`."""
    return score_all(task, prompts, rollouts, tokenizer, samples_per_prompt).rewards
