"""Apply a function of single tokens to many tokens without keeping its intermediates.

What it is for: anything that goes through the vocabulary. Logits of a chunk of tokens are made, reduced to a few
numbers per token and dropped, in the forward and again in the backward pass, so no [tokens, vocab] array outlives its
chunk and none is saved as a residual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Out = TypeVar("Out")


def map_tokens(fn: Callable[..., Out], arrays: tuple[jax.Array, ...], *, chunk_tokens: int) -> Out:
    """fn over the leading [R, T] of every array, `chunk_tokens` tokens at a time, rematerialised.

    Args:
        fn: takes one [n, ...] slice per array and returns arrays [n, ...]; it must treat tokens independently.
            Arrays it closes over (a head kernel) get gradients as usual.
        arrays: each [R, T, ...].
        chunk_tokens: upper bound of n, >= 1.

    Returns:
        What fn returns, with leading [R, T].
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be >= 1; 4096 is usual")
    rows, tokens = arrays[0].shape[:2]
    count = rows * tokens
    flat = tuple(a.reshape(count, *a.shape[2:]) for a in arrays)
    body = jax.checkpoint(fn)
    if count <= chunk_tokens:
        out = body(*flat)
    else:
        chunks = -(-count // chunk_tokens)
        spare = chunks * chunk_tokens - count
        padded = tuple(jnp.pad(a, ((0, spare),) + ((0, 0),) * (a.ndim - 1)) for a in flat)
        split = tuple(a.reshape(chunks, chunk_tokens, *a.shape[1:]) for a in padded)
        out = jax.lax.map(lambda xs: body(*xs), split)
        out = jax.tree.map(lambda a: a.reshape(chunks * chunk_tokens, *a.shape[2:])[:count], out)
    return jax.tree.map(lambda a: a.reshape(rows, tokens, *a.shape[1:]), out)
