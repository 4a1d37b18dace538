"""Tests of the progress display."""

import io

from rich.console import Console

from draftco_jax.metrics import Progress

METRICS = {"reward/mean": 0.5, "rollout/accepted_length": 3.25, "rollout/tokens_per_second": 12345.6}


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self):
        return self.now


def run(*, terminal, steps, seconds_per_step, width=100):
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=terminal, width=width)
    with Progress(steps, console=console, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds_per_step
            progress.update(step, METRICS | ({"eval/pass_rate": 0.75} if step == 1 else {}))
    return file.getvalue()


def test_elsewhere_one_plain_line_about_every_ten_seconds():
    lines = run(terminal=False, steps=100, seconds_per_step=1.0).splitlines()
    assert len(lines) == 11
    assert lines[0] == "train 1/100  reward 0.50  pass 0.75  accepted 3.25  tokens/s 12,346"
    assert lines[1] == "train 11/100  1:29 left  reward 0.50  pass 0.75  accepted 3.25  tokens/s 12,346"
    assert lines[-1].startswith("train 100/100  0:00 left")


def test_elsewhere_the_first_and_the_last_step_are_always_said():
    assert [line.split()[1] for line in run(terminal=False, steps=50, seconds_per_step=0.01).splitlines()] == [
        "1/50",
        "50/50",
    ]


def test_a_terminal_gets_a_bar_with_all_values():
    shown = run(terminal=True, steps=3, seconds_per_step=1.0)
    for text in ("train", "3/3", "reward 0.50", "pass 0.75", "accepted 3.25", "tokens/s 12,346"):
        assert text in shown


def test_values_that_a_run_does_not_have_are_left_out():
    file = io.StringIO()
    with Progress(1, console=Console(file=file, force_terminal=False)) as progress:
        progress.update(1, {"reward/mean": 1.0})
    assert file.getvalue() == "train 1/1  reward 1.00\n"


def test_values_keep_their_places_whichever_comes_first():
    file = io.StringIO()
    with Progress(2, console=Console(file=file, force_terminal=False), clock=Clock()) as progress:
        progress.update(1, {"rollout/tokens_per_second": 10.0})
        progress.update(2, {"eval/pass_rate": 0.5})
    assert file.getvalue().splitlines()[1] == "train 2/2  0:00 left  pass 0.50  tokens/s 10"


def test_each_stage_is_said():
    file = io.StringIO()
    with Progress(2, console=Console(file=file, force_terminal=False), clock=Clock()) as progress:
        progress.stage("compiling")
        progress.update(1, {})
        progress.stage("timing [k=4]")
    assert file.getvalue() == "train: compiling\ntrain 1/2\ntrain: timing [k=4]\n"
