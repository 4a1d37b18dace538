"""Attention of a block of queries over a block of keys, as a partial result that can be merged with others."""

from pallas_kernels.block_attention.api import (
    IMPLEMENTATIONS,
    MAX_HEAD_DIM,
    KeyGrads,
    KeyRange,
    Partial,
    block_attention,
    block_attention_backward,
    empty_partial,
    merge,
)
from pallas_kernels.block_attention.records import statistics_dtype

__all__ = [
    "IMPLEMENTATIONS",
    "MAX_HEAD_DIM",
    "KeyGrads",
    "KeyRange",
    "Partial",
    "block_attention",
    "block_attention_backward",
    "empty_partial",
    "merge",
    "statistics_dtype",
]
