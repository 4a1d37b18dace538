"""Named shapes of the branch op that people run: what the benchmark, the notebook and the compile tests look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.branch_attention.records import Rule
from pallas_kernels.branch_attention.tuning import Dims


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call of the op."""

    dims: Dims
    rule: Rule
    dtype_name: Literal["bfloat16", "float32"] = "bfloat16"

    @property
    def dtype(self) -> jnp.dtype:
        """Of queries, keys and values."""
        return jnp.dtype(self.dtype_name)

    def minimum_bytes(self) -> tuple[int, int]:
        """(forward, backward): every input read once and every output written once; sinks left out.

        Forward: q, out of the trunk (float32) and its lse, keys, values, live; out and lse. Backward: q, dout, lse,
        delta, keys, values, live; dq, dk, dv (float32).
        """
        d, size = self.dims, self.dtype.itemsize
        queries = d.branches * d.queries * d.heads
        keys = d.branches * d.keys * d.kv_heads * d.width
        wide, live = queries * d.width, 4 * d.branches
        forward = wide * (2 * size + 4) + 2 * 4 * queries + 2 * size * keys + live
        backward = wide * (2 * size + 4) + 2 * 4 * queries + 2 * (size + 4) * keys + live
        return forward, backward


def _shape(
    branches: int,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    width: int,
    rule: Rule = "all",
    dtype_name: Literal["bfloat16", "float32"] = "bfloat16",
) -> Shape:
    sizes = {"branches": branches, "queries": queries, "keys": keys}
    return Shape(dims=Dims(**sizes, heads=heads, kv_heads=kv_heads, width=width), rule=rule, dtype_name=dtype_name)


SHAPES: dict[str, Shape] = {
    # A rank's tokens at 64K over 8 ranks, and at 256K; heads of an 8B policy; first, middle and last of 7 later passes.
    "eagle3_8k_pass1": _shape(8192, 1, 1, 32, 8, 128),
    "eagle3_8k_pass4": _shape(8192, 1, 4, 32, 8, 128),
    "eagle3_8k_pass7": _shape(8192, 1, 7, 32, 8, 128),
    "eagle3_32k_pass4": _shape(32768, 1, 4, 32, 8, 128),
    # gpt-oss: heads of 64, eight query heads a key-value head (and sinks).
    "eagle3_8k_width64": _shape(8192, 1, 4, 64, 8, 64),
    # One key-value head.
    "eagle3_8k_multi_query": _shape(8192, 1, 4, 8, 1, 128),
    "eagle3_8k_width256": _shape(8192, 1, 4, 16, 8, 256),
    # Blocks of 16 and of 8 at 512 anchors of a rank.
    "dflash_block16": _shape(512, 16, 16, 32, 8, 128),
    "dspark_block8": _shape(512, 8, 8, 32, 8, 128, "causal"),
    # What a CPU can do in a moment.
    "small_pass4": _shape(64, 1, 4, 8, 2, 64, dtype_name="float32"),
    "small_block8": _shape(16, 8, 8, 8, 2, 64, "causal", dtype_name="float32"),
}
