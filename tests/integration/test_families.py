"""Small runs with a draft of each family: to the end, with its metrics, resumable."""

from __future__ import annotations

import dataclasses
import json

import pytest

import draftco_jax as dc
from draftco_jax import loop
from draftco_jax.drafts.catalog import FAMILIES, family_of
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.metrics import Progress, read_metrics, read_summary
from draftco_jax.models.token_tree import TreeConfig
from draftco_jax.training.mesh_config import MeshConfig
from draftco_jax.types import StepReport


def draft_of(name: str, policy) -> dc.RunConfig:
    narrow = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    block = narrow | {"mask_token_id": 31, "num_hidden_layers": 1, "block_size": 3}
    return {
        "dflash": lambda: DFlashConfig.for_target(policy, **block),
        "dspark": lambda: DSparkConfig.for_target(policy, **block, markov_rank=4),
        "mtp": lambda: MtpConfig.for_target(policy, **narrow, steps=2),
        "ngram": lambda: NGramConfig(min_match=1),
        "suffix": lambda: SuffixConfig(history_tokens=256, max_match=4),
        "self_int8": SelfInt8Config,
    }[name]()


@pytest.fixture(scope="module")
def config(small):
    """A two-step run with a fresh draft of this family."""

    def make(name: str) -> dc.RunConfig:
        base = small("steps=2", "checkpoint.every_steps=1", "draft_length=2", "evaluation.every_steps=0")
        draft = draft_of(name, base.policy)
        speculation = "cotrained" if family_of(draft).trained else "frozen"
        return dataclasses.replace(base, draft=draft, draft_checkpoint=None, speculation=speculation)

    return make


@pytest.mark.parametrize(
    "name",
    [
        "dflash",
        "ngram",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dspark", "mtp", "suffix", "self_int8")),
    ],
)
def test_a_run_of_every_family_ends_with_its_report_and_resumes(name, config, train, lines, tmp_path):
    cfg, whole, stopped = config(name), tmp_path / "whole", tmp_path / "stopped"
    train(cfg, whole, to_the_report=True)
    summary, last = read_summary(whole), read_metrics(whole)[-1]
    assert (whole / "report.html").is_file()
    trained = FAMILIES[name].trained
    assert summary["accepted_length_end"] >= 1
    for of_weights in ("accepted_length_untrained", "accepted_length_frozen_end"):
        assert (of_weights in summary) == trained, "what nothing trains has no other weights to compare with"
    assert ("draft/loss" in last) == trained and ("frozen_draft/tau_prob" in last) == trained
    assert last["rollout/proposed_per_round"] <= 2
    if trained:
        assert last["draft/gradient_norm"] > 0
    if name == "dspark":
        assert last["draft/confidence_loss"] > 0
    train(cfg, stopped, stop_in_step=2)
    train(cfg, stopped, resume=True)
    assert lines(stopped) == lines(whole)


def test_the_suffix_draft_remembers_the_rollouts_of_earlier_steps(config, train, tmp_path):
    cfg = config("suffix")
    train(cfg, tmp_path / "with")
    forgetful = dataclasses.replace(cfg, draft=dataclasses.replace(cfg.draft, history_tokens=0, use_siblings=False))
    train(forgetful, tmp_path / "without")
    accepted = [read_metrics(tmp_path / name)[-1]["rollout/accepted_length"] for name in ("with", "without")]
    assert accepted[0] > accepted[1] + 0.1


def test_a_draft_without_weights_is_not_cotrained_and_the_previous_text_not_trained_with(config):
    for name in ("ngram", "self_int8"):
        with pytest.raises(ValueError, match=f"speculation=cotrained needs .* weights to train, but draft is {name}"):
            dataclasses.replace(config(name), speculation="cotrained")
    policy = config("ngram").policy
    with pytest.raises(ValueError, match="must not be trained with"):
        dataclasses.replace(config("ngram"), draft=PreviousConfig(policy=policy, history_tokens=64))
    spread = {"mesh": MeshConfig(tensor=2), "rollout": dataclasses.replace(config("ngram").rollout, devices="mesh")}
    with pytest.raises(ValueError, match="mesh.tensor=2 must be 1 with rollout.devices=mesh and draft=SelfInt8Config"):
        dataclasses.replace(config("self_int8"), **spread)
    with pytest.raises(ValueError, match="draft_length=3 must be <= 2"):
        dataclasses.replace(config("dflash"), draft_length=3)


def test_bug_case_b110_a_useless_draft_sets_the_alarm_and_is_told_once(config, train, tmp_path, capsys):
    train(config("mtp"), tmp_path / "run")  # random weights
    steps = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]
    assert all(line["rollout/accepted_length"] < 1.1 and line["rollout/speculation_alarm"] == 1 for line in steps)
    said = capsys.readouterr().out
    assert said.count("drafting no longer pays") == 1
    with Progress(1) as progress:
        assert not loop.sound_alarm(StepReport(1, {"rollout/speculation_alarm": 0.0}), progress)


def test_saved_configs_name_their_family(config):
    from draftco_jax.config import config_registry
    from draftco_jax.config_io import from_json, to_json

    for name in ("dflash", "dspark", "mtp", "ngram", "suffix", "self_int8"):
        cfg = config(name)
        assert from_json(dc.RunConfig, json.loads(json.dumps(to_json(cfg))), config_registry()) == cfg


@pytest.mark.slow
def test_a_run_with_token_trees_ends_with_its_report_and_has_one_law_with_the_trainer(small, train, tmp_path):
    base = small("steps=2", "evaluation.every_steps=0", "speed.repetitions=1", "speed.draft_lengths=1,2")
    cfg = dataclasses.replace(base, verification="tree", tree=TreeConfig(widths=(2, 2)))
    train(cfg, tmp_path / "run", to_the_report=True)
    assert (tmp_path / "run" / "report.html").is_file()
    for line in read_metrics(tmp_path / "run")[1:]:
        assert 1 < line["rollout/accepted_length"] <= 3
        assert line["rollout/proposed_per_round"] == 6  # 2 after the root, 2 after each
        assert line["agreement/kl_k3"] < 1e-9
    summary = read_summary(tmp_path / "run")
    assert "of a tree" in summary["speed"]["limits"]
