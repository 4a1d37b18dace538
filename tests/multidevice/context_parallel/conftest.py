"""Shares the module of cases; files of tests are imported alone, so they cannot import one another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cases():
    """The module `cases.py`."""
    name = "context_parallel_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("cases.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module
