"""Kernel ops are tested by contract: one set of tests, run by every implementation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dense():
    """The float64 reference, a module of functions."""
    spec = importlib.util.spec_from_file_location("dense_attention", Path(__file__).with_name("dense_attention.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
