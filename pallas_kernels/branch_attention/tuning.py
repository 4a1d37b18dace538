"""How the branch kernels cut their work: two routes, and block sizes for each.

"few": few queries a branch and few keys (EAGLE-3: one query, up to 7 keys, 4 query heads of a key-value head). A
program takes several branches of one key-value head and works on the vector units; a matrix unit would be fed with
padding.
"block": a block of queries (block drafts, n = m = 8 or 16). A program takes one branch of one key-value head, and its
products are matrix products of at least 16 x 16.

Either way a query, a key and a value are read once, and out is written once: the op moves data and hardly computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gpu import power_above

Route = Literal["few", "block"]
SMALLEST_DOT = 16
"""Least rows, columns and depth of a product on a matrix unit."""
MOST_KEYS_ONE_BY_ONE = 8
"""Most keys that route "few" writes out one after another; with more the program only gets long."""
MAX_HEAD_DIM = 256
MAX_KEYS = 256


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of one call, R rows and G branches taken together."""

    branches: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim={self.width} must be in 1..{MAX_HEAD_DIM}; split the heads")
        if not 1 <= self.keys <= MAX_KEYS:
            raise ValueError(f"keys={self.keys} must be in 1..{MAX_KEYS} for a branch kernel; use 'blockwise'")

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Queries of a branch times query heads of a key-value head: all that reads the same keys."""
        return self.queries * self.group

    @property
    def lanes(self) -> int:
        """Head width, padded by masks."""
        return max(power_above(self.width), SMALLEST_DOT)

    @property
    def route(self) -> Route:
        """Which kernels: "few" while a matrix unit would be fed mostly with padding."""
        return "few" if self.rows < SMALLEST_DOT and self.keys <= MOST_KEYS_ONE_BY_ONE else "block"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel's sizes."""

    branches: int = 1
    """Branches of a program; route "few" only."""
    rows: int = SMALLEST_DOT
    """Rows of a program at a time; route "block" only."""
    num_warps: int = 4
    num_stages: int = 1
    """Depth of software pipelining; only the backward of route "block" has a loop that could use it."""

    def __post_init__(self) -> None:
        for name in ("branches", "rows", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two; Triton's tiles know no other lengths")
        if self.rows < SMALLEST_DOT:
            raise ValueError(f"rows={self.rows} must be >= {SMALLEST_DOT}; a product needs as many")
        if self.num_warps > 32:
            raise ValueError(f"num_warps={self.num_warps} must be <= 32; a program has at most 1024 threads")
        if self.num_stages < 1:
            raise ValueError(f"num_stages={self.num_stages} must be >= 1; 1 is no pipelining")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes of the forward and of the backward kernel."""

    forward: Launch
    backward: Launch


def pick(dims: Dims, dtype: DTypeLike) -> Tuning:
    """The table for sm_90 (H100, H200), as compiled for it: no spilled registers with up to 16 keys.

    Registers are all that was looked at. No GPU was there to time the kernels on.
    """
    if dims.route == "few":
        tile = power_above(dims.rows) * dims.lanes
        return Tuning(
            # 2048 numbers a tile are 16 a thread, which leaves room to read two keys ahead.
            forward=Launch(branches=_at_most(dims, 2048 // tile), num_warps=4),
            # Three such tiles live through the loop over keys (q, dout, dq).
            backward=Launch(branches=_at_most(dims, 1024 // tile), num_warps=4),
        )
    wide = dims.lanes > 128
    if jnp.dtype(dtype) == jnp.float32:
        # Products of whole float32 run on the vector units, with their operands in registers: the smallest tile, and
        # more threads to hold it. (Beyond 16 keys the forward spills all the same: right, but slow.)
        return Tuning(
            forward=Launch(rows=SMALLEST_DOT, num_warps=8 if dims.lanes > 64 else 4),
            backward=Launch(rows=SMALLEST_DOT, num_warps=_warps(dims, 8, 16)),
        )
    # 4096 numbers a tile are 32 a thread: the accumulator, and as much again for the trunk's out.
    rows = max(SMALLEST_DOT, min(power_above(dims.rows), 4096 // dims.lanes))
    return Tuning(
        forward=Launch(rows=rows, num_warps=_warps(dims, 4, 32)),
        # Besides its rows the backward holds keys, values and their gradients; more threads where these are wide.
        backward=Launch(rows=rows, num_warps=_warps(dims, 8 if wide else 4, 32)),
    )


def _warps(dims: Dims, least: int, numbers: int) -> int:
    """Warps, so that a thread holds at most so many `numbers` of all keys of a branch: more than 16 keys need more."""
    tile = max(power_above(dims.keys), SMALLEST_DOT) * dims.lanes
    return min(max(least, tile // (32 * numbers)), 32)


def _at_most(dims: Dims, branches: int) -> int:
    return min(max(branches, 1), power_above(dims.branches))
