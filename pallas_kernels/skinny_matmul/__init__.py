"""Products of few rows with a weight that is packed once: decoding steps and verify blocks on CPUs."""

from pallas_kernels.skinny_matmul.api import IMPLEMENTATIONS, MAX_ROWS, available, pack, skinny_matmul, unpack
from pallas_kernels.skinny_matmul.records import PackedWeight

__all__ = ["IMPLEMENTATIONS", "MAX_ROWS", "PackedWeight", "available", "pack", "skinny_matmul", "unpack"]
