"""Finds the compiler for GPUs that `make setup` puts beside the environment, and lets JAX have it.

The wheels lie in a folder of their own, <environment>/deviceless, which no other part of the program looks at: with
them on the usual path JAX would try to start a GPU in every session and say that it cannot.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

FOLDER_NAME = "deviceless"
WAY_OUT = "run `make setup`, which installs it"


def folder() -> Path:
    """Where the wheels are, or would be."""
    return Path(sys.prefix) / FOLDER_NAME


def available() -> bool:
    """Whether the compiler is installed."""
    return (folder() / "jax_plugins").is_dir()


def prepare() -> Path:
    """Put the folder on the path, last, so that whatever is installed properly is preferred.

    JAX looks for plugins once, when its backends start; call this (or any function of this package that compiles)
    before that.
    """
    if not available():
        raise RuntimeError(f"folder={folder()} must hold the compiler for GPUs; {WAY_OUT}")
    # There is no GPU and no CUDA library to check, and the plugin would report that as an error.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if str(folder()) not in sys.path:
        sys.path.append(str(folder()))
        _find_triton_runtime()
    return folder()


def _find_triton_runtime() -> None:
    """Let jaxlib look again for what jax-triton needs of the plugin: it looked when JAX was imported."""
    module = sys.modules.get("jaxlib.gpu_triton")
    if module is not None and not hasattr(module, "get_compute_capability"):
        importlib.reload(module)


def ptxas() -> Path:
    """NVIDIA's assembler from the same folder."""
    found = sorted(prepare().glob("nvidia/*/bin/ptxas"))
    if not found:
        raise RuntimeError(f"folder={folder()} must hold ptxas; {WAY_OUT}")
    return found[0]
