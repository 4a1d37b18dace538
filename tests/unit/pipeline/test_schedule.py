"""Schedules: worked tables, closed forms, and that the check catches each broken rule."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from draftco_jax.pipeline.schedule import Schedule, check_schedule, make_schedule

ONE_CHUNK = """
F0/.  F1/.  F2/.  F3/.  F4/.  F5/.  ./B0  ./B1  ./B2  ./B3  ./B4  ./B5
./.   F0/.  F1/.  F2/.  F3/.  F4/B0 F5/B1 ./B2  ./B3  ./B4  ./B5  ./.
./.   ./.   F0/.  F1/.  F2/B0 F3/B1 F4/B2 F5/B3 ./B4  ./B5  ./.   ./.
./.   ./.   ./.   F0/B0 F1/B1 F2/B2 F3/B3 F4/B4 F5/B5 ./.   ./.   ./.
"""
TWO_CHUNKS = """
F0a/. F1a/. F0b/. F1b/.   F2a/B0b F3a/B1b F2b/B0a F3b/B1a ./B2b ./B3b ./B2a ./B3a
./.   F0a/. F1a/. F0b/B0b F1b/B1b F2a/B0a F3a/B1a F2b/B2b F3b/B3b ./B2a ./B3a ./.
"""
FORWARDS_FIRST = """
F0/. F1/. F2/. ./.  ./.  ./B0 ./B1 ./B2
./.  F0/. F1/. F2/. ./B0 ./B1 ./B2 ./.
"""

SHAPES = [
    (stages, chunks, microbatches)
    for stages in (1, 2, 3, 4, 8)
    for chunks in (1, 2, 3)
    for microbatches in (1, 2, 3, 4, 6, 8, 16, 24)
    if chunks == 1 or microbatches % stages == 0
]


def made(name="1f1b", stages=4, chunks=1, microbatches=6) -> Schedule:
    return make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)


def cells(schedule: Schedule) -> list[list[str]]:
    """One line a stage, one cell a tick."""

    def one(letter, work, t, s):
        if not work.active[t, s]:
            return "."
        chunk = "abc"[work.chunk[t, s]] if schedule.chunks > 1 else ""
        return f"{letter}{work.microbatch[t, s]}{chunk}"

    return [
        [f"{one('F', schedule.forward, t, s)}/{one('B', schedule.backward, t, s)}" for t in range(schedule.ticks)]
        for s in range(schedule.stages)
    ]


@pytest.mark.parametrize(
    ("schedule", "drawn"),
    [
        (made(), ONE_CHUNK),
        (made(stages=2, chunks=2, microbatches=4), TWO_CHUNKS),
        (made("gpipe", stages=2, microbatches=3), FORWARDS_FIRST),
        (made(stages=1, microbatches=3), "F0/B0 F1/B1 F2/B2"),
    ],
    ids=["one_chunk", "two_chunks", "forwards_first", "one_stage"],
)
def test_worked_tables(schedule, drawn):
    assert cells(schedule) == [line.split() for line in drawn.strip().splitlines()]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SHAPES)
def test_rules_read_off_the_cells(name, stages, chunks, microbatches):
    """The same rules as `check_schedule`, found by walking the ticks with one register for each hop."""
    schedule = made(name, stages, chunks, microbatches)
    last = schedule.virtual_stages - 1
    slots: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, slot) -> what lies there
    arrived: dict[tuple[str, int], tuple[int, int]] = {}  # (way, stage) -> what came by the hop of the tick before
    done = set()
    for t in range(schedule.ticks):
        sent = {}
        for s in range(stages):
            work = schedule.forward
            if work.active[t, s]:
                m, k = int(work.microbatch[t, s]), int(work.chunk[t, s]) * stages + s
                assert k == 0 or arrived["F", s] == (m, k)
                assert (s, int(work.slot[t, s])) not in slots
                slots[s, int(work.slot[t, s])] = (m, k)
                sent["F", (s + 1) % stages] = (m, k + 1)
            work = schedule.backward
            if work.active[t, s]:
                m, k = int(work.microbatch[t, s]), int(work.chunk[t, s]) * stages + s
                assert k == last or arrived["B", s] == (m, k)
                assert slots.pop((s, int(work.slot[t, s]))) == (m, k)
                sent["B", (s - 1) % stages] = (m, k - 1)
                assert k != last or name == "gpipe" or schedule.forward_tick(m, k) == schedule.backward_tick(m, k) == t
                done.add((m, k))
        arrived = sent
    assert not slots and len(done) == microbatches * (last + 1)
    assert schedule.bubble_share == pytest.approx((stages - 1) / (microbatches * chunks + stages - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("chunks", "kept"), [(1, [7, 5, 3, 1]), (2, [11, 9, 7, 5]), (3, [15, 13, 11, 9])], ids=["one", "two", "three"]
)
def test_saved_inputs_do_not_grow_with_microbatches(chunks, kept):
    for microbatches in (8, 16, 64):
        schedule = made(chunks=chunks, microbatches=microbatches)
        assert schedule.saved_inputs.tolist() == kept and schedule.slots == kept[0]
        assert made("gpipe", chunks=chunks, microbatches=microbatches).slots == microbatches * chunks


@pytest.mark.parametrize(
    ("schedule", "phases"),
    [
        (made(), [(0, 3, "F"), (3, 9, "FBh"), (9, 12, "B")]),
        (made(stages=1), [(0, 6, "FBh")]),
        (made("gpipe"), [(0, 9, "F"), (9, 18, "Bh")]),
        (made(chunks=2, microbatches=12), [(0, 7, "F"), (7, 11, "FBh"), (11, 27, "FBh"), (27, 34, "B")]),
        (made(chunks=2, microbatches=4), [(0, 7, "F"), (7, 11, "FBh"), (11, 18, "B")]),
    ],
    ids=["one_chunk", "one_stage", "gpipe", "three_groups", "one_group"],
)
def test_phases(schedule, phases):
    found = [(p.start, p.stop, "F" * p.forward + "B" * p.backward + "h" * p.head) for p in schedule.phases]
    assert found == phases


@pytest.mark.parametrize(("stages", "chunks", "groups"), [(2, 2, 3), (4, 3, 4), (1, 2, 5)])
def test_cuts_of_an_interleaved_schedule_end_a_group(stages, chunks, groups):
    schedule = made(stages=stages, chunks=chunks, microbatches=groups * stages)
    passed = schedule.forward_ticks[:, -1]
    first, rest = [phase for phase in schedule.phases if phase.head]
    for group in range(groups):
        end = first.stop + group * stages * chunks
        assert (passed < end).sum() == (group + 1) * stages and passed[(group + 1) * stages - 1] == end - 1
    assert rest.stop == end


def test_a_schedule_is_a_key():
    one, other = made(), made()
    assert one == other and hash(one) == hash(other) and one != made(microbatches=7) and one != made("gpipe")
    assert "Work" not in repr(one)
    with pytest.raises(ValueError, match="read-only"):
        one.forward.chunk[0, 0] = 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stages": 0}, "stages=0 must be >= 1"),
        ({"chunks": -1}, "chunks=-1 must be >= 1"),
        ({"microbatches": 0}, "microbatches=0 must be >= 1"),
        ({"chunks": 2, "microbatches": 6}, "microbatches=6 must be a multiple of stages=4.*take 8 microbatches"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        made(**arguments)


def changed(schedule: Schedule, way: str, table: str, where, value) -> Schedule:
    """The schedule with one entry of one table replaced."""
    work = getattr(schedule, way)
    new = getattr(work, table).copy()
    new[where] = value
    return dataclasses.replace(schedule, **{way: work._replace(**{table: new})})


def swapped(schedule: Schedule, way: str, stage: int, a: int, b: int) -> Schedule:
    """The schedule with two ticks of one stage exchanged."""
    work = getattr(schedule, way)
    tables = [table.copy() for table in work]
    for table in tables:
        table[[a, b], stage] = table[[b, a], stage]
    return dataclasses.replace(schedule, **{way: type(work)(*tables)})


def late_backward(schedule: Schedule) -> Schedule:
    """All backwards one tick later: still a chain of hops, no longer in the tick of the last forward."""
    idle = [np.zeros_like(table[:1]) for table in schedule.backward]
    idle[2][:] = schedule.slots
    rows = {
        "forward": type(schedule.forward)(*(np.concatenate(p) for p in zip(schedule.forward, idle, strict=True))),
        "backward": type(schedule.forward)(*(np.concatenate(p) for p in zip(idle, schedule.backward, strict=True))),
    }
    return dataclasses.replace(schedule, **rows)


def more_slots(schedule: Schedule) -> Schedule:
    """One slot that nobody uses."""
    for way in ("forward", "backward"):
        schedule = changed(schedule, way, "slot", ~getattr(schedule, way).active, schedule.slots + 1)
    return dataclasses.replace(schedule, slots=schedule.slots + 1)


def late_last_microbatch(schedule: Schedule, by: int) -> Schedule:
    """All work of the last microbatch `by` ticks later: the hops hold, and fewer inputs are kept at a time."""
    found = {}
    for way in ("forward", "backward"):
        work = getattr(schedule, way)
        tables = [np.concatenate([table, np.repeat(table[:1], by, axis=0)]) for table in work]
        tables[2][-by:], tables[3][-by:] = schedule.slots, False
        idle = [0, 0, schedule.slots, False]
        for t, s in reversed(np.argwhere(work.active & (work.microbatch == schedule.microbatches - 1)).tolist()):
            for table, nothing in zip(tables, idle, strict=True):
                table[t + by, s], table[t, s] = table[t, s], nothing
        found[way] = type(work)(*tables)
    return dataclasses.replace(schedule, **found)


# Stage 0 of ONE_CHUNK has forwards in ticks 0..5 (slots 0..5) and backwards in 6..11; stage 3 both in 3..8.
BROKEN = {
    "one forward on each": changed(made(), "forward", "microbatch", (0, 0), 1),
    "one backward on each": changed(made(), "backward", "active", (6, 0), False),
    "of one of the microbatches": changed(made(), "forward", "microbatch", (0, 0), 6),
    "without a forward": changed(made(), "forward", "slot", (11, 0), 0),
    "without a backward": changed(made(), "backward", "microbatch", (0, 0), 2),
    "stage before": swapped(made(), "forward", 1, 2, 3),
    "stage after": swapped(made(), "backward", 1, 6, 7),
    "in one tick": late_backward(made()),
    "before all backwards": dataclasses.replace(made(), name="gpipe"),
    "reads its forward's slot": changed(made(), "backward", "slot", (6, 0), 3),
    "not the trash slot": changed(changed(made(), "forward", "slot", (0, 0), 6), "backward", "slot", (6, 0), 6),
    "not overwritten": changed(changed(made(), "forward", "slot", (1, 0), 0), "backward", "slot", (7, 0), 0),
    "as the closed form": late_last_microbatch(made(), by=2),
    "as many slots": more_slots(made()),
    "one after the other": dataclasses.replace(made(), phases=made().phases[:2]),
    "the phase says": dataclasses.replace(
        made(), phases=(made().phases[0]._replace(stop=4), made().phases[1]._replace(start=4), made().phases[2])
    ),
    "has the head": dataclasses.replace(made(), phases=(*made().phases[:2], made().phases[2]._replace(head=True))),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_broken_rule_is_named(rule):
    check_schedule(made())
    with pytest.raises(ValueError, match=f"breaks a rule: .*{rule}"):
        check_schedule(BROKEN[rule])
