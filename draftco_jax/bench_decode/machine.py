"""On what it was measured."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("draftco", "jax", "jaxlib", "flax", "numpy", "torch", "transformers")
_CPU_INFO = Path("/proc/cpuinfo")


def load_average() -> float | None:
    """Of the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe_machine(load_before: float | None) -> dict[str, Any]:
    """Hardware, versions, date, and how busy the machine was before and is now."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "device": jax.devices()[0].device_kind,
            "load_before": load_before,
            "load_after": load_average(),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
