"""Block sizes of the Pallas kernels, and which to take on an H100.

A kernel holds its accumulators in registers (float32, block x head_dim) and streams the other side through shared
memory, num_stages tiles at a time. The table was chosen by what the compiler reports (registers, of which a thread has
255; spills; shared memory), not by time on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

MIN_BLOCK = 16
"""A matrix product of Triton has no side below 16."""

MAX_BLOCK = 256
MAX_STAGES = 8
WARPS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How one kernel is cut and compiled.

    Attributes:
        block_q: queries of a tile.
        block_k: keys of a tile.
        num_warps: groups of 32 threads that share a tile.
        num_stages: tiles in flight in the inner loop.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if not (MIN_BLOCK <= size <= MAX_BLOCK and size & (size - 1) == 0):
                raise ValueError(f"{name}={size} must be a power of two in {MIN_BLOCK}..{MAX_BLOCK}; take 64")
        if self.num_warps not in WARPS:
            raise ValueError(f"num_warps={self.num_warps} must be one of {WARPS}; take 4")
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise ValueError(f"num_stages={self.num_stages} must be in 1..{MAX_STAGES}; take 2")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Blocks of the three kernels: forward, gradient of the queries, gradient of keys and values."""

    forward: Blocks
    dq: Blocks
    dkv: Blocks


def _blocks(block_q: int, block_k: int, num_warps: int, num_stages: int) -> Blocks:
    return Blocks(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


# Registers per thread (forward, dq, dkv) as ptxas 12.9 gives them for sm_90a; none of the 18 spills. "half" is bfloat16
# and float16, whose products run on tensor cores (wgmma). "single" is float32, whose products are plain multiply-adds
# (no TF32): a thread keeps both operands in registers there, so tiles must be small.
SM90: dict[tuple[int, str], Tuning] = {
    # 192, 125, 166. Four warps and 64-wide tiles leave room for two to four programs on a multiprocessor.
    (64, "half"): Tuning(forward=_blocks(128, 64, 4, 3), dq=_blocks(64, 64, 4, 2), dkv=_blocks(64, 64, 4, 2)),
    # 218, 166, 234. Shared memory admits one program anyway, so it may have eight warps and the largest tiles that do
    # not spill. The forward at 128 x 64 with four warps spills 176 bytes.
    (128, "half"): Tuning(forward=_blocks(128, 128, 8, 2), dq=_blocks(128, 64, 8, 3), dkv=_blocks(64, 128, 8, 2)),
    # 220, 192, 222. dq at 128 x 64 wants 256 KiB of shared memory (227 is the limit); dkv at 64 x 64 takes all 255
    # registers, and spills with one stage.
    (256, "half"): Tuning(forward=_blocks(128, 64, 8, 2), dq=_blocks(128, 32, 8, 2), dkv=_blocks(32, 64, 8, 2)),
    # 116, 120, 133. 64 x 32 spills with four warps, 64 x 64 and dkv at 32 x 64 with eight.
    (64, "single"): Tuning(forward=_blocks(64, 32, 8, 2), dq=_blocks(64, 32, 8, 2), dkv=_blocks(32, 32, 4, 2)),
    # 76, 205, 107. The forward spills at 64 x 32.
    (128, "single"): Tuning(forward=_blocks(32, 32, 8, 2), dq=_blocks(64, 32, 8, 2), dkv=_blocks(32, 32, 8, 2)),
    # 140, 206, 242. dkv spills at 16 x 32, not at 32 x 32.
    (256, "single"): Tuning(forward=_blocks(32, 32, 8, 2), dq=_blocks(32, 32, 8, 2), dkv=_blocks(32, 32, 8, 2)),
}
"""By head width and kind of input."""


def pick(head_dim: int, dtype: DTypeLike) -> Tuning:
    """What the table says for this head width (the next one up that it has) and type of input."""
    kind = "single" if jnp.dtype(dtype) == jnp.float32 else "half"
    widths = sorted(width for width, of in SM90 if of == kind and width >= head_dim)
    if not widths:
        raise ValueError(f"head_dim={head_dim} must be <= {max(w for w, _ in SM90)}; split the heads")
    return SM90[widths[0], kind]
