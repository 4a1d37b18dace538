"""Describes the installation: versions, devices, accelerator plugins."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

PACKAGES = (
    "draftco",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "safetensors",
    "tokenizers",
)
GPU_PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-triton")


def describe_installation() -> dict[str, Any]:
    """What a bug report needs, as a JSON tree; a package that is not installed has version None.

    Starts the JAX backend. A backend that cannot start is part of the answer (``devices_error``), not an exception.
    """
    try:
        devices, error = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()], None
    except RuntimeError as refusal:
        devices, error = [], " ".join(str(refusal).split())
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu_packages": {name: _version(name) for name in GPU_PACKAGES},
        "cuda_plugin": _version("jax-cuda12-plugin") is not None,
        "devices": devices,
        "devices_error": error,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
