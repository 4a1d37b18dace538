"""Types of arrays inside `shard_map(check_vma=True)`: which mesh axes a value varies over.

A loop carry made from nothing has the type "the same on all devices" and is refused where the loop body returns
something that differs. These helpers make fresh arrays and casts of the right type; outside shard_map, and under
check_vma=False, they change nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array


def varying_axes(*arrays: Array | None) -> frozenset[str]:
    """Mesh axes that at least one of these varies over."""
    found = [jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None]
    return frozenset().union(*found)


def cast(x: Array, axes: frozenset[str]) -> Array:
    """`x` as a value that varies over `axes` too. The transpose of this cast is a psum over the axes it added."""
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def checks_types(axis: str) -> bool:
    """Whether types say what varies over this axis: not under check_vma=False."""
    return axis in varying_axes(cast(jnp.zeros(()), frozenset((axis,))))


def fresh(shape: tuple[int, ...], value: float, dtype: DTypeLike, axes: frozenset[str]) -> Array:
    """A constant array that counts as varying over `axes`: the start of a loop carry."""
    return cast(jnp.full(shape, value, dtype), axes)
