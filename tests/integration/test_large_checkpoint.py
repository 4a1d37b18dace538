"""Checkpoints onto four devices: every device gets its slice, and the host never holds more than the promise."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("checkpoint_child.py")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read and reset through Linux's /proc"
)


def measure(layers, hidden, experts, shard_bytes, replicas):
    # Not pytest's folder, which is kept for three sessions.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, CHILD, folder, *map(str, (layers, hidden, experts, shard_bytes, replicas))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_device_gets_its_slice_and_no_byte_is_read_twice():
    # The child compares every shard with what was written, also after a computation that takes over the buffers. Two
    # replicas: what both hold is read once. Slices are 1 MiB: the size from which memory is that of the reader.
    report = measure(layers=1, hidden=1024, experts=4, shard_bytes=2**21, replicas=2)
    assert report["files"] > 2
    assert report["device_bytes"] > 2 * report["parameter_bytes"]
    assert report["bytes_read"] == report["parameter_bytes"]


@pytest.mark.slow
def test_two_gigabytes_need_their_own_size_and_less_than_two_shards():
    shard_bytes = 200_000_000
    report = measure(layers=15, hidden=4096, experts=8, shard_bytes=shard_bytes, replicas=1)
    print(json.dumps(report))  # shown with -s or on failure
    assert report["parameter_bytes"] > 2e9
    assert report["files"] >= 10
    assert report["bytes_read"] == report["parameter_bytes"]
    assert report["peak_of_loading"] < report["parameter_bytes"] + 2 * shard_bytes
    # Tighter: devices' own copies, and one array as it is read and as it is handed over.
    assert report["peak_of_loading"] < report["device_bytes"] + 2 * report["largest_array_bytes"]
    # A tensor as it is made (the child needs a second one for it) and nothing of the other tensors.
    assert report["peak_of_writing"] < 4 * report["largest_tensor_bytes"]
