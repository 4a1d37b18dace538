"""What the Pallas kernels of the op share: padding to whole tiles, the call, and where they refuse to run.

The kernel bodies use only jnp and lax on references, so one body is compiled by Triton and interpreted on a CPU.
Letters beside those of `records.py`: A query tiles, B key tiles, t queries of a tile, u keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int32, Shaped

from pallas_kernels.block_attention.records import KeyRange
from pallas_kernels.block_attention.reference import NO_KEY, pad, tile_bounds
from pallas_kernels.block_attention.tuning import MIN_BLOCK, Blocks
from pallas_kernels.gpu import check_interpreter, check_sizes, check_target, power_above, target_platform
from pallas_kernels.manual_axes import varying_axes

LOG2_E = math.log2(math.e)
"""Scores are kept in base 2, as the hardware's exp is: exp(s) = exp2(s * LOG2_E)."""

DTYPES = ("bfloat16", "float16", "float32")


class Tiles:
    """One call cut into tiles: sizes, padded inputs, and which tiles of keys a tile of queries sees.

    Tiles shrink to the next power of two of a short side. What padding adds is never seen: a padded query has an empty
    range, a padded key the index NO_KEY. A head width that is not a power of two is padded with zeros, in memory: that
    costs a copy of q, k and v (80 becomes 128) and none where the width is one already.
    """

    def __init__(self, q: Array, k: Array, seen: KeyRange, key_index: Int32[Array, " Tk"], blocks: Blocks) -> None:
        self.rows, self.count_q, self.heads, self.width = q.shape
        self.count_k, self.kv_heads = k.shape[1], k.shape[2]
        self.group = self.heads // self.kv_heads
        self.t = min(blocks.block_q, _side(self.count_q))
        self.u = min(blocks.block_k, _side(self.count_k))
        self.tiles_q = max(pl.cdiv(self.count_q, self.t), 1)
        self.tiles_k = max(pl.cdiv(self.count_k, self.u), 1)
        self.padded_q, self.padded_k = self.tiles_q * self.t, self.tiles_k * self.u
        self.padded_width = _side(self.width)
        self.first = pad(seen.first, 1, self.padded_q, 1)
        self.last = pad(seen.last, 1, self.padded_q, 0)
        self.index = pad(key_index, 0, self.padded_k, NO_KEY)
        shape = (self.rows, self.tiles_q, self.t)
        self.low, self.high = tile_bounds(
            self.first.reshape(shape), self.last.reshape(shape), self.index.reshape(self.tiles_k, self.u)
        )

    def queries(self, x: Shaped[Array, "R Tq N H"]) -> Shaped[Array, "R Aq N Hp"]:
        """Whole tiles of queries, or of what has their shape."""
        return pad(pad(x, 1, self.padded_q), 3, self.padded_width)

    def keys(self, x: Shaped[Array, "R Tk K H"]) -> Shaped[Array, "R Bu K Hp"]:
        """Whole tiles of keys or values."""
        return pad(pad(x, 1, self.padded_k), 3, self.padded_width)

    def statistic(self, x: Float[Array, "R Tq N"]) -> Float[Array, "R N Aq"]:
        """A number of each query and head, tokens last: a tile then reads one run of memory, not one word a row."""
        return pad(x.transpose(0, 2, 1), 2, self.padded_q)

    def query_specs(self) -> list[pl.BlockSpec]:
        """Of q, k, v, first, last, index, low, high where a program has a tile of queries: grid (tile, head, row)."""
        group = self.group
        tokens = pl.BlockSpec((None, self.t, None, self.padded_width), lambda a, n, r: (r, a, n, 0))
        keys = pl.BlockSpec(
            (None, self.padded_k, None, self.padded_width), lambda a, n, r: (r, 0, lax.div(n, jnp.int32(group)), 0)
        )
        seen = pl.BlockSpec((None, self.t), lambda a, n, r: (r, a))
        index = pl.BlockSpec((self.padded_k,), lambda a, n, r: (0,))
        bound = pl.BlockSpec((None, None), lambda a, n, r: (r, a))
        return [tokens, keys, keys, seen, seen, index, bound, bound]

    def key_specs(self) -> list[pl.BlockSpec]:
        """Of the same where a program has a tile of keys: grid (tile, key-value head, row)."""
        queries = pl.BlockSpec((None, self.padded_q, self.group, self.padded_width), lambda b, h, r: (r, 0, h, 0))
        tokens = pl.BlockSpec((None, self.u, None, self.padded_width), lambda b, h, r: (r, b, h, 0))
        seen = pl.BlockSpec((None, self.padded_q), lambda b, h, r: (r, 0))
        index = pl.BlockSpec((self.u,), lambda b, h, r: (b,))
        bound = pl.BlockSpec((None, None), lambda b, h, r: (r, b))
        return [queries, tokens, tokens, seen, seen, index, bound, bound]

    def query_tiles_of_keys(self) -> tuple[Int32[Array, "R B"], Int32[Array, "R B"]]:
        """Tiles from..to-1 of queries that hold all tiles of queries that see a tile of keys; (0, 0) if none does."""
        b = jnp.arange(self.tiles_k, dtype=jnp.int32)[None, None, :]
        sees = (self.low[:, :, None] <= b) & (b < self.high[:, :, None])
        a = jnp.arange(1, self.tiles_q + 1, dtype=jnp.int32)[None, :, None]
        end = jnp.max(jnp.where(sees, a, 0), axis=1)
        return jnp.minimum(jnp.min(jnp.where(sees, a - 1, NO_KEY), axis=1), end), end


def call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, int, int],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shapes: Sequence[tuple[int, ...]],
    like: Array,
    blocks: Blocks,
    interpret: bool,
) -> Callable[..., Any]:
    """The kernel as a function of arrays, with float32 results that vary over the mesh axes `like` varies over."""
    axes = jax.typeof(like).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes) for shape in out_shapes],
        # Always given: what None means differs between versions of JAX.
        compiler_params=triton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
    )


def check(interpret: bool, *inputs: Array) -> None:
    """Refuses what these kernels cannot do, where they would be wrong or fail late."""
    for x in inputs:
        if str(x.dtype) not in DTYPES:
            raise ValueError(f"dtype={x.dtype} must be one of {DTYPES} for pallas; use implementation='blockwise'")
        if x.dtype != inputs[0].dtype:
            raise ValueError(f"dtypes={x.dtype, inputs[0].dtype} of d_out and q must be equal; cast d_out first")
    check_sizes(**dict(zip(("q", "k", "v", "d_out"), (x.shape for x in inputs), strict=False)))
    if interpret:
        check_interpreter(varying_axes(*inputs))
    else:
        check_target("pallas", target_platform())


def dot(a: Array, b: Array, over: tuple[int, int]) -> Float[Array, "m n"]:
    """Product of two matrices, summed over axis over[0] of a and over[1] of b, in float32.

    HIGHEST makes float32 inputs float32 products; a GPU would round them to TF32 (10 bits) otherwise. Products of
    bfloat16 are exact in either case.
    """
    axes = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def sees(first: Int32[Array, "#t #u"], last: Int32[Array, "#t #u"], index: Int32[Array, "#t #u"]) -> Bool[Array, "t u"]:
    """Which keys lie in the range of which query."""
    return (index >= first) & (index <= last)


def _side(size: int) -> int:
    """Length of a side of a tile that holds `size`."""
    return max(MIN_BLOCK, power_above(size))
