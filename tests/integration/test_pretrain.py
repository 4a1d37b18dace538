"""Pre-training of drafts: every family learns, a stopped training goes on, the exported draft is the trained one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from draftco_jax import pretrain as program
from draftco_jax import pretrain_setup
from draftco_jax.checkpoint import fingerprint
from draftco_jax.config import CheckpointConfig, EvaluationConfig
from draftco_jax.drafts.catalog import family_of
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.mtp.config import MtpConfig
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.environments.arithmetic import ArithmeticConfig
from draftco_jax.errors import UserError
from draftco_jax.metrics import read_metrics
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.pretrain import pretrain, rows_of_step
from draftco_jax.pretrain_config import AdaptationConfig, OwnRolloutsConfig, PretrainConfig
from draftco_jax.pretrain_setup import prepare, rollouts_of, set_up
from draftco_jax.training.optimizer import OptimizerConfig

POLICY = Qwen3Config.tiny(hidden_size=96, intermediate_size=256)
SMALL = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
BLOCK = {"mask_token_id": 31, "num_hidden_layers": 1, "num_anchors": 8, "row_anchors": 8}
KEPT = 12
DRAFTS = {
    "eagle3": Eagle3Config.for_target(POLICY, passes=2, **SMALL),
    "eagle3_reduced": Eagle3Config.for_target(POLICY, passes=2, draft_vocab_size=KEPT, **SMALL),
    "dflash": DFlashConfig.for_target(POLICY, block_size=3, **BLOCK, **SMALL),
    "dspark": DSparkConfig.for_target(POLICY, block_size=2, markov_rank=8, **BLOCK, **SMALL),
    "mtp": MtpConfig.for_target(POLICY, steps=2, **SMALL),
}
FAST = ("eagle3_reduced", "dflash")
STEPS, ADAPTED = 24, 4
# Between the accepted lengths of a trained draft and its untrained twin; 0.06 is the sampling error of 32 prompts.
LEARNT = 0.2


class Interrupted(Exception):
    """Stands for whatever stops a training in the middle of a step."""


class Finished(NamedTuple):
    config: PretrainConfig
    run_dir: Path
    summary: dict[str, Any]


def config_of(name: str) -> PretrainConfig:
    """The shipped 2-digit policy with little to do: compiling is what these tests wait for."""
    adaptation = AdaptationConfig(steps=ADAPTED, optimizer=OptimizerConfig(learning_rate=1e-3))
    return PretrainConfig(
        steps=STEPS,
        task=ArithmeticConfig(digits=2),
        policy=POLICY,
        policy_checkpoint="shipped:arithmetic2/policy",
        draft=DRAFTS[name],
        draft_length=2,
        rollout=OwnRolloutsConfig(sequences=64, samples_per_prompt=2, sequences_per_call=32),
        batch_rows=16,
        optimizer=OptimizerConfig(learning_rate=1e-2),
        # One family is enough for what all have in common.
        adaptation=adaptation if name == "eagle3_reduced" else None,
        evaluation=EvaluationConfig(prompts=32, every_steps=12),
        checkpoint=CheckpointConfig(every_steps=5),
    )


@pytest.fixture(scope="module")
def sharing():
    """(name of a draft) -> a context in which its trainings share what they compile: made anew it is the same."""
    made: dict[Any, Any] = {}

    def once(patch: pytest.MonkeyPatch, module: Any, function: str, key: Callable[..., Any]) -> None:
        original = getattr(module, function)

        def shared(*arguments: Any, **options: Any) -> Any:
            at = function, key(*arguments)
            if at not in made:
                made[at] = original(*arguments, **options)
            return made[at]

        patch.setattr(module, function, shared)

    @contextmanager
    def of(name: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            # The policy alone makes the rollouts, with the draft it is evaluated; each phase has its own loss.
            once(patch, pretrain_setup, "Engine", lambda policy, draft: (name, draft is None))
            once(patch, pretrain_setup, "Publisher", lambda policy, draft, *_: (name, draft is None))
            once(patch, program, "make_step", lambda spec, _: (name, spec.draft_cfg))
            once(patch, program, "make_mass_outside", lambda *_: name)
            yield

    return of


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sharing):
    """A finished training of a draft, made once; tests only read it."""
    made: dict[str, Finished] = {}

    def of(name: str) -> Finished:
        if name not in made:
            config, run_dir = config_of(name), tmp_path_factory.mktemp("pretrain") / name
            with sharing(name):
                made[name] = Finished(config, run_dir, pretrain(config, run_dir))
        return made[name]

    return of


def untimed(run_dir: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "time_seconds/step"} for line in read_metrics(run_dir)]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTS]
)
def test_every_family_learns_and_its_exported_draft_is_the_trained_one(name, finished):
    config, run_dir, summary = finished(name)
    lengths = summary["accepted_length"]
    assert lengths["end"] > lengths["untrained"] + LEARNT and lengths["best"] >= lengths["end"]
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(config.total_steps + 1))
    evaluated = [line["step"] for line in lines if "eval/accepted_length" in line]
    assert evaluated == sorted({0, 12, 24, config.total_steps})
    assert lines[-1]["draft/loss"] < lines[1]["draft/loss"] or config.adaptation is not None
    assert {"draft/tau_prob", "draft/tv_position_1", "draft/tv_position_2", "draft/learning_rate"} <= lines[1].keys()
    assert (run_dir / "accepted_length.png").read_bytes().startswith(b"\x89PNG")

    load = family_of(config.draft).load
    assert load is not None
    found, _, _ = load(run_dir / "draft", config.draft)
    assert found == config.draft
    again, trained = set_up(replace(config, draft_checkpoint=str(run_dir / "draft")))
    run, start = prepare(again, trained, rollouts_of(again, run_dir))
    assert run.accepted_length(start)["eval/accepted_length"] == lengths["end"]


def test_bug_case_b13_draft_training_saves_and_evaluates_by_optimizer_steps_and_evaluation_changes_nothing(
    finished, sharing
):
    """An evaluation between steps 12 and 13 leaves no trace: a training without it takes the very same steps."""
    config, run_dir, _ = finished("dflash")
    saved = sorted(int(folder.name) for folder in (run_dir / "checkpoints").iterdir() if folder.name.isdigit())
    assert saved == [20, STEPS]  # every 5 steps and the last one; two are kept
    losses = [line["draft/loss"] for line in read_metrics(run_dir)[1:]]
    unseen = run_dir.parent / "unseen"
    with sharing("dflash"):
        pretrain(replace(config, evaluation=EvaluationConfig(prompts=32, every_steps=0)), unseen)
    assert [line["draft/loss"] for line in read_metrics(unseen)[1:]] == losses


def test_a_reduced_vocabulary_keeps_what_the_rollouts_hold_most_and_says_what_it_leaves_out(finished):
    config, run_dir, summary = finished("eagle3_reduced")
    with np.load(run_dir / "rollouts.npz") as held:
        tokens, mask = held["tokens"], held["label_mask"]
    counts = np.bincount(tokens[mask > 0], minlength=32)
    kept = sorted(sorted(range(32), key=lambda token: (-counts[token], token))[:KEPT])
    found, graph, _ = family_of(config.draft).load(run_dir / "draft", config.draft)  # pyright: ignore[reportOptionalCall]
    assert list(graph.constants["draft_to_target"]) == kept and found.draft_vocab_size == KEPT
    outside = summary["mass_outside_vocabulary"]
    assert summary["acceptance_ceiling"] == 1.0 - outside
    # The share of the sampled tokens that are not kept estimates the mass: 1200 draws, so +- 0.03 at 3 deviations.
    assert outside == pytest.approx(1.0 - counts[kept].sum() / counts.sum(), abs=0.03) and outside > 0.01
    assert finished("dflash").summary["mass_outside_vocabulary"] is None


def test_the_second_phase_trains_on_its_own_loss_with_a_fresh_optimizer(finished):
    config, run_dir, summary = finished("eagle3_reduced")
    lines = read_metrics(run_dir)
    assert [line["phase"] for line in lines[1:]] == [1.0] * STEPS + [2.0] * ADAPTED
    rates = [line["draft/learning_rate"] for line in lines[1:]]
    assert rates == pytest.approx([1e-2] * STEPS + [1e-3] * ADAPTED)
    for line in lines[STEPS + 1 :]:
        # 1 - prod a_i lies in [0, 1], and its first step is 1 - a_1; cross-entropies are neither.
        assert line["draft/loss_position_1"] == pytest.approx(line["draft/tv_position_1"], abs=1e-6)
        assert line["draft/loss_position_2"] > line["draft/loss_position_1"]
    assert lines[STEPS]["draft/loss_position_1"] > lines[STEPS]["draft/tv_position_1"] + 0.05
    first, second = (phase["accepted_length"] for phase in summary["phases"])
    assert first["end"] == second["start"] and [p["last_step"] for p in summary["phases"]] == [24, 28]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The training stops when this step is done and not yet saved: after its line, before its checkpoint."""
    original = program._show

    def show(progress, at, metrics):
        if at == step:
            raise Interrupted
        original(progress, at, metrics)

    monkeypatch.setattr(program, "_show", show)


def test_bug_case_b104_draft_training_stopped_and_resumed_equals_one_that_was_not(finished, sharing, tmp_path):
    config, whole, summary = finished("eagle3_reduced")
    run_dir = tmp_path / "run"
    # Before any checkpoint; between two; at the last step of the first phase; in the second.
    for resume, step in ((False, 3), (True, 8), (True, STEPS), (True, 27)):
        with sharing("eagle3_reduced"), pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            stop_after(patch, step)
            pretrain(config, run_dir, resume=resume)
    (run_dir / "rollouts.npz").unlink()  # made again, the same
    with sharing("eagle3_reduced"):
        resumed = pretrain(config, run_dir, resume=True)
    assert untimed(run_dir) == untimed(whole)
    timed = ("wall_seconds", "training_seconds")
    assert {k: v for k, v in resumed.items() if k not in timed} == {k: v for k, v in summary.items() if k not in timed}
    for file in sorted((whole / "draft").iterdir()):
        assert (run_dir / "draft" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_resume_with_other_rollouts_is_refused_and_a_damaged_file_too(finished, tmp_path):
    config, whole, _ = finished("eagle3_reduced")
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / "summary.json").unlink()
    path = run_dir / "rollouts.npz"
    with np.load(path) as held:
        arrays: dict[str, Any] = dict(held)
    arrays["tokens"] = np.roll(arrays["tokens"], 1, axis=0)
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="the rollouts are not those that checkpoint step 28"):
        pretrain(config, run_dir, resume=True)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="rollouts.npz cannot be read .*delete it"):
        pretrain(config, run_dir, resume=True)


def test_a_finished_training_stays_as_it_is(finished):
    config, run_dir, summary = finished("eagle3_reduced")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert pretrain(config, run_dir, resume=True) == summary
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    with pytest.raises(UserError, match="add --resume"):
        pretrain(config, run_dir)


def test_a_draft_goes_on_from_a_checkpoint(finished, tmp_path):
    config, run_dir, summary = finished("dflash")
    further = replace(config, steps=1, draft_checkpoint=str(run_dir / "draft"))
    lengths = pretrain(further, tmp_path / "further")["accepted_length"]
    assert lengths["start"] == summary["accepted_length"]["end"]


def test_rows_are_a_function_of_seed_and_step_and_an_epoch_repeats_none():
    first = [rows_of_step(10, 3, step, 7) for step in (1, 2, 3)]
    assert len({int(row) for rows in first for row in rows}) == 9
    np.testing.assert_array_equal(rows_of_step(10, 3, 2, 7), first[1])
    assert not np.array_equal(rows_of_step(10, 3, 4, 7), first[0])  # another epoch
    assert not np.array_equal(rows_of_step(10, 3, 1, 8), first[0])  # another seed
    seen = np.bincount(np.concatenate([rows_of_step(10, 3, step, 7) for step in range(1, 301)]), minlength=10)
    assert seen.min() > 75  # 90 each on average


def test_rollouts_have_stable_ids_and_one_answer_per_sample(finished):
    config, run_dir, _ = finished("eagle3_reduced")
    again = rollouts_of(set_up(config)[0], run_dir)
    assert sorted({int(i) for i in np.unique(again.sample_ids[again.segment_ids > 0])}) == list(range(64))
    other = finished("dflash")
    assert fingerprint(again) == fingerprint(rollouts_of(set_up(other.config)[0], other.run_dir))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"draft": NGramConfig()}, "draft=ngram must be a family with weights"),
        ({"draft_length": 3, "draft": DRAFTS["dspark"]}, "draft_length=3 must be <= 2"),
        ({"steps": 0}, "steps=0 must be >= 1"),
        ({"draft": Eagle3Config.for_target(Qwen3Config.tiny())}, "hidden_size=128 must equal the policy's 96"),
    ],
)
def test_a_config_that_cannot_work_is_one_line(change, said):
    with pytest.raises(ValueError, match=said) as refused:
        replace(config_of("eagle3"), **change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "unpublished"),
    [
        ("eagle3", {"qk_norm": True, "norm_output": True}),
        (
            "dflash",
            {
                "num_hidden_layers": 2,
                "layer_types": ("sliding_attention", "full_attention"),
                "sliding_window": 4,
                "sliding_causal": False,
                "causal": True,
            },
        ),
        ("dspark", {"layer_types": ("sliding_attention",), "sliding_window": 4, "sample_from_anchor": False}),
    ],
)
def test_a_draft_that_no_layout_holds_is_refused_before_it_is_trained(name, unpublished, tmp_path):
    config = config_of(name)
    with pytest.raises(UserError, match="has no published layout"):
        pretrain(replace(config, draft=replace(config.draft, **unpublished)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rollout_counts_must_divide():
    with pytest.raises(ValueError, match="sequences_per_call=48 must divide sequences=64"):
        OwnRolloutsConfig(sequences=64, sequences_per_call=48)


def test_more_rows_than_there_are_is_one_line_and_a_draft_of_other_sizes_leaves_no_directory(finished, tmp_path):
    config, whole, _ = finished("eagle3_reduced")
    with pytest.raises(UserError, match="batch_rows=65 must be <= 64, the packed rows"):
        setting, loaded = set_up(replace(config, batch_rows=65))
        prepare(setting, loaded, rollouts_of(setting, whole))
    other = replace(
        config, draft=replace(config.draft, passes=2, rope_theta=5.0), draft_checkpoint=str(whole / "draft")
    )
    with pytest.raises(UserError, match="draft_checkpoint=.* has rope_theta=10000.0 where draft.rope_theta=5.0"):
        pretrain(other, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bug_case_b104_draft_the_saved_config_is_read_back(finished):
    from draftco_jax.config import config_registry
    from draftco_jax.config_io import from_json

    config, run_dir, _ = finished("eagle3_reduced")
    saved = json.loads((run_dir / "config.json").read_text())
    assert from_json(PretrainConfig, saved, config_registry()) == config
