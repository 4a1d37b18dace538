"""A pipeline over two processes, stage 0 in one and stage 1 in the other, gives what one process gives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = Path(__file__).resolve().with_name("child.py")
SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(repository: Path, process: int, processes: int, port: int) -> subprocess.Popen:
    command = [sys.executable, str(CHILD), str(process), str(processes), str(port)]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def found_by(child: subprocess.Popen, deadline: float) -> dict[str, str]:
    try:
        child.wait(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pytest.fail(f"not ready after {SECONDS} s")
    assert child.stdout is not None and child.stderr is not None
    said, complaints = child.stdout.read(), child.stderr.read()
    lines = [line for line in said.splitlines() if line.startswith("RESULTS ")]
    assert child.returncode == 0 and len(lines) == 1, complaints[-2000:]
    return json.loads(lines[0].removeprefix("RESULTS "))


def test_two_processes_give_what_one_gives(repository):
    deadline = time.monotonic() + SECONDS
    port = free_port()
    children = []
    try:
        children = [start(repository, *which) for which in ((0, 1, port), (0, 2, port), (1, 2, port))]
        alone, *parts = (found_by(child, deadline) for child in children)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert {"policy/loss", "draft/loss", "policy/squared_norm", "draft/squared_norm"} <= alone.keys()
    assert float(alone["draft/squared_norm"]) > 0
    assert float(alone["pipeline/wrong_stamps"]) == 0
    assert parts[0] == parts[1], "both hold the same results, to the last digit"
    assert parts[0] == alone
