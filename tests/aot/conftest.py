"""Compiles for GPUs that are not there: a process of its own, since JAX looks for its plugins once."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import deviceless

HERE = Path(__file__).resolve().parent

os.environ.pop("XLA_FLAGS", None)  # those of the other rooms, which compile for the CPU in a hurry
if deviceless.available():
    deviceless.prepare()
# A program that comes out of the cache was not compiled here.
jax.config.update("jax_enable_compilation_cache", False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses to share a process with other tests, marks the rest, skips them where there is no compiler."""
    strangers = [item.nodeid for item in items if HERE not in item.path.resolve().parents]
    if strangers:
        raise pytest.UsageError(f"run tests/aot as its own process, not together with {strangers[0]}")
    for item in items:
        item.add_marker(pytest.mark.aot)
        if not deviceless.available():
            item.add_marker(pytest.mark.skip(reason=f"no compiler for GPUs in {deviceless.folder()}: run `make setup`"))


@pytest.fixture(scope="session")
def programs():
    """The module `programs.py`; files of tests are imported alone, so they cannot import one another."""
    name = "aot_programs"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("programs.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module
