"""Steps in which the draft rests: nothing of it changes, the policy goes on, and the version is that of the policy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from draftco_jax.config import DraftScheduleConfig
from draftco_jax.metrics import read_metrics


def equal(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize(
    ("schedule", "trained"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"every_steps": 3}, [3, 6]),
        ({"until_step": 2}, [1, 2]),
        ({"every_steps": 2, "until_step": 5}, [2, 4]),
        ({"below_accepted_length": 2.0}, [1, 4, 5]),  # 2.0 is not below 2.0; a step without rounds says nothing
        ({"below_accepted_length": 2.0, "every_steps": 4}, [4]),
    ],
)
def test_the_steps_in_which_the_draft_trains(schedule, trained):
    seen = [1.9, 2.0, 2.5, 1.0, None, 3.0]
    due = [step for step, length in enumerate(seen, start=1) if DraftScheduleConfig(**schedule).due(step, length)]
    assert due == trained


@pytest.mark.parametrize(
    "schedule",
    [{"every_steps": 0}, {"until_step": 0}, {"below_accepted_length": 1.0}, {"below_accepted_length": np.nan}],
)
def test_schedules_in_which_it_never_trains_are_refused(schedule):
    with pytest.raises(ValueError, match="use speculation=frozen for a draft that never trains"):
        DraftScheduleConfig(**schedule)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("every_steps=7", "draft_schedule must train the draft in one of steps=6"),
        ("until_step=2 every_steps=4", "until_step=2 leave none"),
        ("below_accepted_length=3.5", "must be <= 3, the most that draft_length=2 commits"),
    ],
)
def test_schedules_that_come_to_nothing_in_this_run_are_refused(small, schedule, said):
    with pytest.raises(Exception, match=said):
        small(*(f"draft_schedule.{setting}" for setting in schedule.split()))


@pytest.mark.parametrize(
    ("schedule", "updates"), [({}, 7), ({"every_steps": 3}, 2), ({"until_step": 5, "every_steps": 2}, 2)]
)
def test_the_learning_rate_falls_over_the_updates_that_train_it(schedule, updates):
    assert DraftScheduleConfig(**schedule).updates(7) == updates


def test_a_schedule_of_nothing_is_refused(small):
    with pytest.raises(Exception, match="draft_schedule must be left out with speculation=frozen"):
        small("speculation=frozen", "draft_schedule.every_steps=2")


@pytest.fixture(scope="module")
def every_second(small):
    return small("steps=3", "draft_schedule.every_steps=2", "checkpoint.every_steps=1", "checkpoint.keep=3")


@pytest.fixture(scope="module")
def rested(every_second, train, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("rested") / "run"
    return run_dir, train(every_second, run_dir)


def test_a_resting_draft_keeps_every_bit_while_the_policy_goes_on(rested, checkpoint):
    run_dir, trace = rested
    start, *after = trace.published_drafts
    assert equal(start, after[0]) and not equal(after[0], after[1]) and equal(after[1], after[2])
    first, second, third = (checkpoint(run_dir, step) for step in (1, 2, 3))

    def same(part: str, one: dict, other: dict) -> bool:
        names = [name for name in one if name.startswith(f"['train']['{part}']")]
        assert names
        return all(one[name] == other[name] for name in names)

    for part in ("draft", "draft_optimizer"):
        assert same(part, second, third) and not same(part, first, second), part
    assert not same("policy", first, second) and not same("policy", second, third)


def test_the_lines_of_the_metrics_say_which_steps_trained_it(rested):
    _, *lines = read_metrics(rested[0])
    assert [line["draft/trained"] for line in lines] == [0.0, 1.0, 0.0]
    assert ["draft/loss" in line for line in lines] == [False, True, False]
    assert ["draft/learning_rate" in line for line in lines] == [False, True, False]
    assert all(line["policy/gradient_norm"] > 0 for line in lines)
    assert [line["policy_version"] for line in lines] == [0.0, 1.0, 2.0]


def test_the_policy_of_a_resting_step_is_that_of_the_arm_whose_draft_is_frozen(rested, finished):
    ours, theirs = read_metrics(rested[0])[1], read_metrics(finished("frozen").run_dir)[1]
    for name in ("reward/mean", "rollout/accepted_length"):
        assert ours[name] == theirs[name], name
    for name in ("policy/loss", "policy/gradient_norm", "policy/entropy"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_that_stopped_while_the_draft_rested_goes_on_as_if_it_had_not(
    every_second, rested, train, tmp_path, lines
):
    run_dir = tmp_path / "run"
    train(every_second, run_dir, stop_in_step=2)
    train(every_second, run_dir, resume=True)
    assert lines(run_dir) == lines(rested[0])
