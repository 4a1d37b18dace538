"""A run whose sequences go through fewer slots than there are sequences."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from draftco_jax import loop
from draftco_jax.decoding.speculation_control import Bandit, CostModel
from draftco_jax.errors import UserError
from draftco_jax.rollout.speculation import COSTS_FILE


def test_a_step_in_slots_has_the_rollouts_of_a_step_at_once(small, set_up):
    """16 sequences in 5 slots: same keys, same texts; log-probs to the rounding of attention over pages."""

    def step(*overrides: str):
        run, models = set_up(small(*overrides))
        weights = loop.publish(run, run.layout.start(models.policy, models.draft, run.optimizers, run.spec))
        return loop.generate(run, weights, next(run.prompts), 1)[0]

    at_once, in_slots = step(), step("rollout.slots=5")
    for name in ("tokens", "lengths", "finished", "committed", "rounds", "accepted"):
        assert np.array_equal(getattr(in_slots, name), getattr(at_once, name)), name
    np.testing.assert_allclose(in_slots.logprobs, at_once.logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_run_with_a_rule_that_is_stopped_and_resumed_is_the_run_that_was_not(small, train, lines, tmp_path):
    """Draft lengths follow from the cost table, chance by a key and what was learnt, all of them kept with the run."""
    config = small("steps=4", "evaluation.every_steps=0")
    rule = Bandit(lengths=(0, 2), epsilon=0.5)
    config = replace(config, rollout=replace(config.rollout, slots=5, rule=rule))
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(config, parted, stop_in_step=4)
    costs = (parted / COSTS_FILE).read_text()
    (parted / COSTS_FILE).unlink()
    with pytest.raises(
        UserError, match="lacks cost_table.json, by which it chose its draft lengths; put the file back"
    ):
        train(config, parted, resume=True)
    (parted / COSTS_FILE).write_text(costs)
    train(config, whole, stop_in_step=1)  # measured for itself; from here on it has the other's costs
    assert (whole / COSTS_FILE).read_text() != costs
    (whole / COSTS_FILE).write_text(costs)
    for run_dir in (parted, whole):
        train(config, run_dir, resume=True)
    assert lines(parted) == lines(whole)
    for line in lines(whole)[1:]:
        assert 0 < line["rollout/plain_rounds_fraction"] < 1 and line["rollout/speculation_gain"] > 0
        assert line["rollout/draft_length_mean"] == pytest.approx(2 * (1 - line["rollout/plain_rounds_fraction"]))
    table = json.loads(costs)
    assert table["rows"] == [5] and table["lengths"] == [0, 2] and min(table["seconds"][0]) > 0


def test_a_rule_that_does_not_fit_the_run_is_refused(small):
    config = small()
    rule = CostModel(lengths=(0, 2))
    with pytest.raises(ValueError, match="slots=none must be a number where rule"):
        replace(config.rollout, rule=rule)
    in_slots = replace(config.rollout, slots=4, rule=rule)
    with pytest.raises(ValueError, match=r"rollout.rule.lengths=\(0, 2\) must end with draft_length=4"):
        replace(config, rollout=in_slots, draft_length=4)
    with pytest.raises(ValueError, match="rollout.rule must be none with speculation=off"):
        replace(config, rollout=in_slots, speculation="off")
