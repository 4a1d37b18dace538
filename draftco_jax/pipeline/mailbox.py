"""How many slots the mailboxes of the tap channel need, and a model that shows what happens with fewer.

Taps of a virtual stage go into a ring of slots, microbatch m into slot m mod depth, stamped with m. Depth is read off
the tables: a slot is written at the end of a tick and may be read in any later tick, before that tick's own writes. Two
places of the draft, with k the virtual stage that makes the taps:

    last_stage   read with the forward of the last virtual stage       min(S, K - 1 - k, M)
    all_stages   read when all S T microbatches of a round have passed   min(S T + max(0, S - 1 - k), M)

For last_stage a ring lies on the last stage, and the last virtual stage needs none; for all_stages it lies on the
source, which sends microbatch m to stage m mod S once the round has passed.

Neither depth is enough for stages that are not in step and do not ask whether a slot is free: a source then runs ahead
of the draft by more than the tables say.

Letters: S stages, K virtual stages, T tensor ranks that a draft is dealt out to, M microbatches, n cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from draftco_jax.pipeline.orders import DeadlockError, orders_of
from draftco_jax.pipeline.schedule import Schedule
from draftco_jax.pipeline.timeline import Timeline, Times, play_in_step, play_waiting

Placement = Literal["all_stages", "last_stage"]
"""Where the draft of a microbatch trains: on stage m mod S, or always on the last."""

Guard = Literal["ticks", "credits", "none"]
"""What keeps a slot from being written too early.

ticks    all stages end a tick together, and a send is done in its tick; nobody asks whether a slot is free
credits  stages wait only for what they need; a source goes on when the draft has read the slot it will write
none     the same without asking
"""


def mailbox_depth(
    schedule: Schedule, virtual_stage: int, placement: Placement = "last_stage", tensor_ranks: int = 1
) -> int:
    """Fewest slots in which no tap of this virtual stage is overwritten before it is read, by the tables.

    0 for the last virtual stage and a draft on the last stage: it reads what was made in the same tick. `tensor_ranks`
    counts with the draft on all stages.
    """
    last = schedule.virtual_stages - 1
    if not 0 <= virtual_stage <= last:
        raise ValueError(f"virtual_stage={virtual_stage} must be in 0..{last}; take one of the schedule's")
    passed = schedule.forward_ticks[:, last]
    if placement == "last_stage":
        return 0 if virtual_stage == last else ring_depth(schedule.forward_ticks[:, virtual_stage], passed)
    size = schedule.stages * tensor_ranks
    ends = np.minimum(np.arange(schedule.microbatches) // size * size + size, len(passed))
    return ring_depth(schedule.forward_ticks[:, virtual_stage], passed[ends - 1] + 1)


def ring_depth(written: Int[np.ndarray, " M"], read: Int[np.ndarray, " M"]) -> int:
    """Fewest slots for which m mod depth is right.

    Args:
        written: tick at whose end each microbatch is written.
        read: tick in which it is read, before the writes of that tick.
    """
    if not (written < read).all():
        m = int(np.argmin(written < read))
        raise ValueError(f"written[{m}]={written[m]} must be < read[{m}]={read[m]}; read in a later tick")
    return next(d for d in range(1, len(written) + 1) if (written[d:] >= read[: len(written) - d]).all())


def random_times(
    rng: np.random.Generator, schedule: Schedule, cases: int, *, draft: float = 0.5, hop: float = 0.2, tap: float = 2.0
) -> Times:
    """Forwards of 1 and backwards of 2 with any of half to twice of that, the others exponential with these means."""
    shape = (schedule.microbatches, schedule.virtual_stages, cases)
    factor = lambda: 2 ** rng.uniform(-1, 1, shape)  # noqa: E731
    return Times(
        forward=factor(),
        backward=2 * factor(),
        draft=rng.exponential(draft, (shape[0], cases)),
        hop=rng.exponential(hop, shape),
        tap=rng.exponential(tap, shape),
    )


@dataclass(frozen=True, kw_only=True)
class MailboxReport:
    """What happened in each case."""

    deadlock: str | None
    """Who waits for what, if nobody can go on; that does not depend on times, so it is so in all cases."""
    overwritten: Int[np.ndarray, " n"]
    """Slots that were written before the draft had read what was in them."""
    wrong_stamps: Int[np.ndarray, " n"]
    """Reads that found another microbatch than the one they were for."""

    @property
    def caught(self) -> int:
        """Cases in which something went wrong."""
        wrong = (self.overwritten > 0) | (self.wrong_stamps > 0)
        return int(wrong.size if self.deadlock else wrong.sum())


def simulate_mailbox(schedule: Schedule, depths: Mapping[int, int], times: Times, guard: Guard) -> MailboxReport:
    """A draft on the last stage, fed through rings of these depths (virtual stage -> slots).

    Each source sends in the order it works in and its sends arrive in that order. The draft reads when the forward of
    the last virtual stage is done and, but for `ticks`, waits until all its taps have arrived; reading ends with it.
    """
    for k, depth in depths.items():
        if depth < 1 or not 0 <= k < schedule.virtual_stages - 1:
            raise ValueError(
                f"depths[{k}]={depth} must be >= 1 slots for a virtual stage in 0..{schedule.virtual_stages - 2}; "
                "take mailbox_depth"
            )
    taps = sorted(depths)
    none = np.zeros(times.draft.shape[1], np.int64)
    try:
        if guard == "ticks":
            line = play_in_step(schedule, times, taps, "direct")
        else:
            line = play_waiting(orders_of(schedule), times, taps, depths if guard == "credits" else None)
    except DeadlockError as error:
        return MailboxReport(deadlock=str(error), overwritten=none, wrong_stamps=none)
    found = [_read_back(line, k, depths[k]) for k in taps]
    return MailboxReport(
        deadlock=None,
        overwritten=sum((overwritten for overwritten, _ in found), none),
        wrong_stamps=sum((wrong for _, wrong in found), none),
    )


def _read_back(line: Timeline, k: int, depth: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Slots of virtual stage k that were overwritten, and reads that found another stamp."""
    arrival, start = line.arrival[:, k], line.draft_start
    microbatches = len(arrival)
    overwritten = (arrival[depth:] < line.draft_end[: max(0, microbatches - depth)]).sum(axis=0)
    newest = _arrived(arrival, start) - 1
    each = np.arange(microbatches)[:, None]
    stamp = newest - (newest - each) % depth  # the newest of those that share the slot
    return overwritten, (stamp != each).sum(axis=0)


def _arrived(arrival: Float[np.ndarray, "M n"], at: Float[np.ndarray, "M n"]) -> Int[np.ndarray, "M n"]:
    """How many taps have arrived at each time; they arrive in order."""
    return (arrival[None] <= at[:, None]).sum(axis=1)
