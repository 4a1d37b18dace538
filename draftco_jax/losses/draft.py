"""Per-token terms of draft losses, and the weighted mean over passes.

The teacher never gets a gradient: `teacher_terms` cuts it, whatever the caller passes in. All statistics float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from draftco_jax.numerics.masked import masked_sum, safe_count


class DraftTerms(NamedTuple):
    """What one pass says about each token."""

    cross_entropy: Array  # nats, - sum_v p(v) log q(v)
    acceptance: Array  # sum_v min(p(v), q(v)) = 1 - TV(p, q), in [0, 1]; no gradient


def soft_cross_entropy(
    teacher_log_law: Float32[Array, "*b W"], draft_log_law: Float32[Array, "*b W"]
) -> Float32[Array, "*b"]:
    """- sum_v p(v) log q(v), p = exp(teacher_log_law) without gradient: forward KL up to the teacher's entropy.

    Entries with p = 0 add 0 also where q = 0.
    """
    p = jax.lax.stop_gradient(jnp.exp(teacher_log_law))
    return -jnp.sum(jnp.where(p > 0, p * draft_log_law, 0.0), axis=-1)


def acceptance(p: Float32[Array, "*b V"], q: Float32[Array, "*b V"]) -> Float32[Array, "*b"]:
    """Probability that rejection sampling accepts a draft from q under p: sum_v min(p(v), q(v)) = 1 - TV(p, q)."""
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def pass_weighted_mean(
    values: Float[Array, "n *b"], masks: Float[Array, "n *b"], weights: tuple[float, ...], denominator: Array
) -> Float32[Array, ""]:
    """sum_k w_k sum(mask_k * value_k) / denominator; the global denominator is sum_k w_k count_k over the whole step.

    One denominator over all passes: splitting a batch into micro-batches or shards changes nothing.
    """
    sums = [w * masked_sum(v, m) for w, v, m in zip(weights, values, masks, strict=True)]
    return sum(sums[1:], sums[0]) / safe_count(denominator)


def expected_accepted_length(
    acceptances: Float[Array, "n *b"], masks: Float[Array, "n *b"]
) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
    """tau_prob = 1 + sum_k prod_{j <= k} a_j summed over anchors, and the number of anchors.

    An anchor is a token whose pass 0 is live. A pass that is not live (its label lies past the end of the document or
    is not supervised) ends the product, as a stop token ends a round.
    """
    reached = jnp.cumprod(jnp.where(masks > 0, acceptances, 0.0), axis=0)
    anchors = (masks[0] > 0).astype(jnp.float32)
    return jnp.sum(anchors * (1.0 + jnp.sum(reached, axis=0))), jnp.sum(anchors)
