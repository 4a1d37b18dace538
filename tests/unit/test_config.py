"""Checks the rules of a run's config: what is refused, in which words, and what a file, an override and Python give."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from draftco_jax.config import (
    CheckpointConfig,
    EvaluationConfig,
    RolloutConfig,
    RunConfig,
    SpeedConfig,
    config_registry,
    load_config,
    resolve_checkpoint,
    with_later_settings,
)
from draftco_jax.config_io import from_json, to_json
from draftco_jax.decoding.speculation_control import Budget
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.environments.arithmetic import ArithmeticConfig
from draftco_jax.errors import UserError
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.token_tree import TreeConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.pretrain_config import load_pretrain_config
from draftco_jax.training.mesh_config import MeshConfig
from draftco_jax.training.objective import GrpoConfig
from draftco_jax.training.optimizer import OptimizerConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
POLICY = Qwen3Config.tiny(hidden_size=96, intermediate_size=256)
DRAFT = Eagle3Config.for_target(POLICY)


def make(**changes) -> RunConfig:
    values = {
        "steps": 3,
        "task": ArithmeticConfig(digits=2),
        "policy": POLICY,
        "policy_checkpoint": None,
        "rollout": RolloutConfig(prompts_per_step=4, samples_per_prompt=4),
        "policy_optimizer": OptimizerConfig(learning_rate=1e-3),
        "draft": DRAFT,
    }
    return RunConfig(**(values | changes))


ONE_SAMPLE = RolloutConfig(prompts_per_step=4, samples_per_prompt=1)
GREEDY = RolloutConfig(prompts_per_step=4, samples_per_prompt=4, sampling=SamplingConfig(temperature=0.0))
GSPO = GrpoConfig(policy_loss="gspo", aggregation="sequence")
OVER_MESH = RolloutConfig(prompts_per_step=4, samples_per_prompt=4, devices="mesh")
REFUSED = [
    (lambda: make(steps=0), "steps=0 must be >= 1"),
    (lambda: make(draft_length=0), "draft_length=0 must be >= 1; use speculation=off"),
    (lambda: make(chunk_tokens=0), "chunk_tokens=0 must be >= 1"),
    (lambda: make(verify_budget=0), "verify_budget=0 must be >= 1; use none to verify all drafts"),
    (
        lambda: make(rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=4, record_experts=True)),
        "rollout.record_experts=True must be False with policy=Qwen3Config, which has no experts",
    ),
    (
        lambda: make(algorithm=GrpoConfig(router_balance_coefficient=0.01)),
        "algorithm.router_balance_coefficient=0.01 must be 0.0 with policy=Qwen3Config, which has no experts",
    ),
    (
        lambda: make(algorithm=GSPO, mesh=MeshConfig(stage=2)),
        "mesh.head_placement=all_stages must be last_stage with algorithm.policy_loss=gspo",
    ),
    (
        lambda: make(algorithm=GSPO, mesh=MeshConfig(stage=2, context=2, head_placement="last_stage")),
        "mesh.context=2 must be 1 with mesh.stage=2, mesh.microbatches=None and algorithm.policy_loss=gspo",
    ),
    (lambda: GrpoConfig(router_balance_coefficient=-1.0), "router_balance_coefficient=-1.0 must be >= 0"),
    (lambda: make(draft_loss_weight=-0.5), "draft_loss_weight=-0.5 must be >= 0; 0 leaves the draft untrained"),
    (lambda: make(rollout=ONE_SAMPLE), "samples_per_prompt=1 must be >= 2 with algorithm.std_normalise=True"),
    (
        lambda: make(rollout=ONE_SAMPLE, algorithm=GrpoConfig(std_normalise=False, leave_one_out=True)),
        "algorithm.leave_one_out=True: one sample has neither spread nor others; raise it",
    ),
    (lambda: make(rollout=GREEDY), "temperature=0.0 must be > 0 and top_k=0 must not be 1 in training"),
    (lambda: make(rollout=ONE_SAMPLE, algorithm=GrpoConfig(std_normalise=False)), "samples_per_prompt=1 must be >= 2"),
    (lambda: make(seed=2**64), "seed=18446744073709551616 must be in"),
    (lambda: SamplingConfig(temperature=1e-40), "temperature=1e-40 must be 0"),
    (lambda: dataclasses.replace(DRAFT, num_key_value_heads=0), "num_key_value_heads=0 must be >= 1"),
    (lambda: Qwen3Config.tiny(hidden_size=0), "hidden_size=0 must be >= 1"),
    (lambda: make(draft=None), "draft=None with speculation=cotrained must be a draft config"),
    (
        lambda: make(draft=dataclasses.replace(DRAFT, draft_vocab_size=16)),
        "draft_vocab_size=16 is below vocab_size=32 without a map",
    ),
    (lambda: make(draft=dataclasses.replace(DRAFT, hidden_size=64)), "hidden_size=64 must equal the policy's 96"),
    (lambda: make(draft=dataclasses.replace(DRAFT, tap_layers=(0, 2))), "must be below num_hidden_layers=2"),
    (
        lambda: make(draft=dataclasses.replace(DRAFT, max_position_embeddings=100)),
        "max_position_embeddings=100 must be >= the policy's 512",
    ),
    (lambda: RolloutConfig(prompts_per_step=0, samples_per_prompt=4), "prompts_per_step=0 must be >= 1"),
    (lambda: RolloutConfig(prompts_per_step=4, samples_per_prompt=-1), "samples_per_prompt=-1 must be >= 1"),
    (
        lambda: RolloutConfig(prompts_per_step=4, samples_per_prompt=4, max_new_tokens=0),
        "max_new_tokens=0 must be >= 1; use none",
    ),
    (lambda: EvaluationConfig(prompts=0), "prompts=0 must be >= 1"),
    (lambda: EvaluationConfig(samples_per_prompt=0), "samples_per_prompt=0 must be >= 1"),
    (lambda: EvaluationConfig(every_steps=-1), "every_steps=-1 must be >= 0"),
    (lambda: CheckpointConfig(every_steps=-1), "every_steps=-1 must be >= 0"),
    (lambda: CheckpointConfig(keep=0), "keep=0 must be >= 1"),
    (lambda: SpeedConfig(repetitions=-1), "repetitions=-1 must be >= 0"),
    (lambda: SpeedConfig(batches=()), r"batches=\(\) must be batch sizes >= 1"),
    (lambda: SpeedConfig(draft_lengths=(1, 0)), r"draft_lengths=\(1, 0\) must be lengths >= 1"),
    (lambda: MeshConfig(stage=0), "stage=0 must be >= 1; 1 leaves it out"),
    (lambda: MeshConfig(chunks=0), "chunks=0 must be >= 1"),
    (lambda: MeshConfig(microbatches=0), "microbatches=0 must be >= 1; use none"),
    (lambda: MeshConfig(stripe=4), "stripe=4 must be none with context=1: rows are whole; raise context"),
    (lambda: MeshConfig(chunks=2), "chunks=2 must be 1 and layers_per_stage=None none with stage=1; raise stage"),
    (
        lambda: MeshConfig(data=2, schedule="gpipe"),
        "schedule=gpipe must be 1f1b with stage=1 and microbatches=None: no pipeline; raise stage or microbatches",
    ),
    (
        lambda: MeshConfig(tensor=2, microbatches=1, draft_placement="last_stage"),
        "draft_placement=last_stage must be all_stages with stage=1 and microbatches=1: no pipeline; raise",
    ),
    (
        lambda: MeshConfig(tap_mode="post"),
        "tap_mode=post must be direct with stage=1 and microbatches=None: no pipeline",
    ),
    (
        lambda: MeshConfig(microbatches=2, head_placement="last_stage"),
        "head_placement=last_stage must be all_stages with stage=1: there is no other stage; raise stage",
    ),
    (
        lambda: MeshConfig(stage=2, trunk_mode="gathered"),
        "trunk_mode=gathered must be replay with context=1: rows are whole; raise context",
    ),
    (
        lambda: MeshConfig(expert=2, experts_over=("expert", "expert")),
        "experts_over=expert,expert must be different axes of data, context, expert, tensor",
    ),
    (
        lambda: make(mesh=MeshConfig(stage=2, chunks=2)),
        "mesh.stage=2 x mesh.chunks=2 must be <= 2, the layers of the policy; use fewer",
    ),
    (
        lambda: make(mesh=MeshConfig(stage=2, layers_per_stage=(1, 2))),
        "mesh.layers_per_stage=1,2 must be 2 numbers >= 1, one for each stage and chunk, that add up to 2",
    ),
    (
        lambda: make(mesh=MeshConfig(expert=2)),
        "mesh.expert=2 must be 1 and mesh.experts_over=expert be left out with policy=Qwen3Config",
    ),
    (
        lambda: make(rollout=OVER_MESH),
        "rollout.devices=mesh must be one where the mesh has one device; raise mesh.data or mesh.tensor",
    ),
    (
        lambda: make(rollout=OVER_MESH, mesh=MeshConfig(data=2)),
        "speed.repetitions=15 must be 0 with rollout.devices=mesh: rounds are timed on one device; change it, or",
    ),
    (
        lambda: make(rollout=OVER_MESH, mesh=MeshConfig(data=2), speed=SpeedConfig(repetitions=0), verify_budget=3),
        "verify_budget=3 must be none with rollout.devices=mesh: a budget is shared by all sequences",
    ),
    (
        lambda: make(
            rollout=dataclasses.replace(OVER_MESH, slots=2, rule=Budget(lengths=(0, 4), peak=8)),
            mesh=MeshConfig(tensor=2),
        ),
        "rollout.rule=Budget.* must be none with rollout.devices=mesh: a rule looks at the rounds of all sequences",
    ),
    (
        lambda: make(
            rollout=dataclasses.replace(OVER_MESH, slots=3),
            mesh=MeshConfig(data=2, tensor=2),
            speed=SpeedConfig(repetitions=0),
        ),
        "rollout.slots=3 must be a multiple of 2, the devices that share the sequences .* use 4",
    ),
    (
        lambda: make(mesh=MeshConfig(context=2, stripe=2)),
        "mesh.stripe=2 must be >= 4, the tokens that the draft's labels reach ahead; raise it, or use none",
    ),
]


@pytest.mark.parametrize(("build", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_an_impossible_value_is_refused_with_name_value_and_way_out(build, said):
    with pytest.raises(ValueError, match=said) as refusal:
        build()
    assert "\n" not in str(refusal.value)


def test_choices_of_a_pipeline_are_taken_where_there_is_one():
    """Of one stage too: micro-batches go through it in an order, and their features to the draft in a way."""
    choices = {"schedule": "gpipe", "draft_placement": "last_stage", "tap_mode": "post"}
    for mesh in (MeshConfig(microbatches=2, **choices), MeshConfig(stage=2, head_placement="last_stage", **choices)):
        pipeline = mesh.pipeline(make().policy)
        assert pipeline is not None and {name: getattr(pipeline, name) for name in choices} == choices
    assert MeshConfig(context=2, trunk_mode="gathered").packed().trunk_mode == "gathered"


def test_names_of_the_mesh_are_read_from_text_and_closed():
    path = CONFIGS / "grpo_arithmetic2_eagle3_cpu.py"
    mesh = load_config(path, ["mesh.stage=2", "mesh.layers_per_stage=1,1", "mesh.tap_mode=hold"]).mesh
    assert mesh == MeshConfig(stage=2, layers_per_stage=(1, 1), tap_mode="hold")
    with pytest.raises(UserError, match="mesh.draft_placement=first must be one of all_stages, last_stage"):
        load_config(path, ["mesh.draft_placement=first"])


def without(tree, kind, name):
    """The tree without the field `name` of every component of the type `kind`."""
    if isinstance(tree, list):
        return [without(element, kind, name) for element in tree]
    if not isinstance(tree, dict):
        return tree
    here = tree.get("type") == kind
    return {key: without(value, kind, name) for key, value in tree.items() if not (here and key == name)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("RunConfig", "mesh"),
        ("RunConfig", "verification"),
        ("RunConfig", "tree"),
        ("RolloutConfig", "rule"),
        ("RolloutConfig", "devices"),
        ("RolloutConfig", "slots"),
        ("RolloutConfig", "devices"),
        ("SamplingConfig", "min_p"),
        ("ComputeConfig", "step_matmul"),
        ("EvaluationConfig", "samples_per_prompt"),
        ("GrpoConfig", "policy_loss"),
        ("GrpoConfig", "reward_range"),
    ],
)
def test_a_config_that_was_saved_before_a_setting_came_is_that_of_its_default(kind, name):
    saved = to_json(make())
    before = without(saved, kind, name)
    assert before != saved
    assert with_later_settings(before) == saved
    assert from_json(RunConfig, with_later_settings(before), config_registry()) == make()


def test_later_settings_change_nothing_that_is_there():
    on_mesh = make(mesh=MeshConfig(data=2), verification="block")
    assert from_json(RunConfig, with_later_settings(to_json(on_mesh)), config_registry()) == on_mesh
    broken = without(to_json(make()), "RunConfig", "steps")
    with pytest.raises(UserError, match="steps is missing"):
        from_json(RunConfig, with_later_settings(broken), config_registry())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tree": None}, "tree=None must be a TreeConfig with verification=tree"),
        ({"verification": "block"}, "must be none with verification=block; use verification=tree"),
        ({"draft_length": 3}, "tree.widths=\\(2, 1\\) must be as many as draft_length=3"),
        ({"speculation": "off"}, "speculation=off must be frozen or cotrained with verification=tree"),
        ({"rollout": {"slots": 4}}, "rollout.slots=4 must be none with verification=tree"),
        ({"verify_budget": 4}, "verify_budget=4 must be none with verification=tree"),
        ({"speed": {"draft_lengths": (1, 4)}}, "speed.draft_lengths=\\(1, 4\\) must be <= 2 with verification=tree"),
    ],
)
def test_a_tree_that_does_not_fit_the_run_is_refused(changes, said):
    fits = make(
        verification="tree", tree=TreeConfig(widths=(2, 1)), draft_length=2, speed=SpeedConfig(draft_lengths=(1, 2))
    )
    nested = {
        name: dataclasses.replace(getattr(fits, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(fits, **nested)


def test_what_is_off_is_not_checked():
    assert make(speculation="off", draft=None).draft is None
    # The map comes with the checkpoint, which is read when the run is set up.
    reduced = dataclasses.replace(DRAFT, draft_vocab_size=16)
    assert make(draft=reduced, draft_checkpoint="somewhere").draft == reduced


def test_replacing_a_component_checks_the_whole_again():
    config = make()
    assert dataclasses.replace(config, draft=dataclasses.replace(DRAFT, passes=1)).draft.passes == 1
    with pytest.raises(ValueError, match="hidden_size=128 must equal the policy's 96"):
        dataclasses.replace(config, draft=Eagle3Config.for_target(Qwen3Config.tiny(hidden_size=128)))


def load_any(path):
    return (load_pretrain_config if path.stem.startswith("pretrain_") else load_config)(path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_shipped_config_survives_its_saved_form(path):
    config = load_any(path)
    assert from_json(type(config), json.loads(json.dumps(to_json(config))), config_registry()) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_a_shipped_config_names_models_that_are_there(path):
    config = load_any(path)
    for name in (config.policy_checkpoint, config.draft_checkpoint):
        assert name is None or (resolve_checkpoint(name) / "model.safetensors").is_file()


def test_overrides_that_only_make_sense_together_are_taken_together():
    path = CONFIGS / "grpo_arithmetic2_eagle3_cpu.py"
    config = load_config(path, ["policy.hidden_size=128", "draft.hidden_size=128"])
    assert config.policy.hidden_size == 128
    with pytest.raises(UserError, match="hidden_size=96 must equal the policy's 128"):
        load_config(path, ["policy.hidden_size=128"])


def test_an_unknown_setting_names_the_nearest():
    path = CONFIGS / "grpo_arithmetic2_eagle3_cpu.py"
    with pytest.raises(UserError, match="policy_optimizer.learning_rat is not a setting; nearest: .*learning_rate"):
        load_config(path, ["policy_optimizer.learning_rat=1"])
    with pytest.raises(UserError, match="temperature is not a setting; nearest: rollout.sampling.temperature"):
        load_config(path, ["temperature=1"])


def test_a_checkpoint_name_is_a_folder_or_one_of_those_shipped(tmp_path):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert (resolve_checkpoint("shipped:arithmetic2/policy") / "config.json").is_file()
    with pytest.raises(UserError, match="shipped:none is not shipped; shipped: .*shipped:arithmetic3/policy"):
        resolve_checkpoint("shipped:none")
