"""A run whose updates go over stages, context and data is the run of one device, and can be stopped and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import draftco_jax as dc
from draftco_jax import loop
from draftco_jax.checkpoint import Checkpointer
from draftco_jax.convert import Wishes, convert
from draftco_jax.data.prompts import PromptBatches
from draftco_jax.errors import UserError
from draftco_jax.metrics import read_metrics
from draftco_jax.models.hf_weights import load_policy
from draftco_jax.run import Run, check_directory, set_up, start_or_resume
from draftco_jax.starting_weights import Models, load_models
from draftco_jax.training import train_layout
from draftco_jax.training.update import make_update

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "grpo_arithmetic2_eagle3_cpu.py"
# 15 sequences: rows are padded for every mesh here.
SMALL = (
    "steps=2",
    "rollout.prompts_per_step=3",
    "rollout.samples_per_prompt=5",
    "evaluation.prompts=15",
    "checkpoint.every_steps=1",
    "draft.passes=2",
    "draft_length=2",
    "algorithm.kl_coefficient=0.1",
    "speed.repetitions=0",
)
MESH = ("mesh.stage=2", "mesh.context=2", "mesh.data=2")


class Interrupted(Exception):
    """Stands for whatever stops a run in the middle of a step."""


def small(*overrides: str) -> dc.RunConfig:
    return dc.load_config(CONFIG, [*SMALL, *overrides])


@pytest.fixture(scope="module")
def run_of():
    """A run that has drawn no prompts yet, and its starting weights; those of one config share their compiled
    programs."""
    made: dict[dc.RunConfig, Run] = {}

    def run(cfg: dc.RunConfig) -> tuple[Run, Models]:
        if cfg not in made:
            made[cfg] = set_up(cfg)[0]
        run = dataclasses.replace(made[cfg], prompts=PromptBatches(made[cfg].task, 3, cfg.seed))
        return run, load_models(cfg, run.key)

    return run


@pytest.fixture(scope="module")
def train(run_of):
    """`draftco_jax.train` up to its last step."""

    def run(cfg: dc.RunConfig, run_dir: Path, *, resume: bool = False, stop_in_step: int = 0) -> list[dict[str, float]]:
        step_of_loop = loop.train_step

        def train_step(run, state, weights, step):
            done = step_of_loop(run, state, weights, step)
            if step == stop_in_step:
                raise Interrupted
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "set_up", run_of)
            patch.setattr(loop, "train_step", train_step)
            patch.setattr(loop, "summarise_run", lambda *_: {})
            patch.setattr(loop, "write_report", lambda _: None)
            dc.train(cfg, run_dir, resume=resume)
        return lines(run_dir)

    return run


def lines(run_dir: Path) -> list[dict[str, float]]:
    """Metrics without those that a clock has a say in."""
    timed = ("time_seconds/", "rollout/tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def on_one_device(train, tmp_path_factory):
    return train(small(), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def on_mesh(train, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("mesh")
    return run_dir, train(small(*MESH), run_dir)


def check(found, wanted):
    assert [line.keys() for line in found] == [line.keys() for line in wanted]
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    # After an update, a publish and rollouts with what was published.
    for name in ("policy/gradient_norm", "draft/gradient_norm", "draft/loss", "policy/kl_reference", "eval/pass_rate"):
        assert wanted[2][name] > 0
        np.testing.assert_allclose(found[2][name], wanted[2][name], rtol=1e-3, err_msg=name)


def test_stages_context_and_data_give_the_metrics_of_one_device(on_one_device, on_mesh):
    check(on_mesh[1], on_one_device)


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        ("tensor=2 data=3", "mesh"),  # rollouts too, five sequences on each pair of devices
        pytest.param("tensor=2 data=3", "one", marks=pytest.mark.slow),
        pytest.param("stage=2 tensor=2 data=2", "mesh", marks=pytest.mark.slow),  # 15 sequences are padded to 16
        pytest.param("microbatches=4", "one", marks=pytest.mark.slow),
        pytest.param(
            "stage=2 microbatches=3 draft_placement=last_stage context=2 stripe=4", "one", marks=pytest.mark.slow
        ),
    ],
)
def test_other_meshes_do_too(mesh, devices, train, on_one_device, tmp_path):
    settings = (*(f"mesh.{word}" for word in mesh.split()), f"rollout.devices={devices}")
    check(train(small(*settings), tmp_path), on_one_device)


def test_weights_for_rollouts_over_the_mesh_are_published_split(run_of, tmp_path):
    run, models = run_of(small("mesh.tensor=2", "mesh.data=3", "rollout.devices=mesh"))
    with Checkpointer(tmp_path, 2) as saved:
        policy = loop.publish(run, start_or_resume(run, models, saved, resume=False)).policy
    split = [policy["layers"][0]["mlp"]["gate_up"]["gate_proj"]["kernel"], policy["embed_tokens"]]
    for array, dim in zip(split, (1, 0), strict=True):
        assert len(array.sharding.device_set) == 6
        assert {shard.data.shape[dim] for shard in array.addressable_shards} == {array.shape[dim] // 2}


def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(on_mesh, run_of, train, tmp_path):
    whole, wanted = on_mesh
    cfg = small(*MESH)
    with pytest.raises(Interrupted):
        train(cfg, tmp_path, stop_in_step=2)
    assert len(lines(tmp_path)) == 2
    assert train(cfg, tmp_path, resume=True) == wanted
    (run, models), states = run_of(cfg), []
    for run_dir in (whole, tmp_path):
        with Checkpointer(run_dir, 2) as saved:
            states.append(start_or_resume(run, models, saved, resume=True))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b)), jax.tree_util.keystr(path)
    assert int(states[0].step) == 2


def test_what_is_restored_lies_where_an_update_leaves_it(on_mesh, run_of):
    run, models = run_of(small(*MESH))
    with Checkpointer(on_mesh[0], 2) as saved:
        restored = start_or_resume(run, models, saved, resume=True)
    stages = restored.policy["stages"][0][0]["mlp"]["down_proj"]["kernel"]
    assert stages.sharding.spec[0] == "stage" and stages.addressable_shards[0].data.shape[0] == 1
    batch = loop.make_batch(run, loop.publish(run, restored), next(run.prompts), 3)
    updated = run.update(restored, batch, jnp.float32(1.0), run.reference, run.twin)[0]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(updated), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), jax.tree_util.keystr(path)
    assert any("data" in leaf.sharding.spec for leaf in jax.tree.leaves(restored.policy_optimizer))


@pytest.fixture(scope="module")
def first_update(run_of, tmp_path_factory):
    """The state of step 0, what else the first update of a run reads, and what it gives."""

    def first(update_of=lambda run: run.update):
        run, models = run_of(small(*MESH))
        with Checkpointer(tmp_path_factory.mktemp("none"), 2) as saved:
            state = start_or_resume(run, models, saved, resume=False)
        batch = loop.make_batch(run, loop.publish(run, state), next(run.prompts), 1)
        inputs = batch, jnp.float32(1.0), run.reference, run.twin
        before = jax.tree.map(np.array, inputs)
        updated = update_of(run)(state, *inputs)
        jax.tree.map(np.testing.assert_array_equal, inputs, before)
        return jax.tree.leaves(state._replace(step=None)), updated  # the host has read the step

    return first


def test_an_update_takes_the_memory_of_the_state_and_of_nothing_that_is_read_later(first_update):
    """The first state may share memory of the first device with the starting weights, of which all else is made."""
    state, updated = first_update()
    assert all(leaf.is_deleted() for leaf in state)
    assert int(updated[0].step) == 1


@pytest.mark.slow  # compiles another update
def test_an_update_is_bit_for_bit_the_one_that_leaves_the_state_as_it_is(first_update, monkeypatch):
    monkeypatch.setattr(train_layout, "make_update", lambda *spec, donate: make_update(*spec, donate=not donate))
    state, wanted = first_update(lambda run: run.layout.make_update(run.spec, run.optimizers))
    assert not any(leaf.is_deleted() for leaf in state)
    jax.tree.map(np.testing.assert_array_equal, first_update()[1], wanted)


def test_the_policy_of_a_run_on_a_mesh_is_converted_layer_by_layer(on_mesh, run_of, tmp_path):
    run, models = run_of(small(*MESH))
    with Checkpointer(on_mesh[0], 2) as saved:
        policy = run.layout.gathered(start_or_resume(run, models, saved, resume=True).policy)
    convert(str(on_mesh[0]), tmp_path / "out", Wishes())
    found = load_policy(tmp_path / "out" / "policy")[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, found, policy))
    trained, untrained = (tree["layers"][0]["mlp"]["down_proj"]["kernel"] for tree in (found, models.policy))
    assert not np.array_equal(trained, untrained)


def test_another_mesh_does_not_continue_the_run(on_mesh):
    with pytest.raises(UserError, match=r"another config \(mesh.stage: 2 -> 1\); .*resume with the settings"):
        check_directory(small("mesh.context=2", "mesh.data=2"), on_mesh[0], resume=True)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (("mesh.data=4", "mesh.stage=2", "mesh.context=2"), "data=4 x stage=2 x context=2 takes 16 devices, but there"),
        (("mesh.tensor=8",), r"mesh: layers.0.self_attn.\w+.kernel: heads=4 must be a multiple of 8"),
    ],
    ids=("devices", "heads"),
)
def test_a_mesh_that_cannot_be_is_refused_before_anything_is_written(mesh, said, tmp_path):
    with pytest.raises(UserError, match=said) as refusal:
        dc.train(small(*mesh), tmp_path / "run")
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()
