"""A weight as the kernel reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

WIDTH = 16
"""Columns of a panel: two vectors of 8 floats; part of the layout, so native.cc has the same."""


@partial(jax.tree_util.register_dataclass, data_fields=("panels",), meta_fields=("columns",))
@dataclass(frozen=True)
class PackedWeight:
    """W[K, N] in panels of 16 columns; those after N are zeros."""

    panels: Any
    """f32[P, K, 16], P = ceil(N / 16); whatever stands for an array in the pytree."""
    columns: int
    """N."""
