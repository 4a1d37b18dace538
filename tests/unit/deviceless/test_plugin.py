"""What is said where the compiler is missing or asked for something it does not know."""

from __future__ import annotations

import pytest

from pallas_kernels.deviceless import gpu_target, gpu_topology, plugin


def test_a_missing_folder_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin.sys, "prefix", str(tmp_path))
    assert not plugin.available()
    with pytest.raises(RuntimeError, match=r"^folder=\S+ must hold the compiler for GPUs; run `make setup`.*$"):
        gpu_topology("h100")


def test_unknown_gpus_and_uneven_hosts_are_refused():
    with pytest.raises(ValueError, match="kind='v100' must be one of"):
        gpu_target("v100")
    with pytest.raises(ValueError, match="devices=9 must be a multiple of hosts=2"):
        gpu_topology("h100", devices=9, hosts=2)


def test_targets_differ_where_the_chips_do():
    h100, h200, b200, a100 = (gpu_target(kind) for kind in ("h100", "h200", "b200", "a100"))
    assert h200.memory_bytes > h100.memory_bytes and h200.cores == h100.cores
    assert (h100.capability, b200.capability, a100.capability) == (9, 10, 8)
    assert "ACCELERATED_FEATURES" in h100.text() and "ACCELERATED_FEATURES" not in a100.text()
