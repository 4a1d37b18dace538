"""Records of the block attention op.

Letters, here and in all files of the op: R rows, Tq queries, Tk keys, N query heads, K key-value heads, H head width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class KeyRange(NamedTuple):
    """Keys each query sees: those whose index lies in first..last, both included. None where last < first.

    An index is a place in the whole sequence, not in the block, so one range holds for all blocks of a ring. Causal
    attention, documents of a packed row, a sliding window and a trunk that ends at an anchor are all such ranges.
    """

    first: jax.Array  # i32[R, Tq]
    last: jax.Array  # i32[R, Tq]


class Partial(NamedTuple):
    """Softmax attention over some of the keys. A query that saw none of them has out 0 and lse -inf."""

    out: jax.Array  # f32[R, Tq, N, H] (f64 for f64 inputs)
    lse: jax.Array  # f32[R, Tq, N] log of the sum of exp(score)


class KeyGrads(NamedTuple):
    """Gradients of one block; added up over blocks by the caller."""

    q: jax.Array  # f32[R, Tq, N, H]
    k: jax.Array  # f32[R, Tk, K, H]
    v: jax.Array  # f32[R, Tk, K, H]


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Type of scores, sums and partial results for inputs of `dtype`: float32, and float64 for float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
