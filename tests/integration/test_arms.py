"""Checks the three arms of one small run from end to end: off, frozen, cotrained."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

import draftco_jax as dc
from draftco_jax.config import resolve_checkpoint
from draftco_jax.config_io import to_json
from draftco_jax.drafts.eagle3.checkpoint import load_draft
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.metrics import read_metrics, read_summary
from draftco_jax.summary import _largest
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Publisher

ARMS = ("off", "frozen", "cotrained")

EVERYWHERE = {"reward/mean", "agreement/kl_k3", "policy/loss", "policy/entropy", "policy/gradient_norm"}
SPECULATIVE = {"rollout/accepted_length", "rollout/rounds", "rollout/acceptance_rate_position_2"}
WITH_A_DRAFT = {"frozen_draft/tau_prob", "frozen_draft/tv_position_2"}
TRAINED_DRAFT = {"draft/loss", "draft/tau_prob", "draft/gradient_norm", "draft/learning_rate", "draft/loss_position_2"}
PRESENT = {
    "off": EVERYWHERE,
    "frozen": EVERYWHERE | SPECULATIVE | WITH_A_DRAFT,
    "cotrained": EVERYWHERE | SPECULATIVE | WITH_A_DRAFT | TRAINED_DRAFT,
}

ALWAYS_IN_SUMMARY = {
    "pass_rate_start",
    "pass_rate_end",
    "eval_prompts",
    "generator_trainer_kl_max",
    "generator_trainer_logprob_diff_max",
    "policy_parameters",
    "wall_seconds",
}
ACCEPTED_LENGTHS = {
    "accepted_length_start",
    "accepted_length_end",
    "accepted_length_frozen_end",
    "accepted_length_untrained",
}
SPEEDS = {
    "tokens_per_second_plain",
    "tokens_per_second_speculative",
    "rollout_speedup",
    "end_to_end_speedup",
    "draft_update_overhead",
}


def equal(a, b) -> bool:
    """Whether two trees are equal bit for bit."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(leaves) == len(others) > 0
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(leaves, others, strict=True))


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_runs_to_its_report(arm, finished):
    config, run_dir, _ = finished(arm)
    metrics = read_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(config.steps + 1))
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert list((run_dir / "tensorboard").iterdir()) and list((run_dir / "plots").glob("*.png"))
    assert all(math.isfinite(value) for line in metrics for value in line.values())
    # An evaluation before the first step, every third step and at the end.
    assert [line["step"] for line in metrics if "eval/pass_rate" in line] == [0, 3, 6]


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_reports_what_it_has_and_nothing_else(arm, finished):
    every_step = read_metrics(finished(arm).run_dir)[1:]
    absent = set.union(*PRESENT.values()) - PRESENT[arm]
    for line in every_step:
        assert PRESENT[arm] <= line.keys() and not absent & line.keys()
    parts = ("generate", "score", "update", "publish")
    assert all(
        math.isclose(line["time_seconds/step"], sum(line[f"time_seconds/{part}"] for part in parts))
        for line in every_step
    )
    assert [line["policy_version"] for line in every_step] == list(range(len(every_step)))


@pytest.mark.parametrize("arm", ARMS)
def test_the_summary_agrees_with_the_metrics(arm, finished):
    config, run_dir, _ = finished(arm)
    summary, metrics = read_summary(run_dir), read_metrics(run_dir)
    wanted = (
        ALWAYS_IN_SUMMARY | (ACCEPTED_LENGTHS if arm != "off" else set()) | (SPEEDS if arm == "cotrained" else set())
    )
    assert wanted <= summary.keys() and not (ACCEPTED_LENGTHS | SPEEDS) - wanted & summary.keys()
    numbers = {name: summary[name] for name in wanted}
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in numbers.values()), numbers
    assert summary["speculation"] == arm and summary["steps"] == config.steps
    assert summary["pass_rate_start"] == metrics[0]["eval/pass_rate"]
    assert summary["pass_rate_end"] == metrics[-1]["eval/pass_rate"]
    assert summary["generator_trainer_kl_max"] == max(line["agreement/kl_k3"] for line in metrics[1:]) <= 1e-8
    largest = max(line["agreement/logprob_diff_max"] for line in metrics[1:])
    assert summary["generator_trainer_logprob_diff_max"] == largest <= 1e-4
    assert 0 <= summary["pass_rate_start"] <= 1 and summary["eval_prompts"] == 16


def test_the_summary_of_a_draft_is_consistent(finished):
    _, run_dir, _ = finished("cotrained")
    summary, metrics = read_summary(run_dir), read_metrics(run_dir)
    assert summary["accepted_length_start"] == metrics[0]["eval/accepted_length"]
    assert summary["accepted_length_end"] == metrics[-1]["eval/accepted_length"]
    # Two drafted tokens and one more a round; drawn weights are worth next to nothing.
    assert 1 <= summary["accepted_length_untrained"] < 1.5 < summary["accepted_length_end"] <= 3
    assert summary["draft_length"] == 2 and summary["draft_parameters"] < summary["policy_parameters"]
    table = summary["speed"]["table"]
    assert [(row["batch"], row["draft_length"]) for row in table] == [(1, 0), (1, 1)]
    # One repetition, so that the median of the ratios is the ratio of the medians.
    plain, speculative = summary["tokens_per_second_plain"], summary["tokens_per_second_speculative"]
    assert plain > 0 and math.isclose(summary["rollout_speedup"], speculative / plain)
    assert summary["rollout_speedup_draft_length"] == 1
    assert summary["end_to_end_speedup"] > 0 and summary["draft_update_overhead"] > -1
    assert "Batch 1" in summary["speed"]["limits"]


def test_a_disagreement_that_is_not_a_number_is_not_hidden_by_a_larger_one():
    lines = [{"kl": 1.0}, {"kl": math.nan}, {"kl": 0.5}]
    assert math.isnan(_largest(lines, "kl")) and _largest(lines[::2], "kl") == 1.0


def test_a_frozen_draft_ends_with_the_accepted_length_of_its_twin(finished):
    summary = read_summary(finished("frozen").run_dir)
    assert summary["accepted_length_end"] == summary["accepted_length_frozen_end"]


def test_a_frozen_draft_stays_the_checkpoint_bit_for_bit(finished, set_up):
    config, _, trace = finished("frozen")
    _, graph, draft = load_draft(resolve_checkpoint(config.draft_checkpoint), training=config.draft)
    run, models = set_up(config)
    assert equal(run.kept.draft, draft)
    assert len(trace.published_drafts) >= config.steps + 1
    published = Publisher(models.policy_graph, graph).publish(models.policy, draft, PolicyVersion(0)).draft
    assert all(equal(one, published) for one in trace.published_drafts)


def test_a_cotrained_draft_moves(finished):
    drafts = finished("cotrained").trace.published_drafts
    assert not equal(drafts[0], drafts[6])


def test_a_run_leaves_its_cotrained_draft_in_the_published_layout_and_no_other(finished, set_up):
    config, run_dir, trace = finished("cotrained")
    cfg, graph, draft = load_draft(run_dir / "draft", training=config.draft)
    models = set_up(config)[1]
    published = Publisher(models.policy_graph, graph).publish(models.policy, draft, PolicyVersion(0)).draft
    assert cfg == config.draft and equal(published, trace.published_drafts[-1])
    assert not any((finished(arm).run_dir / "draft").exists() for arm in ("off", "frozen"))


def test_frozen_and_cotrained_start_from_the_same_rollouts(finished):
    frozen, cotrained = finished("frozen").trace, finished("cotrained").trace
    assert equal(frozen.rollouts[1], cotrained.rollouts[1])
    assert not equal(frozen.rollouts[2], frozen.rollouts[1])


@pytest.mark.parametrize("arm", ARMS)
def test_every_prompt_is_trained_once(arm, finished):
    config, _, trace = finished(arm)
    ids = [id for step in range(1, config.steps + 1) for id in trace.prompt_ids[step]]
    assert ids == list(range(config.steps * config.rollout.prompts_per_step))


def test_a_finished_run_is_left_as_it_is(finished, tree, monkeypatch):
    config, run_dir, _ = finished("cotrained")
    before = tree(run_dir)
    monkeypatch.setattr("draftco_jax.loop.set_up", None)  # nothing is set up for it
    assert dc.train(config, run_dir, resume=True) == read_summary(run_dir)
    assert tree(run_dir) == before


def test_the_python_interface_makes_the_same_config_as_the_command(small, config_file):
    config = dc.load_config(config_file)
    assert isinstance(config, dc.RunConfig)
    draft = Eagle3Config.for_target(
        config.policy, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, passes=2
    )
    replaced = dataclasses.replace(config, draft=draft)
    assert to_json(replaced) == to_json(dc.load_config(config_file, ["draft.passes=2"]))
    with pytest.raises(ValueError, match="hidden_size"):
        dataclasses.replace(config, draft=dataclasses.replace(draft, hidden_size=64))
