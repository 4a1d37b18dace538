"""The axes of the mesh, and the mesh itself.

    data      rows of a batch; optimizer state
    stage     layers, one stretch of them after the other
    context   tokens of a row
    expert    rows of a batch too; the experts of a mixture
    tensor    heads, hidden widths and the vocabulary; tokens are the same on all its ranks

An axis of size 1 costs nothing, and an axis may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from draftco_jax.errors import UserError


class MeshAxis(StrEnum):
    """Names, slowest to fastest: ranks of a tensor axis are neighbours."""

    DATA = "data"
    STAGE = "stage"
    CONTEXT = "context"
    EXPERT = "expert"
    TENSOR = "tensor"


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of these sizes, axes in the order of `MeshAxis`, over the first devices that it takes.

    Raises:
        ValueError: an unknown axis, a size below 1, or fewer devices than the product of the sizes.
        UserError: several CPU devices where JAX keeps compiled programs on disk.
    """
    unknown = sorted(set(sizes) - set(MeshAxis))
    if unknown:
        raise ValueError(f"axes={unknown} must be among {[str(axis) for axis in MeshAxis]}; rename them")
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"{axis}={size} must be >= 1; leave the axis out for 1")
    axes = [axis for axis in MeshAxis if axis in sizes]
    devices = jax.devices() if devices is None else devices
    count = prod(sizes[axis] for axis in axes)
    if count > len(devices):
        raise ValueError(f"sizes={dict(sizes)} take {count} devices but there are {len(devices)}; use smaller sizes")
    _check_compilation_cache(devices[:count])
    shape = [sizes[axis] for axis in axes]
    return Mesh(np.array(devices[:count]).reshape(shape), tuple(str(axis) for axis in axes))


def _check_compilation_cache(devices: Sequence[Any]) -> None:
    """A pipelined update over stages and context that XLA's CPU had loaded from disk gave NaN in some calls and never
    ended in others; compiled in the same process it did neither (jax 0.10.2 and 0.11; the cause is not known)."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    in_use = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    if len(devices) > 1 and devices[0].platform == "cpu" and folder and in_use:
        raise UserError(
            f"jax_compilation_cache_dir={folder} must not be in use with a mesh of {len(devices)} CPU devices: XLA "
            "computes wrong numbers with what it loads from there; set JAX_ENABLE_COMPILATION_CACHE=0"
        )
