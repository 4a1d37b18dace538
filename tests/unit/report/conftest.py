"""Runs that never were, with numbers of a believable shape."""

import json
import math

import numpy as np
import pytest

from draftco_jax.metrics import MetricsWriter, write_summary
from draftco_jax.types import StepReport

K = 4
PASSES = 3


def draft_metrics(progress, noise, speculation):
    """Metrics of the arms with a draft; ``progress`` runs from 0 to 1."""
    metrics = {"rollout/rounds": 900.0, "rollout/accepted_length_papers": 3.4 + 0.5 * progress}
    metrics["rollout/accepted_length"] = 3.3 + 0.5 * progress + 0.1 * noise[0]
    for position in range(1, K + 1):
        rate = (0.8 + 0.1 * progress) ** position + 0.01 * noise[position]
        metrics[f"rollout/acceptance_rate_position_{position}"] = min(1.0, rate)
    metrics["frozen_draft/tau_prob"] = 3.3 + 0.35 * progress + 0.03 * noise[5] * min(1.0, 20 * progress)
    for number in range(1, PASSES + 1):
        metrics[f"frozen_draft/tv_position_{number}"] = 0.2 + 0.02 * number - 0.05 * progress
    if speculation == "cotrained":
        metrics["draft/tau_prob"] = 3.3 + 0.52 * progress + 0.03 * noise[5] * min(1.0, 20 * progress)
        metrics |= {"draft/gradient_norm": 2.0 * math.exp(-progress + 0.2 * noise[6]), "draft/learning_rate": 1e-3}
        for number in range(1, PASSES + 1):
            metrics[f"draft/loss_position_{number}"] = 0.9 + 0.15 * number - 0.3 * progress + 0.03 * noise[7]
            metrics[f"draft/tv_position_{number}"] = 0.2 + 0.02 * number - 0.07 * progress
        metrics["draft/loss"] = 2.6 - 0.8 * progress + 0.05 * noise[7]
    return metrics


def step_metrics(step, steps, speculation, rng):
    """All metrics of one step, as the loop writes them."""
    progress, noise = (step - 1) / max(1, steps - 1), rng.normal(size=12)
    generate = 8.0 if step == 1 else 0.9 + 0.05 * abs(noise[1])
    update = 12.0 if step == 1 else 0.8 + 0.03 * abs(noise[2])
    metrics = {
        "policy_version": step,
        "reward/mean": min(1.0, 0.59 + 0.28 * progress + 0.03 * noise[3]),
        "reward/zero_variance_groups_fraction": 0.3 + 0.3 * progress,
        "rollout/tokens": 12000.0,
        "rollout/response_tokens_mean": 41.0 - 4 * progress + 0.4 * noise[4],
        "rollout/truncated_fraction": 0.01,
        "rollout/tokens_per_second": 12000.0 / generate,
        "agreement/kl_k3": max(0.0, 2e-14 * noise[8]),
        "agreement/logprob_diff_max": 2e-6 * math.exp(0.3 * noise[9]),
        "policy/loss": 0.02 * noise[10],
        "policy/entropy": 0.34 - 0.18 * progress + 0.01 * noise[11],
        "policy/clip_low_fraction": 0.001,
        "policy/clip_high_fraction": 0.002,
        "policy/gradient_norm": 0.4 * math.exp(0.3 * noise[0]),
        "policy/learning_rate": 3e-4,
        "experts/load_max": 1.6 - 0.2 * progress + 0.05 * noise[6],
        "experts/load_min": 0.4 + 0.1 * progress + 0.05 * noise[7],
        "experts/replay_changed_fraction": 1e-3 * abs(noise[8]),
        "rollout/experts_touched_per_forward": 21.0 + noise[9],
        "time_seconds/generate": generate,
        "time_seconds/score": 0.05,
        "time_seconds/update": update,
        "time_seconds/publish": 0.01,
        "time_seconds/step": generate + update + 0.1,
    }
    if step == steps or step % 15 == 0:
        metrics |= {"eval/pass_rate": round(256 * (0.59 + 0.26 * progress)) / 256, "eval/prompts": 256.0}
    if speculation != "off":
        metrics |= draft_metrics(progress, noise, speculation)
    return metrics


def summary_of(steps, speculation):
    """A summary with every key that the arm has."""
    summary = {
        "name": "demo",
        "speculation": speculation,
        "steps": steps,
        "draft_length": K if speculation != "off" else 0,
        "pass_rate_start": 151 / 256,
        "pass_rate_end": 218 / 256,
        "eval_prompts": 256,
        "generator_trainer_kl_max": 5.1e-14,
        "generator_trainer_logprob_diff_max": 4.4e-6,
        "wall_seconds": 187.3,
        "versions": {"python": "3.11.9", "jax": "0.10.2", "flax": "0.12.8"},
        "hardware": {"cpu": "A Processor", "cores": 2, "device": "cpu"},
    }
    if speculation == "off":
        return summary
    rows = [(1, 0, 900, None, 1.1), (1, 2, 1080, 2.5, 2.3), (1, 4, 1010, 3.7, 3.6)]
    rows += [(8, 0, 5600, None, 1.4), (8, 2, 5900, 2.5, 3.4), (8, 4, 5200, 3.7, 5.6), (32, 0, 14000, None, 2.3)]
    rows += [(32, 2, 11900, 2.5, 6.7), (32, 4, 9900, 3.7, 11.9)]
    names = ("batch", "draft_length", "tokens_per_second", "accepted_length", "round_milliseconds")
    table = [dict(zip(names, row, strict=True)) for row in rows]
    table = [row | {"low": 0.97 * row["tokens_per_second"], "high": 1.02 * row["tokens_per_second"]} for row in table]
    limits = "A round with k = 4 costs 3.3 plain tokens at batch 1 and commits 3.7.\n\nAt batch 32 it costs 5.2."
    return summary | {
        "accepted_length_start": 3.31,
        "accepted_length_end": 3.78,
        "accepted_length_untrained": 1.07,
        "accepted_length_frozen_end": 3.62,
        "tokens_per_second_plain": 900.0,
        "tokens_per_second_speculative": 1080.0,
        "rollout_speedup": 1.2,
        "rollout_speedup_draft_length": 2,
        "end_to_end_speedup": 1.06,
        "draft_update_overhead": 0.21,
        "speed": {"table": table, "limits": limits, "steps": {"training_batch_rollout_speedup": 0.84}},
    }


def make_fake_run(run_dir, speculation="cotrained", *, steps=60, finished=True, change=None):
    """Write a run directory; ``change`` may alter a step's metrics in place, given the step."""
    rng = np.random.default_rng(7)
    start = {"eval/pass_rate": 151 / 256, "eval/prompts": 256.0}
    if speculation != "off":
        start["eval/accepted_length"] = 3.31
    with MetricsWriter(run_dir, None) as writer:
        writer.write(StepReport(0, start))
        for step in range(1, steps + 1):
            metrics = step_metrics(step, steps, speculation, rng)
            if change is not None:
                change(step, metrics)
            writer.write(StepReport(step, metrics))
    config = {"name": "demo", "speculation": speculation, "policy": {"layers": 4, "text": "<script>&"}}
    (run_dir / "config.json").write_text(json.dumps(config))
    if finished:
        write_summary(run_dir, summary_of(steps, speculation))
    return run_dir


@pytest.fixture(scope="session")
def make_run():
    """The maker of fake runs in a given directory."""
    return make_fake_run


@pytest.fixture
def fake_run(tmp_path):
    """The maker of fake runs, bound to a directory of this test."""

    def make(speculation="cotrained", **options):
        return make_fake_run(tmp_path, speculation, **options)

    return make
