"""Gives the session eight virtual CPU devices."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

HERE = Path(__file__).resolve().parent

jax.config.update("jax_num_cpu_devices", 8)
# `make_mesh` refuses it on CPUs: updates that were loaded and not compiled gave NaN now and then.
jax.config.update("jax_enable_compilation_cache", False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses to share a process with tests that expect one device, then marks the rest."""
    strangers = [item.nodeid for item in items if HERE not in item.path.resolve().parents]
    if strangers:
        raise pytest.UsageError(f"run tests/multidevice as its own process, not together with {strangers[0]}")
    for item in items:
        item.add_marker(pytest.mark.multidevice)
