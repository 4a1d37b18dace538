"""Checks that bad input is one line with exit code 2, and that nothing is made or changed by it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftco_jax.config import config_registry, resolve_checkpoint
from draftco_jax.config_io import from_json

# --set texts -> what the line must say: name, value, rule, way out
BAD_SETTINGS = [
    (
        ["rollout.samples_per_promt=4"],
        "rollout.samples_per_promt is not a setting",
        "nearest: rollout.samples_per_prompt",
    ),
    (["step=20"], "step is not a setting", "nearest: steps"),
    (["steps=many"], "steps=many must be a whole number"),
    (["steps"], "'steps' must have the form a.b.c=value"),
    (["rollout.samples_per_prompt=1"], "samples_per_prompt=1 must be >= 2", "std_normalise=True", "raise it"),
    (
        ["draft.draft_vocab_size=16", "draft_checkpoint=none"],
        "draft_vocab_size=16 is below vocab_size=32 without a map",
        "set it to vocab_size",
    ),
    (
        ["draft.draft_vocab_size=16"],
        "draft_checkpoint=shipped:arithmetic2/draft",
        "draft_vocab_size=32 where draft.draft_vocab_size=16",
        "give the checkpoint of this draft",
    ),
    (
        ["rollout.max_new_tokens=600"],
        "rollout.max_new_tokens=600",
        "must be <= policy.max_position_embeddings=512",
        "lower max_new_tokens",
    ),
    (["rollout.sampling.temperature=0"], "temperature=0.0 must be > 0", "in training", "; use "),
    (["draft.hidden_size=64"], "hidden_size=64 must equal the policy's 96", "use Eagle3Config.for_target"),
    (["speculation=sometimes"], "speculation=sometimes must be one of off, frozen, cotrained"),
    (["verification=forest"], "verification=forest must be one of token, block, tree"),
    (["verification=tree"], "tree=None must be a TreeConfig with verification=tree", "in the config file"),
    (
        ["policy_checkpoint=shipped:arithmetic3/policy"],
        "policy_checkpoint=shipped:arithmetic3/policy",
        "hidden_size=128 where policy.hidden_size=96",
        "give the checkpoint of this policy",
    ),
    (
        ["policy_checkpoint=shipped:arithmetic9/policy"],
        "shipped:arithmetic9/policy is not shipped",
        "shipped:arithmetic2/policy",
    ),
    (["policy_checkpoint=nowhere"], "checkpoint nowhere holds no config.json", "give a folder"),
    (["draft_checkpoint=nowhere"], "checkpoint nowhere holds no config.json", "give a folder"),
]

CONFIG_FILES = {
    "raises": ("def get_config():\n    return 1 / 0\n", ":2: ZeroDivisionError: division by zero"),
    "impossible": (
        "from draftco_jax.config import EvaluationConfig\nEvaluationConfig(prompts=0)\n",
        ":2: prompts=0 must be >= 1; 256",
    ),
    "not Python": ("def get_config(:\n", ":1: SyntaxError"),
    "no get_config": ("steps = 3\n", " must define a function get_config() that returns a RunConfig"),
    "another type": ("def get_config():\n    return 3\n", ": get_config() must return a RunConfig, it gave a int"),
}


@pytest.fixture
def refused(command, tree, tmp_path):
    """Runs `draftco train` with these arguments; the line of its refusal, after the checks that hold for all."""

    def run(*arguments) -> str:
        before = tree(tmp_path)
        done = command("train", *arguments)
        assert done.code == 2, done
        assert done.out == "" and done.err.startswith("draftco: ") and done.err.count("\n") == 1, done
        assert tree(tmp_path) == before
        return done.err

    return run


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize(("settings", "said"), [(case[0], case[1:]) for case in BAD_SETTINGS])
def test_a_setting_is_refused_before_anything_is_made(settings, said, refused, small_options, run_dir):
    line = refused(*small_options(*settings), "--run-dir", run_dir)
    assert all(words in line for words in said), line


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_config_file_is_refused(name, refused, tmp_path, run_dir):
    text, said = CONFIG_FILES[name]
    file = tmp_path / "config.py"
    file.write_text(text)
    line = refused("--config", file, "--run-dir", run_dir)
    assert f"{file}{said}" in line, line


def test_a_missing_config_file_is_refused(refused, tmp_path, run_dir):
    assert f"--config {tmp_path / 'none.py'}: there is no such file" in refused(
        "--config", tmp_path / "none.py", "--run-dir", run_dir
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def fill(path: Path) -> None:
    path.write_bytes(b"\x00\xff garbage " * 20)


NO_WEIGHTS = {
    "policy": "holds neither model.safetensors nor model.safetensors.index.json",
    "draft": "does not exist; give a folder that holds model.safetensors",
}
DAMAGED_WEIGHTS = {"policy": "cut short", "draft": "cannot be read"}


@pytest.mark.parametrize("part", ["policy", "draft"])
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", Path.unlink, NO_WEIGHTS),
        ("model.safetensors", cut, DAMAGED_WEIGHTS),
        ("model.safetensors", fill, DAMAGED_WEIGHTS),
        ("config.json", Path.unlink, "holds no config.json; give a folder in Hugging Face layout"),
        ("config.json", cut, "is not JSON"),
        ("config.json", fill, "is not JSON"),
    ],
)
def test_a_damaged_model_is_refused(part, name, damage, said, refused, small_options, tmp_path, run_dir):
    folder = tmp_path / part
    shutil.copytree(resolve_checkpoint(f"shipped:arithmetic2/{part}"), folder)
    damage(folder / name)
    line = refused(*small_options(f"{part}_checkpoint={folder}"), "--run-dir", run_dir)
    assert str(folder) in line and (said if isinstance(said, str) else said[part]) in line


def test_a_directory_that_is_no_run_is_refused(refused, small_options, run_dir):
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    for more in ((), ("--resume",)):
        line = refused(*small_options(), "--run-dir", run_dir, *more)
        assert f"run_dir={run_dir} exists and is not a run; choose a new or empty directory" in line


def test_a_file_in_the_place_of_the_run_directory_is_refused(refused, small_options, run_dir):
    run_dir.write_text("mine")
    assert f"run_dir={run_dir} exists and is not a run" in refused(*small_options(), "--run-dir", run_dir)
    line = refused(*small_options(), "--run-dir", run_dir / "below")
    assert f"run_dir={run_dir / 'below'} cannot be made" in line and "choose another directory" in line


OFF = "speculation=off"


def test_the_directory_of_another_config_is_refused(refused, small_options, unfinished_copy):
    run_dir = unfinished_copy("off")
    for more in ((), ("--resume",)):
        line = refused(*small_options(OFF, "seed=7"), "--run-dir", run_dir, *more)
        assert f"run_dir={run_dir} holds a run of another config (seed: 0 -> 7)" in line
        assert "choose another run directory" in line


def test_a_run_is_continued_only_on_demand(refused, small_options, unfinished_copy):
    run_dir = unfinished_copy("off")
    line = refused(*small_options(OFF), "--run-dir", run_dir)
    assert f"run_dir={run_dir} already holds this run; add --resume" in line


@pytest.mark.parametrize("damage", [cut, fill])
def test_an_unreadable_saved_config_is_refused(damage, refused, small_options, unfinished_copy):
    run_dir = unfinished_copy("off")
    damage(run_dir / "config.json")
    line = refused(*small_options(OFF), "--run-dir", run_dir, "--resume")
    assert f"{run_dir / 'config.json'} is not JSON" in line and "choose another run directory" in line


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


CHECKPOINT_DAMAGE = {
    "cut largest file": lambda step: cut(largest(step)),
    "missing largest file": lambda step: largest(step).unlink(),
    "one flipped bit": lambda step: flip(largest(step)),
    "garbage in the metadata of the step": lambda step: fill(step / "_CHECKPOINT_METADATA"),
    "garbage in the metadata of the arrays": lambda step: fill(step / "state" / "_METADATA"),
    "missing metadata of the arrays": lambda step: (step / "state" / "_METADATA").unlink(),
    "cut index of the arrays": lambda step: cut(step / "state" / "manifest.ocdbt"),
    "empty data position": lambda step: (step / "record" / "metadata").write_text("{}"),
    "missing arrays": lambda step: shutil.rmtree(step / "state"),
    "cut checksums": lambda step: cut(step / "checksums.json"),
}


@pytest.mark.parametrize("name", CHECKPOINT_DAMAGE)
def test_a_damaged_checkpoint_is_refused(name, refused, small_options, unfinished_copy):
    run_dir = unfinished_copy("off")
    step = run_dir / "checkpoints" / "6"
    CHECKPOINT_DAMAGE[name](step)
    line = refused(*small_options(OFF), "--run-dir", run_dir, "--resume")
    assert f"checkpoint {step} is damaged (" in line
    assert "delete that folder to resume from step 4" in line


def test_damage_of_the_only_checkpoint_tells_to_start_over(refused, small_options, unfinished_copy):
    run_dir = unfinished_copy("off")
    shutil.rmtree(run_dir / "checkpoints" / "4")
    cut(largest(run_dir / "checkpoints" / "6"))
    line = refused(*small_options(OFF), "--run-dir", run_dir, "--resume")
    assert "delete that folder to start over" in line


def test_a_broken_line_in_the_metrics_is_refused(refused, small_options, unfinished_copy):
    run_dir = unfinished_copy("off")
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 2', '"step": ', 1))
    line = refused(*small_options(OFF), "--run-dir", run_dir, "--resume")
    assert f"{metrics}:3: not a JSON object" in line and "repair or remove that line" in line


def test_a_process_of_its_own_refuses_in_one_line_too(small_options, environment, unfinished_copy, tree):
    run_dir = unfinished_copy("off")
    cut(largest(run_dir / "checkpoints" / "6"))
    before = tree(run_dir)
    command = [sys.executable, "-m", "draftco_jax.cli", "train", *small_options(OFF), "--run-dir", run_dir, "--resume"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("draftco: checkpoint ") and done.stderr.count("\n") == 1, done
    assert tree(run_dir) == before


def test_the_saved_config_is_the_one_that_was_given(finished):
    config, run_dir, _ = finished("off")
    saved = json.loads((run_dir / "config.json").read_text())
    assert from_json(type(config), saved, config_registry()) == config
