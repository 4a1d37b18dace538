"""What a policy loss makes of its tokens: which of them weigh how much, and what the sum is divided by.

    loss = -sum(weights * objective) / denominator

The denominator is the GLOBAL one: what `scale_tokens` says of each micro-batch and device is added up before the
division, so that a split changes nothing. It depends on masks and documents alone, not on what the policy says, and is
known before the forward.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.losses.documents import document_totals
from draftco_jax.numerics.masked import require_same_shape

Aggregation = Literal["token", "sequence", "fixed_length"]


def scale_tokens(
    mask: Float[Array, "R T"],
    documents: Int[Array, "R T"],
    *,
    aggregation: Aggregation,
    fixed_length: int | None = None,
    packed: PackedRows = WHOLE_ROWS,
) -> tuple[Float[Array, "R T"], Float[Array, ""]]:
    """Return the weight of each token and the denominator of these rows.

    - token: ``(m, sum m)``, the mean over all label tokens (DAPO, arXiv 2503.14476, section 3.3).
    - sequence: ``(m / |o_i|, N)``, the mean over sequences of each one's mean (GRPO, arXiv 2402.03300, eq. 3).
    - fixed_length: ``(m, N * fixed_length)``, the sum of each sequence over a constant, the longest response there may
      be, so that no length is favoured (Dr.GRPO, arXiv 2503.20783).

    |o_i| is the number of labels of sequence i, N the number of sequences that have one: an answer that was taken out
    of the mask counts nowhere.

    Args:
        mask: 1 at label tokens.
        documents: segment id of each token, 0 on padding, where there are no labels.
        aggregation: which of the above.
        fixed_length: tokens, >= 1; only with "fixed_length".
        packed: how rows are spread over devices: a document may lie on several.
    """
    require_same_shape(mask=mask, documents=documents)
    if (fixed_length is None) is (aggregation == "fixed_length"):
        raise ValueError(
            f"fixed_length={fixed_length} must be a number with aggregation=fixed_length and none otherwise, but "
            f"aggregation={aggregation}; change one of them"
        )
    if aggregation == "token":
        return mask, jnp.sum(mask)
    labels = document_totals(mask, documents, packed=packed)
    sequences = packed.once_a_row(jnp.sum((labels > 0).astype(mask.dtype)))
    if fixed_length is not None:
        return mask, sequences * float(fixed_length)
    own = jnp.take_along_axis(labels, documents, axis=1)
    return mask / jnp.where(own > 0, own, 1.0), sequences
