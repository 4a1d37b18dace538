"""Rows that lie group by group, each group times its own kernel: two ways, one result.

    ragged_dot   `jax.lax.ragged_dot`. In jax 0.10 and 0.11 only the compiler for TPU has a grouped matmul for it; for
                 CPU and GPU it becomes one dense matmul over a copy of the rows for every group, which costs E times
                 the arithmetic and E times the memory of the rows (compiled for H100: 16 GiB beside 0.9 GiB of
                 arguments at M = 32768, K = 2048, N = 1536, E = 128; 56 GiB in the backward pass).
    blocks       a loop over blocks of at most `BLOCK_ROWS` rows of one group: no more work than the rows make, groups
                 without rows are not read, memory for one block. The matmuls run one after the other.

Letters: M rows, E groups, I and O the widths of a kernel, b rows of a block.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32

from pallas_kernels.manual_axes import cast, fresh, varying_axes

GroupedMatmul = Literal["ragged_dot", "blocks"]
BLOCK_ROWS = 128


def grouped_matmul(
    rows: Float[Array, "M I"],
    kernels: Float[Array, "E I O"] | Int8[Array, "E I O"],
    sizes: Int32[Array, " E"],
    way: GroupedMatmul,
) -> Float32[Array, "M O"]:
    """rows of group e @ kernels[e], in the dtype of the rows, accumulated and returned in float32.

    What comes back for rows after the last group, and their gradient, has no meaning. Kernels of int8, which have no
    gradient, are cast block by block, so that there is no second copy of all experts; with ragged_dot there is.
    """
    if way == "ragged_dot" or kernels.dtype != jnp.int8:
        kernels = kernels.astype(rows.dtype)
    if way == "ragged_dot":
        return jax.lax.ragged_dot(rows, kernels, sizes, preferred_element_type=jnp.float32)
    # A custom gradient gives each input the type of that input: so all are of one type before it.
    axes = varying_axes(rows) | varying_axes(kernels) | varying_axes(sizes)
    return _by_blocks(*(cast(array, axes) for array in (rows, kernels, sizes)))


class Blocks(NamedTuple):
    """Where the blocks lie: each group is split every `limit` rows, so that only its last block may be shorter."""

    starts: jax.Array  # i32[E] first row of each group
    ends: jax.Array  # i32[E] one after its last
    counted: jax.Array  # i32[E] blocks of this group and of those before it

    @classmethod
    def of(cls, sizes: Int32[Array, " E"], limit: int) -> Blocks:
        """Of groups of these sizes, one after the other."""
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        return cls(ends - sizes, ends, jnp.cumsum((sizes + (limit - 1)) // limit, dtype=jnp.int32))

    def at(self, number: Int32[Array, ""], limit: int) -> tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]:
        """Group of block `number`, its first row, and how many of `limit` rows are the group's."""
        group = jnp.sum(self.counted <= number, dtype=jnp.int32)
        before = jnp.where(group > 0, self.counted[jnp.maximum(group - 1, 0)], 0)
        start = self.starts[group] + (number - before) * limit
        return group, start, self.ends[group] - start


def _limit(rows: int) -> int:
    return min(BLOCK_ROWS, max(rows, 1))


def _multiply(rows: Array, kernels: Array, sizes: Array) -> Float32[Array, "M O"]:
    """The forward loop. What a block writes after its group's end is written over by the next one."""
    count, limit = rows.shape[0], _limit(rows.shape[0])
    blocks = Blocks.of(sizes, limit)
    padded = jnp.pad(rows, ((0, limit), (0, 0)))

    def step(number: Array, out: Array) -> Array:
        group, start, _ = blocks.at(number, limit)
        block = jax.lax.dynamic_slice_in_dim(padded, start, limit)
        kernel = jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)
        made = jnp.matmul(block, kernel.astype(block.dtype), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, made, start, axis=0)

    out = fresh((count + limit, kernels.shape[2]), 0.0, jnp.float32, varying_axes(rows))
    return jax.lax.fori_loop(0, blocks.counted[-1], step, out)[:count]


def _kernel_gradient(rows: Array, c: Array, sizes: Array) -> Float32[Array, "E I O"]:
    """Of each group, transposed rows @ c, added up in float32."""
    limit = _limit(rows.shape[0])
    blocks = Blocks.of(sizes, limit)
    rows, c = (jnp.pad(array, ((0, limit), (0, 0))) for array in (rows, c))

    def step(number: Array, total: Array) -> Array:
        group, start, left = blocks.at(number, limit)
        own = (jnp.arange(limit, dtype=jnp.int32) < left)[:, None]
        x, by = (jax.lax.dynamic_slice_in_dim(array, start, limit) for array in (rows, c))
        # Both: 0 times what a row of no group holds could be NaN.
        x, by = (jnp.where(own, array, jnp.zeros_like(array)) for array in (x, by))
        return total.at[group].add(jnp.matmul(x.T, by, preferred_element_type=jnp.float32))

    total = fresh((sizes.shape[0], rows.shape[1], c.shape[1]), 0.0, jnp.float32, varying_axes(rows))
    return jax.lax.fori_loop(0, blocks.counted[-1], step, total)


@jax.custom_vjp
def _by_blocks(rows: Array, kernels: Array, sizes: Array) -> Float32[Array, "M O"]:
    return _multiply(rows, kernels, sizes)


def _forward(rows: Array, kernels: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _multiply(rows, kernels, sizes), (rows, kernels, sizes)


def _backward(kept: tuple[Array, Array, Array], c: Array) -> tuple[Array, Array, None]:
    rows, kernels, sizes = kept
    c = c.astype(rows.dtype)  # matmuls in the dtype of the rows, as forward
    by_rows = _multiply(c, jnp.swapaxes(kernels, 1, 2), sizes)
    return by_rows.astype(rows.dtype), _kernel_gradient(rows, c, sizes).astype(kernels.dtype), None


_by_blocks.defvjp(_forward, _backward)
