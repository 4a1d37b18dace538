"""Rows of states whose structure only their owner knows: which dim counts rows, and taking or replacing whole rows.

A state is any tree of arrays (of a policy's mixers, of a draft). The dim of an array that counts rows is the one whose
size differs between a state of two rows and one of three; arrays without such a dim belong to all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

Tree = TypeVar("Tree")

NO_ROWS = -1


def row_dims(make: Callable[[int], Any]) -> Any:
    """The same tree as `make(rows)` gives, of the dim that counts rows in each array; NO_ROWS without one."""
    two, three = (jax.eval_shape(lambda rows=rows: make(rows)) for rows in (2, 3))

    def dim(one: Any, other: Any) -> int:
        differing = [d for d, (m, n) in enumerate(zip(one.shape, other.shape, strict=True)) if m != n]
        return differing[0] if differing else NO_ROWS

    return jax.tree.map(dim, two, three)


def replaced(dims: Any, mask: Bool[Array, " B"], new: Tree, old: Tree) -> Tree:
    """Rows of `new` where the mask says so, of `old` elsewhere; what belongs to all rows is that of `old`."""

    def one(dim: int, fresh: Array, kept: Array) -> Array:
        if dim == NO_ROWS:
            return kept
        here = jnp.expand_dims(mask, [d for d in range(kept.ndim) if d != dim])
        return jnp.where(here, fresh, kept)

    return jax.tree.map(one, dims, new, old)


def taken(dims: Any, tree: Tree, rows: Int32[Array, " B"]) -> Tree:
    """The rows at these places; what belongs to all rows as it is."""
    return jax.tree.map(lambda dim, x: x if dim == NO_ROWS else jnp.take(x, rows, axis=dim), dims, tree)


def put_back(dims: Any, tree: Tree, rows: Int32[Array, " R"], new: Tree) -> Tree:
    """With these rows those of `new`, in its order; rows beyond the last are dropped, what belongs to all stays."""

    def one(dim: int, kept: Array, fresh: Array) -> Array:
        return kept if dim == NO_ROWS else kept.at[(slice(None),) * dim + (rows,)].set(fresh, mode="drop")

    return jax.tree.map(one, dims, tree, new)


def spoiled(dims: Any, mask: Bool[Array, " B"], tree: Tree) -> Tree:
    """NaN in all floats of the rows that the mask names, and the largest number in their integers."""

    def worst(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, jnp.nan)
        return jnp.full_like(x, True if x.dtype == bool else jnp.iinfo(x.dtype).max)

    return replaced(dims, mask, jax.tree.map(worst, tree), tree)
