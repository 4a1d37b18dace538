"""Embedding and head whose vocabulary is split over a tensor axis.

    lookup   each rank looks up the tokens it has the rows of, zeros for the others; the ranks' results are summed
    logits   each rank makes those of its columns, and all are gathered: whole rows, the same on every rank
    whole    a table gathered once, for drafts, which are not split

What is gathered counts as the same on all ranks (`to="invarying"`): the transpose is then each rank's own slice, and
losses that are computed alike on all ranks need no correction. `axis` None: one rank has the whole vocabulary.

Letters: V vocabulary, v = V / ranks, D width, b batch dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int


def lookup(table: Float[Array, "v D"], tokens: Int[Array, "*b"], axis: str | None) -> Float[Array, "*b D"]:
    """Rows of the embedding table; every id is in 0..V-1."""
    if axis is None:
        return table.at[tokens].get(mode="promise_in_bounds")
    local = tokens - lax.axis_index(axis) * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    rows = table.at[jnp.where(here, local, 0)].get(mode="promise_in_bounds")
    # One rank adds a row and the others zeros: exact in any dtype.
    return lax.psum(jnp.where(here[..., None], rows, jnp.zeros_like(rows)), axis)


def lookup_gradient(
    total: Float32[Array, "v D"],
    tokens: Int[Array, "*b"],
    dx: Float[Array, "*b D"],
    here: Bool[Array, ""],
    axis: str | None,
) -> Float32[Array, "v D"]:
    """`total` plus the gradient of `lookup` at `dx`, and `total` itself where not `here`.

    A sum kept outside of differentiation takes rows in place, where the transpose of `lookup` makes a whole table.
    """
    local = tokens if axis is None else tokens - lax.axis_index(axis) * total.shape[0]
    outside = total.shape[0]
    local = jnp.where(here & (local >= 0), local, outside)
    return total.at[local].add(dx.astype(total.dtype), mode="drop")


def logits(hidden: Float[Array, "*b D"], kernel: Float[Array, "D v"], axis: str | None) -> Float[Array, "*b V"]:
    """hidden @ kernel over the whole vocabulary, in the dtype of hidden, accumulated and returned in float32."""
    own = jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return whole(own, axis, dim=hidden.ndim - 1)


def whole(array: jax.Array, axis: str | None, dim: int) -> jax.Array:
    """All ranks' pieces along a dim, one after the other."""
    return array if axis is None else lax.all_gather(array, axis, axis=dim, tiled=True, to="invarying")
