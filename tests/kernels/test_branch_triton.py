"""The contract of the branch op, run by the kernels in Triton's language: a process with Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import deviceless

HERE = Path(__file__).resolve().parent
FILES = [str(HERE / name) for name in ("test_branch_attention.py", "test_branch_kernels.py")]


def test_kernels_in_tritons_language_keep_the_contract():
    if not (deviceless.folder() / "triton").is_dir():
        pytest.skip(f"no Triton in {deviceless.folder()}: run `make setup`")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "jax_triton or few or block", *FILES],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed.group(1)) >= 20 and "skipped" not in done.stdout, done.stdout
