"""Checks that a run holds its state once: updates take the memory of the state before, and nothing else is kept."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import draftco_jax as dc
from draftco_jax import loop
from draftco_jax.training.update import make_update

SETTINGS = ("steps=4", "evaluation.every_steps=2", "algorithm.kl_coefficient=0.1")
SMALL_ARRAYS = 1024
"""Bytes of keys and what else is not a model; the smallest array of one has as many."""


class Interrupted(Exception):
    """Stands for whatever stops a run in the middle of a step."""


class Step(NamedTuple):
    """What was there after a step."""

    number: int
    given_up: set[bool]
    """Whether each array of the models and optimizers before was."""
    known: int
    """Bytes of state, published weights and what a run keeps of its starting weights."""
    alive: int
    """Bytes of all arrays of the run."""


def size(*trees: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(trees))


def alive() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def watch(set_up) -> Callable[..., list[Step]]:
    """`draftco_jax.train` without its report, and what each step left in memory."""

    def run(
        cfg: dc.RunConfig, run_dir: Path, *, resume: bool = False, stop_in_step: int = 0, donate: bool = True
    ) -> list[Step]:
        before, steps = alive(), []
        step_of_loop, save_line = loop.train_step, loop.MetricsWriter.write

        def set_up_so(cfg):
            run, models = set_up(cfg)
            return (run if donate else dataclasses.replace(run, update=make_update(run.spec, run.optimizers))), models

        def train_step(run, state, weights, step):
            if step == stop_in_step:
                raise Interrupted
            done = step_of_loop(run, state, weights, step)
            given_up = {leaf.is_deleted() for leaf in jax.tree.leaves(state._replace(step=None))}
            published = (done[1].policy, done[1].draft)
            steps.append(Step(step, given_up, size(done[0], published, run.kept.reference, run.kept.draft), 0))
            return done

        def write(writer, report):
            save_line(writer, report)
            if report.step:  # here the loop has let go of the state and the weights before
                steps[-1] = steps[-1]._replace(alive=alive() - before)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "set_up", set_up_so)
            patch.setattr(loop, "train_step", train_step)
            patch.setattr(loop.MetricsWriter, "write", write)
            patch.setattr(loop, "summarise_run", lambda *_: {})
            patch.setattr(loop, "write_report", lambda _: None)
            dc.train(cfg, run_dir, resume=resume)
        return steps

    return run


def check(steps: list[Step]) -> None:
    """On a CPU an array that numpy has a view of, as after a save, is copied instead of given up: saves are of even
    steps, so that these are the ones to look at."""
    for step in steps:
        assert step.given_up == {True} or step.number % 2
        assert step.known <= step.alive < step.known + SMALL_ARRAYS


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["cotrained", "frozen", "off"])
def test_a_run_holds_its_state_once_and_is_bit_for_bit_the_one_that_holds_it_twice(
    arm, small, watch, lines, checkpoint, tmp_path
):
    once, twice, stopped = (tmp_path / name for name in ("once", "twice", "stopped"))
    cfg = small(*SETTINGS, f"speculation={arm}")
    steps = watch(cfg, once)
    assert len(steps) == 4
    check(steps)
    assert all(step.given_up == {False} for step in watch(cfg, twice, donate=False))
    with pytest.raises(Interrupted):
        watch(cfg, stopped, stop_in_step=4)
    steps = watch(cfg, stopped, resume=True)
    assert len(steps) == 2
    check(steps)
    assert lines(once) == lines(twice) == lines(stopped)
    assert checkpoint(once, 4) == checkpoint(twice, 4) == checkpoint(stopped, 4)
