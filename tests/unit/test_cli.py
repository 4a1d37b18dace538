"""Checks the `draftco` command: closed options, one-line refusals, exit codes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from draftco_jax import cli
from draftco_jax.errors import UserError

# A new setting goes into a config dataclass, where --set reaches it; a new option needs a line here.
OPTIONS = {
    "train": {"--config", "--set", "--run-dir", "--resume"},
    "pretrain-draft": {"--config", "--set", "--run-dir", "--resume"},
    "config": {"--config", "--set"},
    "report": {"run_dir"},
    "generate": {"model", "--prompts", "--format", "--out", "--draft", "--dtype", "--slots", "--set"},
    "bench": {
        "name",
        "--set",
        "--json",
        "--plot",
        "--ranks",
        "--fast",
        "--plots",
        "--policy",
        "--prompts",
        "--held-out",
        "--minutes",
        "--run-dir",
    },
    "convert": {"source", "out", "--dtype", "--kind", "--max-shard-size", "--draft-family", "--step"},
    "shards": {"model", "axes", "--dtype", "--json"},
    "plan": {
        "--draw-schedule",
        "--schedule",
        "--stages",
        "--chunks",
        "--microbatches",
        "--tap-stages",
        "--tensor",
        "--svg",
        "--json",
    },
    "doctor": {"model_dir", "--json"},
}


@dataclass(frozen=True)
class ToyConfig:
    steps: int = 3


@pytest.fixture
def library(monkeypatch):
    """Stands for the modules the command calls; records what they were asked for."""
    calls = []

    def module(name, **functions):
        made = types.ModuleType(f"draftco_jax.{name}")
        vars(made).update(functions)
        monkeypatch.setitem(sys.modules, f"draftco_jax.{name}", made)

    def load_config(path, overrides):
        calls.append(("load_config", str(path), overrides))
        return ToyConfig()

    module("config", load_config=load_config)
    module("loop", train=lambda config, run_dir, *, resume: calls.append(("train", config, str(run_dir), resume)))
    module("pretrain_config", load_pretrain_config=load_config)
    summary = {"accepted_length": {"untrained": 1.04, "end": 4.5}}
    pretrain = lambda config, run_dir, *, resume: calls.append(("pretrain", config, str(run_dir), resume)) or summary  # noqa: E731
    module("pretrain", DRAFT_FOLDER="draft", pretrain=pretrain)
    module("report", write_report=lambda run_dir: calls.append(("report", str(run_dir))))
    return calls


def subparsers():
    actions = cli.build_parser()._actions
    (choices,) = [action.choices for action in actions if isinstance(action, argparse._SubParsersAction)]
    return choices


def test_the_command_line_is_closed():
    found = {
        name: {word for action in parser._actions for word in action.option_strings or [action.dest]} - {"-h", "--help"}
        for name, parser in subparsers().items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_help_shows_an_example_the_parser_accepts(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    example = capsys.readouterr().out.split("example:")[1].split()
    assert example[:2] == ["draftco", name]
    cli.build_parser().parse_args(example[1:])


def test_train_calls_the_library_and_ends_with_where_the_results_are(library, capsys):
    assert cli.main(["train", "--config", "configs/a.py", "--set", "x=1", "--set", "y.z=2"]) == 0
    assert library == [("load_config", "configs/a.py", ["x=1", "y.z=2"]), ("train", ToyConfig(), "runs/a", False)]
    assert "runs/a/report.html" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["train", "--config", "configs/a.py", "--run-dir", "elsewhere", "--resume"]) == 0
    assert library[-1] == ("train", ToyConfig(), "elsewhere", True)


def test_pretrain_draft_calls_the_library_and_ends_with_how_to_use_the_draft(library, capsys):
    assert cli.main(["pretrain-draft", "--config", "configs/a.py", "--set", "x=1"]) == 0
    assert library == [("load_config", "configs/a.py", ["x=1"]), ("pretrain", ToyConfig(), "runs/a", False)]
    assert capsys.readouterr().out.splitlines()[-1].endswith("--set draft_checkpoint=runs/a/draft")
    assert cli.main(["pretrain-draft", "--config", "configs/a.py", "--run-dir", "elsewhere", "--resume"]) == 0
    assert library[-1] == ("pretrain", ToyConfig(), "elsewhere", True)


def test_config_prints_json(library, capsys):
    assert cli.main(["config", "--config", "configs/a.py"]) == 0
    assert json.loads(capsys.readouterr().out) == {"type": "ToyConfig", "steps": 3}


def test_report_calls_the_library(library):
    assert cli.main(["report", "runs/a"]) == 0
    assert library == [("report", "runs/a")]


def test_doctor_prints_versions_and_writes_json(tmp_path, capsys):
    assert cli.main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["packages"]["jax"] in capsys.readouterr().out
    assert found["devices"][0].startswith("cpu:0") and found["devices_error"] is None
    assert cli.main(["doctor", "--json", str(tmp_path / "missing" / "doctor.json")]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "draftco --help"),
        (["trian"], "'train'"),
        (["train"], "--config"),
        (["train", "--config", "a.py", "--steps", "3"], "--steps"),
        (["train", "--conf", "a.py"], "--config"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("draftco: ") and said in captured.err


@pytest.mark.parametrize(("error", "code"), [(UserError("steps=0 must be positive"), 2), (KeyboardInterrupt(), 130)])
def test_exit_codes_of_a_failing_run(error, code, library, monkeypatch, capsys):
    def train(config, run_dir, *, resume):
        raise error

    monkeypatch.setattr(sys.modules["draftco_jax.loop"], "train", train)
    assert cli.main(["train", "--config", "a.py"]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "Results" not in captured.out
    assert str(error) in captured.err


def test_a_bug_is_not_hidden(library, monkeypatch):
    monkeypatch.setattr(sys.modules["draftco_jax.loop"], "train", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", "--config", "a.py"])


def test_help_does_not_import_jax():
    program = """
import sys
from draftco_jax import cli
try:
    cli.main(["--help"])
except SystemExit:
    sys.exit(" ".join({"jax", "numpy", "flax"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
