"""A short run of each policy family with a co-trained draft: rollouts, update, publish, checkpoint, export."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

import draftco_jax as dc
from draftco_jax.convert import convert
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.metrics import read_metrics
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.models.llama import LlamaConfig
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig

POLICIES = {
    "llama": LlamaConfig.tiny(),
    # Two layers are enough of one kind: compiling is what this test waits for.
    "qwen3_moe": dataclasses.replace(Qwen3MoeConfig.tiny(), num_hidden_layers=2),
    "qwen3_5_moe": Qwen35MoeConfig.tiny(),
    "nemotron_h": NemotronHConfig.tiny(),
    "gpt_oss": GptOssConfig.tiny(),
}


# The others differ in what tests/golden and test_hybrid_rollouts.py hold of them every day.
LONG = ("llama", "qwen3_5_moe", "gpt_oss", "nemotron_h")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in POLICIES]
)
def test_a_family_trains_with_its_draft(family, small_options, tmp_path):
    # The parts of a verify round are timed at the end of a run: recurrent layers take calls of one length only.
    timed = ("speed.repetitions=1", "speed.draft_lengths=2") if family == "nemotron_h" else ()
    _, file, *overrides = small_options("steps=2", "checkpoint.every_steps=0", "evaluation.every_steps=0", *timed)
    base = dc.load_config(file, [value for value in overrides if value != "--set"])
    policy = POLICIES[family]
    config = dataclasses.replace(
        base,
        policy=policy,
        policy_checkpoint=None,
        policy_compute=ComputeConfig(scan_layers=True, remat="block"),
        policy_optimizer=dataclasses.replace(base.policy_optimizer, learning_rate=1e-2, weight_decay=0.01),
        draft=Eagle3Config.for_target(policy, passes=2),
        draft_checkpoint=None,
        # What only mixtures have is switched on for all: others have nothing to record, and any draft can be budgeted.
        rollout=dataclasses.replace(base.rollout, record_experts=policy.mixture is not None),
        verify_budget=24,
    )
    dc.train(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert len(lines) == 3 and all(math.isfinite(value) for line in lines for value in line.values())
    # Generator and trainer are one function: caches, rollback and packing leave rounding, whatever the mixer.
    assert max(line["agreement/logprob_diff_max"] for line in lines[1:]) < 1e-4
    assert all(line["rollout/accepted_length"] >= 1 for line in lines[1:])
    if policy.mixture is not None:
        # At one set of weights both choose alike, but for a tie of float32.
        assert all(line["experts/replay_changed_fraction"] < 1e-3 for line in lines[1:])
        assert all(1 <= line["rollout/experts_touched_per_forward"] <= 4 for line in lines[1:])
    convert(tmp_path / "run", tmp_path / "out")
    cfg, params = load_policy(tmp_path / "out" / "policy")
    assert cfg == policy and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
