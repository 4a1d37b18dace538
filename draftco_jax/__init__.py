"""draftco: GRPO with lossless speculative rollouts and a draft trained inside the policy's own update.

import draftco_jax as dc

config = dc.load_config("configs/grpo_arithmetic2_eagle3_cpu.py", ["steps=20"])
dc.train(config, "runs/mine")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftco_jax.config import RunConfig, load_config
    from draftco_jax.errors import UserError
    from draftco_jax.loop import train

__all__ = ["RunConfig", "UserError", "load_config", "train"]

_HOMES = {
    "RunConfig": "draftco_jax.config",
    "UserError": "draftco_jax.errors",
    "load_config": "draftco_jax.config",
    "train": "draftco_jax.loop",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `draftco --help` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
