"""What a scorer says of a response, and what every scorer can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

_LARGEST = (2.0 - 2.0**-23) * 2.0**127


def is_finite(value: float) -> bool:
    """Whether a number is finite, and no larger than float32's largest."""
    return abs(value) <= _LARGEST  # False for nan


@dataclass(frozen=True)
class Score:
    """The judgement of one response."""

    total: float
    """The reward that GRPO uses; finite in float32, which it is kept in."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts, such as "correct" and "format", for the metrics. What `total` makes of them is the scorer's rule."""
    answer: str | None = None
    """The answer that was read out of the response, in the scorer's normal form; None if there was none. Equal texts
    are one vote in a majority."""
    fault: str | None = None
    """Why nothing could be said ("timeout", "died", "ValueError: ..."): `total` is 0 then, and the fault is counted, so
    that a broken scorer is not mistaken for a policy that is wrong."""

    def __post_init__(self) -> None:
        if not is_finite(self.total):
            raise ValueError(f"total={self.total} must be finite in float32; return 0 for what cannot be judged")


@runtime_checkable
class Scorer(Protocol):
    """Judges responses by the gold answers; never raises or waits for what a policy wrote."""

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Score]:
        """One score a response; `answers` holds the gold answer of each."""
        ...


def verdict(correct: bool, *, found: bool, answer: str | None) -> Score:
    """Right or wrong: total and "correct" are 1 or 0, "format" is 1 where an answer stood in the asked form."""
    right = float(correct)
    return Score(right, {"correct": right, "format": float(found)}, answer)


def fault(reason: str) -> Score:
    """A response of which nothing can be said."""
    return Score(0.0, fault=reason)
