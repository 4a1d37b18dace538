"""Kernel ops are tested by contract: one set of tests, run by every implementation."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest


def neighbour(name: str) -> ModuleType:
    """A module of this folder that is not a test; test files cannot import one another."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def dense():
    """The float64 reference, a module of functions."""
    return neighbour("dense_attention")


@pytest.fixture(scope="session", autouse=True)
def triton_on_cpu():
    """Triton's interpreter, in the process that test_branch_triton.py starts for it; elsewhere nothing."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        neighbour("triton_on_cpu").install()
