"""Sums and means over the documents of packed rows, wherever a document's tokens lie.

A document is a segment id > 0 within a row. Under context parallelism its tokens are spread over devices; totals are
then summed over those that share the row (`PackedRows.row_total`). Letters: R rows and T tokens of this device, D
documents of a row at most; index 0 collects padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.numerics.masked import require_same_shape


def document_totals(
    values: Float[Array, "R T"], documents: Int[Array, "R T"], *, packed: PackedRows = WHOLE_ROWS
) -> Float[Array, "R D_and_1"]:
    """Sum of the values of each document of each row, padding's set to 0; the same on all devices of a row."""
    require_same_shape(values=values, documents=documents)
    count = packed.ranks * values.shape[1] + 1  # as many documents as a whole row has tokens, and padding
    values = jnp.where(documents > 0, values, 0.0)
    return packed.row_total(jax.vmap(lambda v, d: jax.ops.segment_sum(v, d, num_segments=count))(values, documents))


def document_means(
    values: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    documents: Int[Array, "R T"],
    *,
    packed: PackedRows = WHOLE_ROWS,
) -> Float[Array, "R T"]:
    """``sum(mask * values) / sum(mask)`` over the document of each token, at each of its tokens.

    0 at tokens of documents without a label, and on padding. Values under the mask may be anything.
    """
    require_same_shape(values=values, mask=mask)
    sums = document_totals(mask * jnp.where(mask > 0, values, 0.0), documents, packed=packed)
    counts = document_totals(mask, documents, packed=packed)
    means = jnp.where(counts > 0, sums / jnp.where(counts > 0, counts, 1.0), 0.0)
    return jnp.take_along_axis(means, documents, axis=1)
