"""Checks every file in configs/: it loads, it can be saved, it is one expression of choices."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "configs"
CONFIGS = sorted(FOLDER.glob("*.py"))


def test_there_are_configs():
    assert CONFIGS, f"no config file in {FOLDER}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_can_be_saved_as_json(path):
    from draftco_jax.config import load_config
    from draftco_jax.config_io import to_json
    from draftco_jax.pretrain_config import load_pretrain_config

    # The name says which command a file is for.
    pretrains = path.stem.startswith("pretrain_")
    config = (load_pretrain_config if pretrains else load_config)(path, [])
    saved = json.loads(json.dumps(to_json(config), allow_nan=False))
    assert saved["type"] == ("PretrainConfig" if pretrains else "RunConfig")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_has_no_control_flow_and_reads_nothing(path):
    tree = ast.parse(path.read_text())
    branches = (ast.For, ast.While, ast.If, ast.IfExp, ast.Try, ast.With, ast.Lambda)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, branches)]
    reads = {"open", "environ", "getenv", "read_text", "exec", "eval"}
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not words & reads
