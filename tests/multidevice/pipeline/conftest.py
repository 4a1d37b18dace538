"""Shares the module of cases; files of tests are imported alone, so they cannot import one another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from draftco_jax.pipeline import stages


@pytest.fixture(scope="session")
def cases():
    """The module `cases.py`."""
    name = "pipeline_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("cases.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def setup_of(cases):
    """(draft family or None, layers) -> Setup; each is made, and its one-device update compiled, once."""
    made = {}

    def get(name, layers=8):
        if (name, layers) not in made:
            policy = cases.dense(layers)
            made[name, layers] = cases.Setup(policy, None if name is None else cases.draft_configs(policy)[name])
        return made[name, layers]

    return get


@pytest.fixture
def nan_before_the_first_tick(monkeypatch):
    """Everything that a stage has received, saved or kept for the draft before the first tick is NaN."""
    start = stages._Pipeline._start  # noqa: SLF001

    def poisoned(pipeline):
        def one(x):
            return x + jnp.asarray(jnp.nan, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        carry = start(pipeline)
        return jax.tree.map(one, carry._replace(result=None))._replace(result=carry.result)

    monkeypatch.setattr(stages._Pipeline, "_start", poisoned)  # noqa: SLF001
