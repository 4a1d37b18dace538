"""Bytes that the ring sends and keeps, and the rule that picks how a trunk is read more than once.

All figures are of one rank and one layer. Letters: C ranks, R rows, L tokens of a rank, d = kv_heads * head_dim, b
bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftco_jax.context_parallel.branch import TrunkMode

GRADIENT_BYTES = 4
"""Gradients of keys and values are float32."""


@dataclass(frozen=True, kw_only=True)
class TrunkShape:
    """The keys and values of a trunk on one rank."""

    ranks: int
    """Ranks of the context axis."""
    rows: int
    """Packed rows on one rank."""
    local_tokens: int
    """Tokens of a row on one rank."""
    kv_heads: int
    """Key-value heads of one layer, on one rank."""
    head_dim: int
    """Numbers of a key; a value has as many."""
    number_bytes: int
    """Bytes of a number of a key: 2 for bfloat16, 4 for float32."""

    def __post_init__(self) -> None:
        for name in ("ranks", "rows", "local_tokens", "kv_heads", "head_dim", "number_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; it is a size")

    @property
    def numbers(self) -> int:
        """Keys and values of one rank, counted in numbers: 2 R L d."""
        return 2 * self.rows * self.local_tokens * self.kv_heads * self.head_dim


def forward_ring_bytes(trunk: TrunkShape) -> int:
    """Sent by one rank when the keys go round once: 2 (C-1) R L d b."""
    return (trunk.ranks - 1) * trunk.numbers * trunk.number_bytes


def backward_ring_bytes(trunk: TrunkShape) -> int:
    """Sent by one rank in the backward of one read: the keys once more, and their float32 gradients."""
    return (trunk.ranks - 1) * trunk.numbers * (trunk.number_bytes + GRADIENT_BYTES)


def passes_bytes(trunk: TrunkShape, passes: int, mode: TrunkMode) -> int:
    """Sent by one rank in forward and backward of `passes` reads of the trunk.

    replay: every read is a ring there and a ring back. gathered: one ring there, gradients once round.
    """
    if mode == "replay":
        return passes * (forward_ring_bytes(trunk) + backward_ring_bytes(trunk))
    return forward_ring_bytes(trunk) + (trunk.ranks - 1) * trunk.numbers * GRADIENT_BYTES


def gathered_extra_bytes(trunk: TrunkShape, passes: int) -> int:
    """What `gathered` keeps beyond `replay` for so many reads: (C-1) 2 R L d (b + 4 passes).

    The other ranks' keys, and float32 gradients of them from every read: the compiler adds the reads up once the last
    one is there, so all are held at the same time. Compiled for H100 at 64K tokens the difference of the two peaks is
    0.97 of this with two reads and all of it with three (tests/aot/test_trunk_modes.py).
    """
    return (trunk.ranks - 1) * trunk.numbers * (trunk.number_bytes + passes * GRADIENT_BYTES)


def pick_trunk_mode(trunk: TrunkShape, passes: int, spare_bytes: int) -> TrunkMode:
    """`gathered` where the trunk is read more than once and the rank has room for it; otherwise `replay`.

    With 2 reads or more `gathered` always sends less, so memory alone decides. Bytes, of one layer.
    """
    if passes < 1 or spare_bytes < 0:
        raise ValueError(
            f"passes={passes} must be >= 1 and spare_bytes={spare_bytes} >= 0; spare_bytes=0 never gathers"
        )
    if trunk.ranks == 1 or passes == 1:
        return "replay"
    return "gathered" if gathered_extra_bytes(trunk, passes) <= spare_bytes else "replay"
