"""Checks the set-up of a run: its directory, its models, its keys, its sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from draftco_jax.config import RunConfig, load_config
from draftco_jax.config_io import to_json
from draftco_jax.errors import UserError
from draftco_jax.models.functional import initialise
from draftco_jax.models.hf_weights import load_policy, save_policy
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.run import check_directory, claim_directory, set_up
from draftco_jax.starting_weights import load_models

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "grpo_arithmetic2_eagle3_cpu.py"


def make(*overrides: str) -> RunConfig:
    return load_config(CONFIG, overrides)


@pytest.fixture(scope="module")
def made():
    return set_up(make())


@pytest.fixture(scope="module")
def run(made):
    return made[0]


@pytest.fixture(scope="module")
def models(made):
    return made[1]


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_a_new_directory_is_claimed_with_the_config(there, tmp_path):
    cfg, run_dir = make(), tmp_path / "deep" / "run"
    if there == "an empty folder":
        run_dir.mkdir(parents=True)
    check_directory(cfg, run_dir, resume=False)
    assert run_dir.exists() == (there == "an empty folder")
    claim_directory(cfg, run_dir)
    assert json.loads((run_dir / "config.json").read_text()) == to_json(cfg)
    check_directory(cfg, run_dir, resume=True)
    with pytest.raises(UserError, match="already holds this run; add --resume"):
        check_directory(cfg, run_dir, resume=False)


def test_a_claim_does_not_rewrite_the_config(tmp_path):
    claim_directory(make(), tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " ")
    before = (tmp_path / "config.json").read_bytes()
    claim_directory(make(), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_another_config_is_refused_with_what_differs(tmp_path):
    claim_directory(make(), tmp_path)
    with pytest.raises(
        UserError, match=r"another config \(policy_optimizer.learning_rate: .* -> 1.0\); choose another"
    ):
        check_directory(make("policy_optimizer.learning_rate=1"), tmp_path, resume=True)


def test_a_directory_from_before_there_were_meshes_is_one_of_one_device(tmp_path):
    claim_directory(make(), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["mesh"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    check_directory(make(), tmp_path, resume=True)
    with pytest.raises(UserError, match=r"another config \(mesh.data: 1 -> 2\)"):
        check_directory(make("mesh.data=2"), tmp_path, resume=True)


def test_a_mesh_of_more_devices_than_there_are_is_refused_with_the_way_to_have_them():
    with pytest.raises(UserError, match="data=2 x stage=2 takes 4 devices, but there .* JAX_NUM_CPU_DEVICES=4"):
        set_up(make("mesh.stage=2", "mesh.data=2"))


def test_without_checkpoints_weights_are_drawn_from_the_seed(models):
    random = make("policy_checkpoint=none", "draft_checkpoint=none")
    first, again = (load_models(random, jax.random.key(0)) for _ in range(2))
    assert first.fingerprints == again.fingerprints
    other = load_models(random, jax.random.key(1)).fingerprints
    assert all(other[part] != first.fingerprints[part] != models.fingerprints[part] for part in other)
    # The head of a draft that knows nothing is the policy's.
    head = first.draft["lm_head"]["kernel"]
    assert np.array_equal(head, first.policy["embed_tokens"].T)


def test_with_speculation_off_no_draft_is_read():
    models = load_models(make("speculation=off", "draft_checkpoint=nowhere"), jax.random.key(0))
    assert models.draft is None and models.draft_graph is None
    assert models.fingerprints["draft"] == load_models(make("speculation=off"), jax.random.key(1)).fingerprints["draft"]


def test_the_models_are_those_of_the_checkpoints(run, models, tmp_path):
    save_policy(tmp_path, run.cfg.policy, models.policy)
    cfg, policy = load_policy(tmp_path)
    assert cfg == run.cfg.policy
    again = load_models(make(f"policy_checkpoint={tmp_path}"), jax.random.key(5))
    assert again.fingerprints == models.fingerprints == run.kept.fingerprints
    assert jax.tree.structure(policy) == jax.tree.structure(models.policy)


def test_a_policy_of_other_sizes_is_refused_with_each_of_them():
    cfg = dataclasses.replace(make("speculation=off"), policy=Qwen3Config.tiny(hidden_size=64, intermediate_size=256))
    with pytest.raises(UserError) as refusal:
        load_models(cfg, jax.random.key(0))
    assert str(refusal.value) == (
        "policy_checkpoint=shipped:arithmetic2/policy must hold the policy of the config, but has hidden_size=96 where "
        "policy.hidden_size=64; give the checkpoint of this policy, or set policy to what the checkpoint holds"
    )


def test_training_settings_of_a_draft_may_differ_from_its_checkpoint():
    assert load_models(make("draft.passes=1", "draft.pass_decay=0.5"), jax.random.key(0)).draft is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["rollout.max_new_tokens=502"],
            "needs a cache of 513 tokens, which must be <= policy.max_position_embeddings",
        ),
        (["draft_length=498"], "draft_length=498 needs a cache of 5"),
        (["task.digits=18"], "which must be <= policy.max_position_embeddings=128"),
    ],
)
def test_a_rollout_that_outgrows_the_policy_is_refused(overrides, said):
    if overrides[0].startswith("task"):
        overrides = [
            *overrides,
            "policy_checkpoint=none",
            "speculation=off",
            "policy.max_position_embeddings=128",
            "draft=none",
        ]
    with pytest.raises(UserError, match=said):
        set_up(make(*overrides))


def test_a_rollout_that_just_fits_is_taken():
    # 7 of the prompt, 4 drafted: 512 - 11 are left.
    assert set_up(make("rollout.max_new_tokens=501"))[0].engine.shape.max_new_tokens == 501


def test_a_policy_with_too_few_tokens_for_the_task_is_refused():
    policy = Qwen3Config.tiny(vocab_size=8, hidden_size=96, intermediate_size=256)
    cfg = dataclasses.replace(make("speculation=off"), policy=policy, policy_checkpoint=None)
    with pytest.raises(UserError, match=r"policy.vocab_size=8 must be >= \d+, the size of the task's tokenizer"):
        set_up(cfg)


def test_no_two_purposes_share_a_key(run):
    keys = [run.key, run.evaluation_key, run.speed_key, *(run.step_key(step) for step in range(1, 200))]
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)


def test_the_engine_has_room_for_the_task_and_stops_at_its_end(run):
    shape, task = run.engine.shape, run.task
    assert (shape.prompt_capacity, shape.max_new_tokens) == (task.max_prompt_tokens, task.max_response_tokens)
    assert shape.stop_ids == (task.tokenizer.eos_id,) and shape.pad_id == task.tokenizer.pad_id


@pytest.mark.parametrize(
    ("arm", "draft_length", "trained"), [("off", 0, False), ("frozen", 4, False), ("cotrained", 4, True)]
)
def test_an_arm_drafts_and_trains_what_it_should(arm, draft_length, trained):
    run, _ = set_up(make(f"speculation={arm}"))
    assert run.draft_length == draft_length and run.cotrained == trained
    assert (run.optimizers.draft is not None) == trained


def test_an_untrained_draft_is_a_fresh_one_each_run(run):
    fresh = run.untrained_draft()
    assert jax.tree.structure(fresh) == jax.tree.structure(run.kept.draft)
    assert not np.array_equal(fresh["fc"]["kernel"], run.kept.draft["fc"]["kernel"])
    drawn = initialise(run.cfg.draft.build, run.key)[1]
    assert not np.array_equal(fresh["fc"]["kernel"], drawn["fc"]["kernel"])
