"""Bytes of the ring and the rule for a trunk that is read more than once."""

from __future__ import annotations

import pytest

from draftco_jax.context_parallel import TrunkShape, pick_trunk_mode
from draftco_jax.context_parallel.memory import (
    backward_ring_bytes,
    forward_ring_bytes,
    gathered_extra_bytes,
    passes_bytes,
)

# Qwen3-8B draft on 8 ranks at 64K tokens: 8 key-value heads of width 128, bfloat16.
SHAPE = TrunkShape(ranks=8, rows=1, local_tokens=8192, kv_heads=8, head_dim=128, number_bytes=2)


def test_bytes_are_those_of_the_formula():
    assert forward_ring_bytes(SHAPE) == 2 * 7 * 8192 * 1024 * 2 == 234_881_024
    assert backward_ring_bytes(SHAPE) == 3 * forward_ring_bytes(SHAPE)  # keys again, float32 gradients
    assert passes_bytes(SHAPE, 3, "replay") == 3 * 4 * forward_ring_bytes(SHAPE)
    assert passes_bytes(SHAPE, 3, "gathered") == passes_bytes(SHAPE, 7, "gathered") == 3 * forward_ring_bytes(SHAPE)


def test_memory_decides_where_a_trunk_is_read_more_than_once():
    need = gathered_extra_bytes(SHAPE, 3)
    assert need == 7 * forward_ring_bytes(SHAPE)  # keys once and three float32 gradients of them
    assert pick_trunk_mode(SHAPE, 3, need) == "gathered"
    assert pick_trunk_mode(SHAPE, 3, need - 1) == "replay"
    assert pick_trunk_mode(SHAPE, 4, need) == "replay"  # a read more, a gradient more
    assert pick_trunk_mode(SHAPE, 1, need) == "replay"
    alone = TrunkShape(ranks=1, rows=1, local_tokens=8, kv_heads=1, head_dim=8, number_bytes=4)
    assert forward_ring_bytes(alone) == 0 and pick_trunk_mode(alone, 7, 10**12) == "replay"


def test_refusals():
    with pytest.raises(ValueError, match="kv_heads=0 must be >= 1"):
        TrunkShape(ranks=8, rows=1, local_tokens=8, kv_heads=0, head_dim=8, number_bytes=4)
    with pytest.raises(ValueError, match="passes=0"):
        pick_trunk_mode(SHAPE, 0, 0)
