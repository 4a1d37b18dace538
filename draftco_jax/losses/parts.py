"""Folds over equal parts of an axis: tiles of a vocabulary, chunks of tokens.

No part is padded: the last one begins earlier if it would run over the end, and says which of its entries are new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped

from pallas_kernels.manual_axes import cast, varying_axes

Carry = TypeVar("Carry")
Tree = TypeVar("Tree")


def fold_parts(
    count: int, size: int, init: Carry, step: Callable[[Carry, Array | int, Bool[Array, " s"]], Carry], *, read: Any
) -> Carry:
    """Fold step(carry, start, fresh) over parts that cover 0..count - 1; `fresh` is False where a part before was.

    Not to be differentiated through: a rule that is written out calls it in both directions. A single part is no loop,
    so that the compiler can share what several folds make of it.

    Args:
        count: entries of the axis, >= 1.
        size: of a part, >= 1; smaller axes are one part.
        init: carry of the first step.
        step: makes the next carry of the same shapes and dtypes.
        read: all that the steps read; inside shard_map the carry differs over devices where any of it does.
    """
    if count <= size:
        return step(init, 0, jnp.ones(count, bool))

    def body(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        i, carry = state
        start = jnp.minimum(i * size, count - size)
        return i + 1, step(carry, start, start + jnp.arange(size, dtype=jnp.int32) >= i * size)

    # A while loop and not a scan: partial evaluation of a scan in a scan would pull out what depends on the inner part
    # alone, slices of the head and masks of [tokens, vocabulary], and keep them all.
    parts = jnp.int32(-(-count // size))
    axes = varying_axes(*jax.tree.leaves(read))
    init = jax.tree.map(lambda x: cast(x, axes), init)
    return lax.while_loop(lambda state: state[0] < parts, body, (jnp.int32(0), init))[1]


def part_of(tree: Tree, start: Array | int, size: int) -> Tree:
    """Entries start..start + size - 1 of the leading axis of every array."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tree)


def with_part(tree: Tree, part: Tree, start: Array | int) -> Tree:
    """The arrays with these entries written from `start` on."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, axis=0), tree, part)


def columns(kernel: Shaped[Array, "F V"], start: Array | int, size: int) -> Shaped[Array, "F s"]:
    """Columns start..start + size - 1."""
    return lax.dynamic_slice_in_dim(kernel, start, size, axis=1)
