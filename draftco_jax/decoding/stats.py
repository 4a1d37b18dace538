"""Speculation statistics, pooled over all requests of a batch."""

from __future__ import annotations

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


def _touched(rollouts: Rollouts) -> float | None:
    """None for a policy without experts, and where nothing was decoded after the prefill."""
    if rollouts.experts_touched is None or not rollouts.experts_touched.size:
        return None
    return float(np.asarray(rollouts.experts_touched)[0]) or None
