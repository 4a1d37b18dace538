"""A small run in bfloat16 with stacked layers: it goes to its end, tells its mismatch, resumes to the same bits."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import draftco_jax as dc
from draftco_jax.checkpoint import Checkpointer
from draftco_jax.convert import convert
from draftco_jax.metrics import read_metrics
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.run import start_or_resume

LOW = (
    "steps=4",
    "checkpoint.every_steps=2",
    "evaluation.every_steps=0",
    "policy_compute.dtype=bfloat16",
    "policy_compute.parameter_dtype=bfloat16",
    "policy_compute.scan_layers=true",
    "policy_compute.remat=attention",
    "draft_compute.dtype=bfloat16",
    "draft_compute.parameter_dtype=bfloat16",
)


@pytest.fixture(scope="module")
def config(small_options) -> dc.RunConfig:
    _, file, *overrides = small_options(*LOW)
    return dc.load_config(file, [value for value in overrides if value != "--set"])


def test_a_bfloat16_run_ends_tells_its_mismatch_and_resumes_bit_for_bit(config, train, set_up, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config, whole, to_the_report=True)
    lines = read_metrics(whole)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    # Generator and trainer round differently; a float32 run is at 1e-5 here, a broken cache or mask above 1.
    gaps = [line["agreement/logprob_diff_max"] for line in lines[1:]]
    assert 1e-4 < max(gaps) < 0.3 and max(line["agreement/kl_k3"] for line in lines[1:]) < 5e-3

    train(config, stopped, stop_in_step=3)  # after the checkpoint of step 2
    train(config, stopped, resume=True)
    run, models = set_up(config)
    states = []
    for path in (whole, stopped):
        with Checkpointer(path, keep=2) as checkpoints:
            states.append(start_or_resume(run, models, checkpoints, True))
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(state)] for state in states]
    for one, other in zip(*leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    policy = states[0].policy
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(policy)} == {"bfloat16"} and "runs" in policy
    # What the optimizer steps on is float32, and the parameters are its rounding.
    masters = jax.tree.leaves(states[0].policy_optimizer.master)
    for master, leaf in zip(masters, jax.tree.leaves(policy), strict=True):
        assert master.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(master.astype(leaf.dtype)), np.asarray(leaf))

    convert(whole, tmp_path / "out")
    cfg, exported = load_policy(tmp_path / "out" / "policy", compute=config.policy_compute)
    assert cfg == config.policy
    jax.tree.map(np.testing.assert_array_equal, exported, policy)
