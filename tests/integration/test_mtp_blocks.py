"""A prediction head of gated attention and experts: pre-trained, co-trained in a run, exported, read back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import draftco_jax as dc
from draftco_jax.config import CheckpointConfig, EvaluationConfig
from draftco_jax.convert import convert
from draftco_jax.drafts.base import sizes_from
from draftco_jax.drafts.mtp.checkpoint import load_mtp
from draftco_jax.drafts.mtp.config import MtpConfig, one_layer_of
from draftco_jax.environments.arithmetic import ArithmeticConfig
from draftco_jax.metrics import read_metrics
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.pretrain import pretrain
from draftco_jax.pretrain_config import OwnRolloutsConfig, PretrainConfig
from draftco_jax.training.optimizer import OptimizerConfig

POLICY = Qwen3Config.tiny(hidden_size=96, intermediate_size=256)  # the shipped one of 2 digits
LAYER = replace(one_layer_of(Qwen35MoeConfig.tiny()), **sizes_from(POLICY))
HEAD = MtpConfig.for_target(POLICY, layer=LAYER, steps=2)
# Between the accepted lengths of a trained draft and its untrained twin; 0.06 is the sampling error of 32 prompts.
LEARNT = 0.2  # measured 0.9


@pytest.mark.slow
def test_a_head_of_experts_learns_before_a_run_and_in_it_and_is_exported(small, tmp_path):
    config = PretrainConfig(
        steps=24,
        task=ArithmeticConfig(digits=2),
        policy=POLICY,
        policy_checkpoint="shipped:arithmetic2/policy",
        draft=HEAD,
        draft_length=2,
        rollout=OwnRolloutsConfig(sequences=64, samples_per_prompt=2, sequences_per_call=32),
        batch_rows=16,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        evaluation=EvaluationConfig(prompts=32, every_steps=12),
        checkpoint=CheckpointConfig(every_steps=24),
    )
    summary = pretrain(config, tmp_path / "head")
    start, end = (summary["accepted_length"][when] for when in ("start", "end"))
    assert end > start + LEARNT, (start, end)
    base = small("steps=2", "checkpoint.every_steps=0", "evaluation.every_steps=0")
    assert base.policy == POLICY
    dc.train(replace(base, draft=HEAD, draft_checkpoint=str(tmp_path / "head" / "draft")), tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["rollout/accepted_length"] > start + LEARNT for line in lines[1:])
    convert(tmp_path / "run", tmp_path / "out")
    assert load_mtp(tmp_path / "out" / "draft", HEAD)[0] == HEAD
