"""Look ahead inside packed documents."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def look_ahead(x: Shaped[Array, "R T *rest"], steps: int) -> Shaped[Array, "R T *rest"]:
    """y[:, t] = x[:, t + steps], zeros where the row ends."""
    if steps == 0:
        return x
    tail = jnp.zeros_like(x[:, : min(steps, x.shape[1])])
    return jnp.concatenate([x[:, steps:], tail], axis=1)


def same_document(segment_ids: Int[Array, "R T"], steps: int) -> Bool[Array, "R T"]:
    """Whether t + steps lies in the document of t; False on padding (segment 0)."""
    return (segment_ids > 0) & (look_ahead(segment_ids, steps) == segment_ids)
