"""Speculation statistics, pooled over all requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftco_jax.types import Rollouts


class SpeculationStats(NamedTuple):
    """Counts of a batch and the ratios made of them; all None-like ratios are None when there were no rounds.

    Ratios are ratios of sums over requests, not means of per-request ratios: a long request counts for more.
    """

    rounds: int
    committed: int
    accepted: tuple[int, ...]  # per drafted position
    proposed: int
    experts_touched: float | None = None  # different experts in use in a decoding forward, mean over layers

    @property
    def accepted_length(self) -> float | None:
        """tau = committed tokens / verify rounds, bonus and residual tokens included, tokens after a stop not."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def accepted_length_papers(self) -> float | None:
        """1 + accepted drafts / rounds: the published form, which also counts what a stop then cut off."""
        return 1.0 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / proposed drafts; a slot in which nothing was proposed is in neither."""
        return sum(self.accepted) / self.proposed if self.proposed else None

    @property
    def acceptance_rate_by_position(self) -> tuple[float, ...]:
        """Share of rounds in which draft 1, 2, ... was accepted."""
        return tuple(a / self.rounds for a in self.accepted) if self.rounds else ()


def speculation_stats(rollouts: Rollouts) -> SpeculationStats:
    """Pool the counters of one generate call."""
    accepted = np.asarray(rollouts.accepted).sum(axis=0)
    return SpeculationStats(
        rounds=int(np.asarray(rollouts.rounds).sum()),
        committed=int(np.asarray(rollouts.committed).sum()),
        accepted=tuple(int(a) for a in accepted),
        proposed=int(np.asarray(rollouts.proposed).sum()),
        experts_touched=_touched(rollouts),
    )


def accepted_length_by_length(rollouts: Rollouts, edges: Sequence[int]) -> dict[str, float]:
    """Accepted length of requests by how long their responses became, pooled in each bin that has rounds.

    Bin "0-15" of edges (16, 64) holds responses of 0 to 15 tokens, "16-63" those of 16 to 63, "64-" all others.

    Args:
        rollouts: of one or several calls.
        edges: where bins begin beside the first, rising.
    """
    lengths = np.asarray(rollouts.lengths) - np.asarray(rollouts.prompt_lengths)
    rounds, committed = np.asarray(rollouts.rounds), np.asarray(rollouts.committed)
    starts, ends = (0, *edges), (*edges, None)
    found = {}
    for start, end in zip(starts, ends, strict=True):
        here = (lengths >= start) & (True if end is None else lengths < end)
        if rounds[here].sum():
            found[f"{start}-{'' if end is None else end - 1}"] = float(committed[here].sum() / rounds[here].sum())
    return found


def length_edges(most: int) -> tuple[int, ...]:
    """Bins for responses of up to `most` tokens: quarters of it, where they are different numbers above 0."""
    return tuple(sorted({most * part // 4 for part in (1, 2, 3)} - {0}))


def _touched(rollouts: Rollouts) -> float | None:
    """None for a policy without experts, and where nothing was decoded after the prefill."""
    if rollouts.experts_touched is None or not rollouts.experts_touched.size:
        return None
    return float(np.asarray(rollouts.experts_touched)[0]) or None
