"""Which stage works on which microbatch in which tick: tables compiled and checked on the host.

All stages move in step. A tick is at most one forward and one backward on every stage, ended by one hop forward (stage
s to s + 1, the last to the first, where the next chunk is) and one hop backward. A forward and a backward in one tick
cost f + b whichever of them its neighbours do, so waiting is that of textbook 1F1B, and one program serves all.

Local turn i = 0 .. M V - 1 of a stage takes microbatches in groups of S: with g, rest = divmod(i, S V) and
v, r = divmod(rest, S) it is microbatch g S + r, and

    forward   chunk v            tick  s + i
    backward  chunk V - 1 - v    tick  (first backward tick) + (S - 1 - s) + i

The first backward tick is K - 1 for 1f1b: the tick in which the last virtual stage has its first forward. For gpipe it
is the tick after the last forward. Everything that arrives by a hop is used in the next tick, so one register a
direction holds it. The input of a forward is kept until its backward, in a slot of the stage.

Letters: S stages, V chunks of a stage, K = S V virtual stages (k = v S + s runs on stage s), M microbatches, T ticks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int, Int32

ScheduleName = Literal["1f1b", "gpipe"]
"""With more than one chunk either is interleaved."""


class Work(NamedTuple):
    """The forwards or the backwards of all ticks and stages.

    Where a stage has none: microbatch 0, chunk 0, and the trash slot, which is the one after the last.
    """

    microbatch: Int32[np.ndarray, "T S"]
    chunk: Int32[np.ndarray, "T S"]
    slot: Int32[np.ndarray, "T S"]
    """Where the input of the virtual stage is kept: written by its forward, last read by its backward."""
    active: Bool[np.ndarray, "T S"]


class Phase(NamedTuple):
    """Ticks start .. stop - 1, in which some stage has a forward, a backward, or both."""

    start: int
    stop: int
    forward: bool
    backward: bool
    head: bool
    """Whether the last virtual stage has a backward in it, so that the loss is computed there."""

    @property
    def ticks(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Tables of one update; made by `make_schedule`. Two of the same first four fields are equal."""

    name: ScheduleName
    stages: int
    chunks: int
    microbatches: int
    forward: Work = field(compare=False, repr=False)
    backward: Work = field(compare=False, repr=False)
    slots: int = field(compare=False)
    """Inputs that a stage has room for, the most that one needs; the trash slot comes on top."""
    phases: tuple[Phase, ...] = field(compare=False, repr=False)

    @property
    def ticks(self) -> int:
        """T."""
        return self.forward.active.shape[0]

    @property
    def virtual_stages(self) -> int:
        """K."""
        return self.stages * self.chunks

    @cached_property
    def forward_ticks(self) -> Int[np.ndarray, "M K"]:
        """Tick of the forward of each microbatch on each virtual stage."""
        return _ticks_of(self, "forward")

    @cached_property
    def backward_ticks(self) -> Int[np.ndarray, "M K"]:
        """Tick of the backward of each microbatch on each virtual stage."""
        return _ticks_of(self, "backward")

    def forward_tick(self, microbatch: int, virtual_stage: int) -> int:
        """Tick of one forward."""
        return int(self.forward_ticks[microbatch, virtual_stage])

    def backward_tick(self, microbatch: int, virtual_stage: int) -> int:
        """Tick of one backward."""
        return int(self.backward_ticks[microbatch, virtual_stage])

    @property
    def saved_inputs(self) -> Int[np.ndarray, " S"]:
        """Most inputs that each stage keeps at a time, counted in the tables."""
        alive = np.zeros((self.ticks + 1, self.stages), np.int64)
        stage = np.broadcast_to(np.arange(self.virtual_stages) % self.stages, self.forward_ticks.shape)
        np.add.at(alive, (self.forward_ticks, stage), 1)
        np.add.at(alive, (self.backward_ticks + 1, stage), -1)
        return alive.cumsum(axis=0).max(axis=0)

    @property
    def bubble_share(self) -> float:
        """Share of a stage's time without work: (S - 1) / (M V + S - 1), whatever a forward and a backward cost."""
        return 1 - float(self.forward.active.mean(axis=1).sum() / self.forward.active.any(axis=1).sum())


def make_schedule(name: ScheduleName, *, stages: int, chunks: int = 1, microbatches: int) -> Schedule:
    """Tables of a schedule, compiled and checked.

    Args:
        name: 1f1b keeps few inputs, gpipe all of them (forwards first, then backwards).
        stages: devices along the pipeline; 1 works.
        chunks: parts of the model that each stage holds; with more than one, microbatches come in groups of `stages`.
        microbatches: of one update.
    """
    if name not in get_args(ScheduleName):
        raise ValueError(f"schedule={name} must be one of {', '.join(get_args(ScheduleName))}; take one of them")
    for what, value in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{what}={value} must be >= 1; 1 is the smallest")
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} must be a multiple of stages={stages} with chunks={chunks} > 1; "
            f"take {microbatches + -microbatches % stages} microbatches or one chunk"
        )
    turns = microbatches * chunks
    first_backward = stages * chunks - 1 if name == "1f1b" else turns + stages - 1
    shape = (first_backward + stages - 1 + turns, stages)
    forward = _place(shape, stages, chunks, turns, first_tick=0, backward=False)
    backward = _place(shape, stages, chunks, turns, first_tick=first_backward, backward=True)
    forward, backward, slots = _with_slots(forward, backward)
    phases = _phases(name, forward, backward, stages, chunks)
    for table in (*forward, *backward):
        table.flags.writeable = False
    schedule = Schedule(
        name=name,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        forward=forward,
        backward=backward,
        slots=slots,
        phases=phases,
    )
    check_schedule(schedule)
    return schedule


def _place(shape: tuple[int, int], stages: int, chunks: int, turns: int, *, first_tick: int, backward: bool) -> Work:
    """The formula of this module's docstring, without slots. `turns` is M V."""
    microbatch, chunk, slot = (np.zeros(shape, np.int32) for _ in range(3))
    active = np.zeros(shape, np.bool_)
    turn = np.arange(turns)
    group, rest = np.divmod(turn, stages * chunks)
    part, member = np.divmod(rest, stages)
    # With one chunk this is microbatch = turn, for whole groups and for a last one that is not.
    of_turn, chunk_of_turn = group * stages + member, chunks - 1 - part if backward else part
    for s in range(stages):
        ticks = first_tick + (stages - 1 - s if backward else s) + turn
        microbatch[ticks, s], chunk[ticks, s], active[ticks, s] = of_turn, chunk_of_turn, True
    return Work(microbatch, chunk, slot, active)


def _with_slots(forward: Work, backward: Work) -> tuple[Work, Work, int]:
    """Slots by interval colouring: each forward takes the lowest free one, its backward frees it for the next tick."""
    ticks, stages = forward.active.shape
    written, read = np.full((2, ticks, stages), -1, np.int32)
    slots = 0
    for s in range(stages):
        free: list[int] = []
        held: dict[tuple[int, int], int] = {}
        made = 0
        for t in range(ticks):
            if forward.active[t, s]:
                if free:
                    slot = free.pop(free.index(min(free)))
                else:
                    slot, made = made, made + 1
                held[int(forward.microbatch[t, s]), int(forward.chunk[t, s])] = written[t, s] = slot
            if backward.active[t, s]:
                read[t, s] = held.pop((int(backward.microbatch[t, s]), int(backward.chunk[t, s])))
                free.append(int(read[t, s]))
        slots = max(slots, made)
    written[written < 0] = read[read < 0] = slots
    return forward._replace(slot=written), backward._replace(slot=read), slots


def _phases(name: ScheduleName, forward: Work, backward: Work, stages: int, chunks: int) -> tuple[Phase, ...]:
    """Stretches of ticks of one kind. An interleaved 1f1b is cut where a group has passed the last virtual stage."""
    kind = np.stack([forward.active.any(axis=1), backward.active.any(axis=1)])
    changes = np.flatnonzero(np.diff(kind, axis=1).any(axis=0)) + 1
    cuts = {0, kind.shape[1], *(int(t) for t in changes)}
    if name == "1f1b" and chunks > 1:
        cuts.add(stages * chunks - 1 + stages)
    ends = sorted(cuts)
    last_backward = backward.active[:, -1] & (backward.chunk[:, -1] == chunks - 1)
    return tuple(
        Phase(start, stop, bool(kind[0, start]), bool(kind[1, start]), bool(last_backward[start:stop].any()))
        for start, stop in zip(ends[:-1], ends[1:], strict=True)
    )


def _ticks_of(schedule: Schedule, way: Literal["forward", "backward"]) -> Int[np.ndarray, "M K"]:
    """Tick of each (microbatch, virtual stage); refuses a table that has one twice or not at all."""
    work: Work = getattr(schedule, way)
    tick, stage = np.nonzero(work.active)
    microbatch, chunk = work.microbatch[tick, stage], work.chunk[tick, stage]
    shape = (schedule.microbatches, schedule.virtual_stages)
    virtual = chunk * schedule.stages + stage
    inside = (0 <= microbatch) & (microbatch < shape[0]) & (0 <= chunk) & (chunk < schedule.chunks)
    _hold(schedule, bool(inside.all()), f"each {way} is of one of the microbatches and chunks")
    times = np.zeros(shape, np.int64)
    np.add.at(times, (microbatch, virtual), 1)
    _hold(schedule, bool((times == 1).all()), f"each microbatch has one {way} on each virtual stage")
    found = np.empty(shape, np.int64)
    found[microbatch, virtual] = tick
    return found


def check_schedule(schedule: Schedule) -> None:
    """Refuse tables that break a rule which the program and the tap channel rely on; a ValueError names the rule.

    What is checked is the tables as they are, not the formula they came from.
    """
    forward, backward = _ticks_of(schedule, "forward"), _ticks_of(schedule, "backward")
    for way, work in (("forward", schedule.forward), ("backward", schedule.backward)):
        idle = [table[~work.active] for table in (work.microbatch, work.chunk, work.slot)]
        trash = not idle[0].any() and not idle[1].any() and bool((idle[2] == schedule.slots).all())
        _hold(schedule, trash, f"without a {way}: microbatch 0, chunk 0, the trash slot")
    _hold(
        schedule, bool((np.diff(forward, axis=1) == 1).all()), "a forward comes one tick after that of the stage before"
    )
    _hold(
        schedule,
        bool((np.diff(backward, axis=1) == -1).all()),
        "a backward comes one tick after that of the stage after",
    )
    if schedule.name == "1f1b":
        meets = bool((forward[:, -1] == backward[:, -1]).all())
        _hold(schedule, meets, "the last virtual stage has forward and backward of a microbatch in one tick")
    else:
        _hold(schedule, bool(forward.max() < backward.min()), "all forwards come before all backwards")
    _check_slots(schedule, forward, backward)
    _check_phases(schedule)


def _check_slots(schedule: Schedule, forward: Int[np.ndarray, "M K"], backward: Int[np.ndarray, "M K"]) -> None:
    """An input stays in its slot from its forward to its backward, both ticks included; no more slots than the closed
    form: min(M V, S (V + 1) - 1 - 2 s) for 1f1b, which is 2 (S - 1 - s) + 1 for one chunk, and M V for gpipe."""
    stage = np.broadcast_to(np.arange(schedule.virtual_stages) % schedule.stages, forward.shape)
    slot = schedule.forward.slot[forward, stage]
    _hold(
        schedule, bool((slot == schedule.backward.slot[backward, stage]).all()), "a backward reads its forward's slot"
    )
    _hold(schedule, bool(((slot >= 0) & (slot < schedule.slots)).all()), "work has a slot that is not the trash slot")
    order = np.lexsort((forward.ravel(), slot.ravel(), stage.ravel()))
    where = (stage.ravel() * schedule.slots + slot.ravel())[order]
    written, read = forward.ravel()[order], backward.ravel()[order]
    apart = (where[1:] != where[:-1]) | (written[1:] > read[:-1])
    _hold(schedule, bool(apart.all()), "an input is not overwritten before its backward has read it")
    turns = schedule.microbatches * schedule.chunks
    kept = np.full(schedule.stages, turns)
    if schedule.name == "1f1b":
        most = schedule.stages * (schedule.chunks + 1) - 1 - 2 * np.arange(schedule.stages)
        kept = np.minimum(turns, most)
    _hold(schedule, bool((schedule.saved_inputs == kept).all()), "a stage keeps as many inputs as the closed form says")
    _hold(
        schedule, schedule.slots == int(kept.max()), "there are as many slots as the stage with the most inputs needs"
    )


def _check_phases(schedule: Schedule) -> None:
    """The phases are all ticks, in order, each with what its flags say and nothing else in any of its ticks."""
    stops = [0, *(phase.stop for phase in schedule.phases)]
    joined = all(phase.start == stop < phase.stop for phase, stop in zip(schedule.phases, stops, strict=False))
    _hold(schedule, joined and stops[-1] == schedule.ticks, "the phases are all ticks, one after the other, none empty")
    last = schedule.backward.active[:, -1] & (schedule.backward.chunk[:, -1] == schedule.chunks - 1)
    for phase in schedule.phases:
        ticks = slice(phase.start, phase.stop)
        for work, said in ((schedule.forward, phase.forward), (schedule.backward, phase.backward)):
            same = bool((work.active[ticks].any(axis=1) == said).all())
            _hold(schedule, same, "every tick of a phase has the kinds of work that the phase says")
        _hold(
            schedule, bool(last[ticks].any()) == phase.head, "a phase has the head if the last virtual stage is in it"
        )


def _hold(schedule: Schedule, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{schedule} breaks a rule: {rule}; make it with make_schedule")
