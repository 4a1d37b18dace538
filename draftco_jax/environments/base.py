"""What the loop needs of a task."""

from __future__ import annotations

import hashlib
from typing import Literal, Protocol, runtime_checkable

from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Prompt

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One problem in this many is held out."""


@runtime_checkable
class Task(Protocol):
    """A numbered source of problems with a verifier of responses."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the task's texts are written for."""
        ...

    @property
    def num_problems(self) -> int | None:
        """Length of a finite source; None if every index from 0 up has a problem."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """No prompt is longer, begin-of-sequence included."""
        ...

    @property
    def max_response_tokens(self) -> int:
        """Room for a full answer, end-of-sequence included."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a response, whichever is written first."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run says of its problems when it starts, a line each."""
        ...

    def problem(self, index: int) -> Prompt:
        """The problem at an index, equal in every process and after every resume."""
        ...

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """Reward of one response; ``finished`` is False when it was cut at the length limit."""
        ...


def split_of(problem: str) -> Split:
    """The split a problem belongs to, decided by its text alone.

    The seed of a run has no say in it: a policy that was fine-tuned under one seed and is evaluated under another has
    still seen none of the held-out problems.
    """
    return "held_out" if stable_hash(problem) % HELD_OUT_SHARE == 0 else "train"


def stable_hash(text: str) -> int:
    """64-bit hash, equal on every machine and in every process (Python's own is salted)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
