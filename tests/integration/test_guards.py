"""Checks what stops a run, or does not, when something unusual happens in it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from draftco_jax.errors import UserError
from draftco_jax.loop import check_finite, check_metrics
from draftco_jax.speed import _row
from draftco_jax.types import Rollouts, StepReport


@pytest.mark.parametrize("part", ["policy", "draft"])
def test_a_model_that_is_not_finite_stops_the_run_before_it_is_saved(part):
    fine = {"policy/gradient_norm": 0.0}
    check_finite(StepReport(3, fine))
    for norm in (math.nan, math.inf):
        with pytest.raises(UserError, match=f"step 3: {part}/gradient_norm=.* must be finite.* lower {part}_optimizer"):
            check_finite(StepReport(3, fine | {f"{part}/gradient_norm": norm}))


@pytest.mark.parametrize(("steps", "lacking"), [([0, 1, 2], None), ([0, 2], 1), ([2], 0), ([0, 1], 2)])
def test_a_resume_needs_the_lines_of_all_steps_before_it(tmp_path, steps, lacking):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    if lacking is None:
        check_metrics(tmp_path, 2)
    else:
        with pytest.raises(UserError, match=f"lacks step {lacking}, but the checkpoint is of step 2"):
            check_metrics(tmp_path, 2)


def test_a_call_without_a_verify_round_has_no_accepted_length_and_no_round_time():
    one = np.ones(1, np.int32)
    rollouts = Rollouts(
        tokens=np.zeros((1, 4), np.int32),
        prompt_lengths=2 * one,
        lengths=3 * one,
        logprobs=np.zeros((1, 4), np.float32),
        finished=one.astype(bool),
        rounds=0 * one,
        committed=0 * one,
        accepted=np.zeros((1, 2), np.int32),
        proposed=0 * one,
    )
    row = _row(2, [[rollouts]], [100.0], [0.01])
    assert row["accepted_length"] is None and row["round_milliseconds"] is None
    assert row["tokens_per_second"] == 100.0


def test_a_run_of_one_token_answers_ends_with_a_report(train, small, tmp_path):
    cfg = small("rollout.max_new_tokens=1", "steps=1", "policy_optimizer.warmup_steps=0")
    cfg = dataclasses.replace(cfg, speed=dataclasses.replace(cfg.speed, repetitions=1, draft_lengths=(1,)))
    train(cfg, tmp_path / "run", to_the_report=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["speed"]["limits"].startswith("No request had a verify round")
    assert (tmp_path / "run" / "report.html").is_file()
