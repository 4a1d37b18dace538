"""Named sizes of the block op: what tests, benches and tuning speak of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call.

    Attributes:
        queries: of a row, on this rank.
        keys: of the block, the same on a rank that holds as many.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: width of a head.
        dtype: of q, k and v.
        window: keys a query sees, itself included; 0 for all up to itself.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("queries", "keys", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; leave out what is empty")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}; repeat keys first")
        if self.window < 0:
            raise ValueError(f"window={self.window} must be >= 0; 0 is no window")


SHAPES: dict[str, Shape] = {
    # 64K tokens on 8 ranks, heads of Llama 3 8B and Qwen3 8B: the diagonal block of the ring.
    "long_context": Shape(queries=8192, keys=8192, heads=32, kv_heads=8, head_dim=128),
    # A half block of the zigzag ring at the same size: late queries, keys of another rank.
    "long_context_half": Shape(queries=4096, keys=4096, heads=32, kv_heads=8, head_dim=128),
    # gpt-oss: 64 query heads of width 64; every other layer sees 128 keys only.
    "gpt_oss": Shape(queries=8192, keys=8192, heads=64, kv_heads=8, head_dim=64),
    "gpt_oss_window": Shape(queries=8192, keys=8192, heads=64, kv_heads=8, head_dim=64, window=128),
    # Heads of Gemma 2 9B, without the softcap that it puts on its scores: the op has none.
    "head_dim_256": Shape(queries=8192, keys=8192, heads=16, kv_heads=8, head_dim=256),
    # One key-value head for all: least parallel of the dk/dv kernels.
    "mqa": Shape(queries=8192, keys=8192, heads=32, kv_heads=1, head_dim=128),
    # What a CPU is timed at (8192 tokens of 8 heads and width 64), and a quarter of it.
    "cpu_8192": Shape(queries=8192, keys=8192, heads=8, kv_heads=8, head_dim=64, dtype="float32"),
    "cpu_2048": Shape(queries=2048, keys=2048, heads=8, kv_heads=8, head_dim=64, dtype="float32"),
    # For interpreted kernels.
    "small": Shape(queries=96, keys=80, heads=4, kv_heads=2, head_dim=32, dtype="float32"),
}
