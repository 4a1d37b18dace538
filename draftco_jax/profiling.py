"""Wall-clock measurements: stages of a step, and settings compared in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax


class StageClock:
    """Adds up the seconds of named stages. A stage ends when the arrays it made are ready, so work is not shifted."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None, None, None]:
        """Time a block; the block itself waits for its arrays (`jax.block_until_ready`)."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Timing(NamedTuple):
    """Seconds of one setting over several calls."""

    median: float
    low: float  # lower quartile
    high: float  # upper quartile


def compare(calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn A B C A B C ..., after one call of each that compiles.

    Taking turns makes a drift of the machine's speed hit all settings alike, so ratios between them hold.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summarise(seconds: list[float]) -> Timing:
    """Median and quartiles."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median of slow / fast, turn by turn."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
