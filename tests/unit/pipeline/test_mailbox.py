"""Mailbox depths: the closed forms, enough in every one of many runs, and one slot fewer is caught."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from draftco_jax.pipeline.mailbox import (
    mailbox_depth,
    random_times,
    ring_depth,
    simulate_mailbox,
)
from draftco_jax.pipeline.schedule import make_schedule

PLACEMENTS = ("last_stage", "all_stages")
SHAPES = [
    (name, stages, chunks, microbatches)
    for name in ("1f1b", "gpipe")
    for stages in (1, 2, 3, 4, 8)
    for chunks in (1, 2, 3)
    for microbatches in (1, 2, 3, 4, 7, 8, 16, 24)
    if chunks == 1 or microbatches % stages == 0
]


def made(name, stages, chunks, microbatches):
    return make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)


def wrong_reads(schedule, k: int, placement: str, depth: int, tensor: int = 1) -> int:
    """Ticks walked one by one: reads come first, then the writes of the tick go into their slots."""
    slots: dict[int, int] = {}
    size = schedule.stages * tensor
    wrong = 0
    due: list[int] = []
    for t in range(schedule.ticks):
        for microbatch in due if placement == "all_stages" else []:
            wrong += slots.get(microbatch % depth) != microbatch
        due = due if placement == "last_stage" else []
        for m in range(schedule.microbatches):
            passed = schedule.forward_tick(m, schedule.virtual_stages - 1) == t
            if passed and placement == "last_stage":
                wrong += slots.get(m % depth) != m
            elif passed and (m % size == size - 1 or m == schedule.microbatches - 1):
                due = list(range(m - m % size, m + 1))
        for m in range(schedule.microbatches):
            if schedule.forward_tick(m, k) == t:
                slots[m % depth] = m
    for microbatch in due:
        wrong += slots.get(microbatch % depth) != microbatch
    return wrong


@pytest.mark.parametrize(("name", "stages", "chunks", "microbatches"), SHAPES)
def test_depths_are_the_closed_forms(name, stages, chunks, microbatches):
    schedule = made(name, stages, chunks, microbatches)
    last = stages * chunks - 1
    for k in range(last + 1):
        assert mailbox_depth(schedule, k) == min(stages, last - k, microbatches)
        for tensor in (1, 2, 3):
            held = min(stages * tensor + max(0, stages - 1 - k), microbatches)
            assert mailbox_depth(schedule, k, "all_stages", tensor) == held


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("name", "stages", "chunks", "microbatches"),
    [("1f1b", 4, 1, 8), ("1f1b", 4, 1, 7), ("1f1b", 3, 2, 9), ("gpipe", 3, 1, 7), ("1f1b", 2, 3, 6), ("1f1b", 5, 1, 3)],
)
def test_a_depth_is_enough_and_one_less_is_not(name, stages, chunks, microbatches, placement):
    schedule = made(name, stages, chunks, microbatches)
    for k, tensor in itertools.product(range(stages * chunks - (placement == "last_stage")), (1, 2)):
        depth = mailbox_depth(schedule, k, placement, tensor)
        assert wrong_reads(schedule, k, placement, depth, tensor) == 0
        assert depth == 1 or wrong_reads(schedule, k, placement, depth - 1, tensor) > 0


def random_shape(rng):
    stages, chunks = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    microbatches = stages * int(rng.integers(1, 4)) if chunks > 1 else int(rng.integers(1, 17))
    taps = rng.choice(stages * chunks - 1, size=int(rng.integers(1, min(4, stages * chunks))), replace=False)
    return made("1f1b", stages, chunks, microbatches), [int(k) for k in taps]


@pytest.mark.parametrize(
    "shapes", [25, pytest.param(250, marks=pytest.mark.slow)], ids=["ten thousand", "a hundred thousand"]
)
def test_many_runs_with_delays(shapes):
    """Random shapes, tap stages and times: no overwrite, no deadlock; one slot less is caught where it matters."""
    rng = np.random.default_rng(20)
    cases = 400
    fewer = {"ticks": 0, "credits": 0}
    overwritten_unguarded = 0
    for _ in range(shapes):
        schedule, taps = random_shape(rng)
        depths = {k: mailbox_depth(schedule, k) for k in taps}
        times = random_times(rng, schedule, cases, tap=float(rng.uniform(0.1, 5)))
        for guard in ("ticks", "credits"):
            found = simulate_mailbox(schedule, depths, times, guard)
            assert found.deadlock is None and not found.overwritten.any() and not found.wrong_stamps.any()
        overwritten_unguarded += simulate_mailbox(schedule, depths, times, "none").caught
        k = taps[0]
        if depths[k] == 1:
            continue
        short = {k: depths[k] - 1}
        assert simulate_mailbox(schedule, short, times, "ticks").caught == cases
        fewer["ticks"] += 1
        # Whoever asks for a free slot is safe with any, but waits for ever if the reader comes after in its own order:
        # a stage makes the taps of all S microbatches of a group before it has its next chunk.
        waits_for_ever = schedule.virtual_stages - 1 - k >= schedule.stages and schedule.chunks > 1
        found = simulate_mailbox(schedule, short, times, "credits")
        assert (found.deadlock is not None) == waits_for_ever and found.caught == (cases if waits_for_ever else 0)
        fewer["credits"] += waits_for_ever
    assert fewer["ticks"] > shapes / 2 and fewer["credits"] > shapes / 5
    assert overwritten_unguarded > 0.5 * shapes * cases  # so that it is ticks or credits which hold


def test_with_a_slot_too_few_every_read_finds_the_microbatch_that_came_after():
    schedule = made("1f1b", 4, 1, 8)
    times = random_times(np.random.default_rng(0), schedule, 3)
    found = simulate_mailbox(schedule, {0: 2}, times, "ticks")
    assert found.overwritten.tolist() == [6, 6, 6] and found.wrong_stamps.tolist() == [6, 6, 6]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: mailbox_depth(s, 4), "virtual_stage=4 must be in 0..3"),
        (
            lambda s: simulate_mailbox(s, {0: 0}, random_times(np.random.default_rng(0), s, 1), "ticks"),
            "=0 must be >= 1",
        ),
        (lambda s: simulate_mailbox(s, {3: 1}, random_times(np.random.default_rng(0), s, 1), "ticks"), r"depths\[3\]"),
        (lambda s: ring_depth(np.array([0, 1]), np.array([2, 1])), r"written\[1\]=1 must be < read\[1\]=1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(made("1f1b", 4, 1, 4))
