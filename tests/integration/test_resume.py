"""Checks that a run that was stopped and resumed is the run that was not: killed processes, interruptions, damage."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from draftco_jax import loop
from draftco_jax.checkpoint import Checkpointer
from draftco_jax.errors import UserError
from draftco_jax.run import resume_data, start_or_resume
from draftco_jax.starting_weights import load_models

# Long enough that a kill finds the run in the middle, whatever else the machine is doing.
KILL_OVERRIDES = ("steps=24", "checkpoint.every_steps=8", "evaluation.every_steps=5")
KILL_SECONDS = 240


@pytest.fixture
def start(small_options, environment, tmp_path):
    """Starts `draftco train` as a process."""
    started = []

    def process(run_dir: Path, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "draftco_jax.cli", "train", *small_options(*KILL_OVERRIDES)]
        with (tmp_path / f"{run_dir.name}.log").open("ab") as log:
            started.append(
                subprocess.Popen([*command, "--run-dir", str(run_dir), *more], env=environment, stdout=log, stderr=log)
            )
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.wait()


def kill_after(process: subprocess.Popen, run_dir: Path, step: int) -> None:
    """Kill -9 as soon as the step is in the metrics."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + KILL_SECONDS
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") <= step:  # one line is that of step 0
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        assert time.monotonic() < deadline, f"step {step} has not come"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_kill_9_and_resume_twice_equals_a_run_that_was_not_killed(start, lines, checkpoint, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    kill_after(start(killed), killed, 10)
    assert lines(killed)[-1]["step"] >= 10 and not (killed / "summary.json").exists()
    kill_after(start(killed, "--resume"), killed, 18)
    assert start(killed, "--resume").wait() == 0
    assert [line["step"] for line in lines(killed)] == list(range(25))
    assert lines(killed) == lines(whole)
    assert checkpoint(killed, 24) == checkpoint(whole, 24)
    assert (killed / "report.html").is_file()


@pytest.mark.parametrize(
    "arm", ["cotrained", *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("off", "frozen"))]
)
def test_bug_case_b104_interrupted_and_resumed_again_and_again(arm, finished, train, lines, checkpoint, tmp_path):
    config, whole, _ = finished(arm)
    run_dir = tmp_path / "run"
    train(config, run_dir, stop_in_step=1)  # before there is any checkpoint
    for stop in (3, 5, 0):
        train(config, run_dir, resume=True, stop_in_step=stop)
    assert lines(run_dir) == lines(whole)
    assert checkpoint(run_dir, 6) == checkpoint(whole, 6)


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_bug_case_b102_every_prompt_is_trained_once(stop, finished, train, tmp_path):
    config, run_dir = finished("off").config, tmp_path / "run"
    train(config, run_dir, stop_in_step=stop)
    resumed = train(config, run_dir, resume=True)
    kept = 2 * ((stop - 1) // 2)  # steps up to the last checkpoint
    assert list(resumed.prompt_ids) == list(range(kept + 1, 7))
    assert sum(resumed.prompt_ids.values(), []) == list(range(4 * kept, 24))


def test_a_run_stopped_between_its_last_step_and_its_report_only_reports(unfinished_copy, finished, train, lines):
    run_dir = unfinished_copy("cotrained")
    config, whole, _ = finished("cotrained")
    trace = train(config, run_dir, resume=True)
    assert list(trace.prompt_ids) == [6]  # the batch that the closing measurements are made with
    assert lines(run_dir) == lines(whole)
    assert (run_dir / "summary.json").is_file()


def test_a_report_of_the_unfinished_run_does_not_make_it_a_finished_one(unfinished_copy, finished, train):
    run_dir = unfinished_copy("off")
    shutil.rmtree(run_dir / "checkpoints" / "6")
    (run_dir / "report.html").write_text("made half-way")
    assert list(train(finished("off").config, run_dir, resume=True).prompt_ids) == [5, 6]
    assert not (run_dir / "report.html").exists()  # until the new one is written


def test_a_damaged_newest_checkpoint_is_refused_and_the_one_before_it_continues(
    unfinished_copy, finished, train, lines, checkpoint
):
    run_dir = unfinished_copy("cotrained")
    config, whole, _ = finished("cotrained")
    (run_dir / "checkpoints" / "6" / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(UserError, match="checkpoints/6 is damaged .*delete that folder to resume from step 4"):
        train(config, run_dir, resume=True)
    shutil.rmtree(run_dir / "checkpoints" / "6")
    assert list(train(config, run_dir, resume=True).prompt_ids) == [5, 6]
    assert lines(run_dir) == lines(whole)
    assert checkpoint(run_dir, 6) == checkpoint(whole, 6)


def test_bug_case_b68_a_half_written_newest_checkpoint_is_not_a_candidate(
    unfinished_copy, finished, train, lines, checkpoint
):
    run_dir = unfinished_copy("cotrained")
    config, whole, _ = finished("cotrained")
    (run_dir / "checkpoints" / "6" / "commit_success.txt").unlink()
    assert list(train(config, run_dir, resume=True).prompt_ids) == [5, 6]
    assert lines(run_dir) == lines(whole)
    assert checkpoint(run_dir, 6) == checkpoint(whole, 6)


def test_bug_case_b69_losses_after_a_restore_are_those_before_the_save(finished, set_up, tmp_path):
    config, run_dir, _ = finished("cotrained")

    def losses(run, state):
        batch = loop.make_batch(run, loop.publish(run, state), next(run.prompts), 7)
        return jax.device_get(run.update(state, batch, np.float32(1.0), None, run.kept.draft)[1])

    (run, models), (fresh, others) = set_up(config), set_up(config)
    with Checkpointer(run_dir, 2) as saved, Checkpointer(tmp_path, 2) as again:
        state = start_or_resume(run, models, saved, resume=True)
        again.save(state, run.key, resume_data(run))
        assert int(state.step) == 6
        before = losses(run, state)
        after = losses(fresh, start_or_resume(fresh, others, again, resume=True))
        untrained = losses(set_up(config)[0], start_or_resume(fresh, others, again, resume=False))
    assert before == after
    assert before["policy/loss"] != untrained["policy/loss"] and before["draft/loss"] != untrained["draft/loss"]


def test_another_starting_draft_is_refused(unfinished_copy, finished, set_up, monkeypatch):
    config, run_dir = finished("frozen").config, unfinished_copy("frozen")

    def changed(cfg, key):
        models = load_models(cfg, key)
        models.draft["norm"]["weight"] *= 1.0001
        return models

    monkeypatch.setattr("draftco_jax.run.load_models", changed)
    run, models = set_up(config)
    with Checkpointer(run_dir, 2) as checkpoints, pytest.raises(UserError, match="draft_checkpoint=.*no longer holds"):
        start_or_resume(run, models, checkpoints, resume=True)
