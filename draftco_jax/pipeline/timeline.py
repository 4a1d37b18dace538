"""When forwards, backwards, tap sends and drafts happen: an event model of one update, many cases at a time.

The draft of a microbatch trains on the last stage, right after the forward of the last virtual stage. It reads taps:
features that other virtual stages made of the same microbatch and sent there. Stages either wait only for what they
need (`play_waiting`) or end every tick together (`play_in_step`). Sends of one source arrive in the order they were
made.

Times have no unit; all of one case must be in the same. Only sends between stages take time.

Letters: S stages, K virtual stages (k runs on stage k mod S), M microbatches, n cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from draftco_jax.pipeline.orders import Op, Orders, walk
from draftco_jax.pipeline.schedule import Schedule

Sends = Literal["ideal", "direct", "hold", "hold_window"]
"""How taps are sent by stages in step.

ideal        the send of a tick may go on in later ones; only the draft waits for it
direct       in the tick that made them, and done when it ends
hold         in the tick before their use: from its start, or after the forward if it is of this very tick
hold_window  the same, and not in ticks where there is nothing to send

`direct` and `hold` send in every tick of a phase with forwards, as one program for all ticks does.
"""


class Times(NamedTuple):
    """How long each thing takes."""

    forward: Float[np.ndarray, "M K n"]
    backward: Float[np.ndarray, "M K n"]
    draft: Float[np.ndarray, "M n"]
    hop: Float[np.ndarray, "M K n"]
    """Of an activation from virtual stage k to k + 1, and of its gradient back."""
    tap: Float[np.ndarray, "M K n"]
    """Of the taps of virtual stage k to the last stage."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each thing was over."""

    forward_end: Float[np.ndarray, "M K n"]
    backward_end: Float[np.ndarray, "M K n"]
    arrival: Float[np.ndarray, "M K n"]
    """Of the taps of a virtual stage where the draft reads them; only of those that are tapped."""
    draft_start: Float[np.ndarray, "M n"]
    draft_end: Float[np.ndarray, "M n"]
    makespan: Float[np.ndarray, " n"]

    @property
    def slack(self) -> Float[np.ndarray, "K M n"]:
        """From the forward that makes taps to the draft that reads them, Delta of 2609.07108 (Eq. 6)."""
        return np.moveaxis(self.draft_start[:, None] - self.forward_end, 0, 1)


def play_waiting(
    orders: Orders, times: Times, taps: Sequence[int] = (), depths: Mapping[int, int] | None = None
) -> Timeline:
    """Stages that wait only for what they need.

    Args:
        orders: of each stage.
        times: of everything.
        taps: virtual stages with taps.
        depths: slots of each of them; a forward that makes taps then starts only when the draft has read the slot.
            None: nobody asks whether a slot is free.

    Raises:
        DeadlockError: slots are too few for this order, whatever the times.
    """
    line = _Line(times, taps)
    last = times.forward.shape[1] - 1

    def waits_for(op: Op) -> Sequence[Op]:
        if depths is None or op.backward or op.virtual_stage not in depths:
            return ()
        reader = op.microbatch - depths[op.virtual_stage]
        return () if reader < 0 else (Op(False, reader, last),)

    clock = np.zeros((len(orders), times.draft.shape[1]))
    for op in walk(orders, waits_for):
        m, k = op.microbatch, op.virtual_stage
        stage = k % len(orders)
        start = np.maximum(clock[stage], line.ready(op, hops=len(orders) > 1))
        for reader in waits_for(op):
            start = np.maximum(start, line.draft_end[reader.microbatch])
        if op.backward:
            clock[stage] = line.backward_end[m, k] = start + times.backward[m, k]
            continue
        clock[stage] = line.forward_end[m, k] = start + times.forward[m, k]
        if k in taps:
            line.send(m, k, clock[stage], moves=stage != len(orders) - 1)
        if k == last:
            clock[stage] = line.draft(m, waits=True)
    return line.over(clock.max(axis=0))


def play_in_step(schedule: Schedule, times: Times, taps: Sequence[int] = (), sends: Sends = "ideal") -> Timeline:
    """Stages that end every tick together, which takes as long as the slowest needs; hops are part of their ticks."""
    line = _Line(times, taps)
    last, stages = schedule.virtual_stages - 1, schedule.stages
    sending = {t for phase in schedule.phases if phase.forward for t in range(phase.start, phase.stop)}
    now = np.zeros(times.draft.shape[1])
    for t in range(schedule.ticks):
        end = now
        for s in range(stages):
            clock = now
            if schedule.forward.active[t, s]:
                m, k = int(schedule.forward.microbatch[t, s]), int(schedule.forward.chunk[t, s]) * stages + s
                clock = line.forward_end[m, k] = now + times.forward[m, k]
                if k in taps and sends == "ideal":
                    line.send(m, k, clock, moves=s != stages - 1)
                if k == last:
                    clock = line.draft(m, waits=sends == "ideal")
            if schedule.backward.active[t, s]:
                m, k = int(schedule.backward.microbatch[t, s]), int(schedule.backward.chunk[t, s]) * stages + s
                clock = line.backward_end[m, k] = clock + times.backward[m, k]
            end = np.maximum(end, clock)
        if sends != "ideal" and t in sending:
            end = _sends_of_tick(schedule, line, t, sends, now, end)
        now = end
    return line.over(now)


def _sends_of_tick(
    schedule: Schedule, line: _Line, t: int, sends: Sends, now: Float[np.ndarray, " n"], end: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """When a tick is over that started at `now` and, but for its sends, ends at `end`; notes what arrived."""
    last, stages = schedule.virtual_stages - 1, schedule.stages
    arrived: list[tuple[int, int]] = []
    for k in line.taps:
        offset = 0 if sends == "direct" or k % stages == stages - 1 else last - 1 - k
        # Whose features go now: those of this tick's forward, or of the one `offset` ticks ago that is due in the next.
        found = np.flatnonzero(schedule.forward_ticks[:, k] == t - offset)
        arrived += [(int(m), k) for m in found]
        if k % stages == stages - 1 or (sends == "hold_window" and not found.size):
            continue
        m = int(found[0]) if found.size else 0
        start = now if offset else now + line.times.forward[m, k]
        end = np.maximum(end, start + line.times.tap[m, k])
    for m, k in arrived:
        line.arrival[m, k] = end
    return end


class _Line:
    """A timeline as it is filled."""

    def __init__(self, times: Times, taps: Sequence[int]):
        self.times, self.taps = times, tuple(taps)
        shape = times.forward.shape
        self.forward_end, self.backward_end, self.arrival = (np.full(shape, np.nan) for _ in range(3))
        self.draft_start, self.draft_end = (np.full((shape[0], shape[2]), np.nan) for _ in range(2))

    def ready(self, op: Op, *, hops: bool) -> Float[np.ndarray, " n"]:
        """When what an op needs from other ops is there."""
        m, k = op.microbatch, op.virtual_stage
        hop = self.times.hop if hops else np.zeros_like(self.times.hop)
        if not op.backward:
            return self.forward_end[m, k - 1] + hop[m, k - 1] if k else np.zeros(hop.shape[2])
        own = self.forward_end[m, k]
        return own if k == hop.shape[1] - 1 else np.maximum(own, self.backward_end[m, k + 1] + hop[m, k])

    def send(self, m: int, k: int, made: Float[np.ndarray, " n"], *, moves: bool) -> None:
        """Taps of one source arrive in the order of its sends."""
        arrives = made + self.times.tap[m, k] if moves else made
        self.arrival[m, k] = np.maximum(arrives, self.arrival[m - 1, k]) if m else arrives

    def draft(self, m: int, *, waits: bool) -> Float[np.ndarray, " n"]:
        """Train on a microbatch; returns when that is done."""
        needs = [self.forward_end[m, -1], *(self.arrival[m, k] for k in self.taps if waits)]
        self.draft_start[m] = np.maximum.reduce(needs)
        self.draft_end[m] = self.draft_start[m] + self.times.draft[m]
        return self.draft_end[m]

    def over(self, makespan: Float[np.ndarray, " n"]) -> Timeline:
        """The finished timeline."""
        return Timeline(
            forward_end=self.forward_end,
            backward_end=self.backward_end,
            arrival=self.arrival,
            draft_start=self.draft_start,
            draft_end=self.draft_end,
            makespan=makespan,
        )
