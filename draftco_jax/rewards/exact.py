"""The exact verifier: a response is right or wrong, with nothing in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from draftco_jax.errors import UserError
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Prompt, Rollouts

ANSWER_MARK = ">"


@runtime_checkable
class Verifier(Protocol):
    """The part of a task that scoring needs."""

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """Reward of one response to one prompt."""
        ...


def exact_reward(answer: str, response_text: str, finished: bool) -> float:
    """1.0 if the response ended by itself and what follows its only ``>`` is the answer to the letter, else 0.0.

    Nothing is stripped or parsed as a number: " 932", "0932" and "932," are wrong, since any slack here is slack the
    policy will learn to live on. Two marks are wrong even if both answers are right.
    """
    parts = response_text.split(ANSWER_MARK)
    return float(finished and len(parts) == 2 and parts[1] == answer)


def score(
    task: Verifier, prompts: Sequence[Prompt], rollouts: Rollouts, tokenizer: Tokenizer, samples_per_prompt: int
) -> Float32[np.ndarray, "P G"]:
    """Rewards of a step's rollouts; sequence b answers prompt ``b // samples_per_prompt``.

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
    rewards = np.zeros(tokens.shape[0], np.float32)
    for b in range(tokens.shape[0]):
        response = tokens[b, starts[b] : ends[b]]
        # A policy's vocabulary is often padded past the tokenizer's: an id without a text answers nothing.
        if response.size and response.max() >= tokenizer.vocab_size:
            continue
        text = tokenizer.decode(response.tolist(), skip_special=False)
        rewards[b] = task.reward(prompts[b // samples_per_prompt], text, bool(finished[b]))
    return rewards.reshape(len(prompts), samples_per_prompt)
