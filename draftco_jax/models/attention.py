"""Dense attention under an explicit mask: the reference that every faster implementation is held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Large, finite and representable in bfloat16: a fully masked row (padding) then yields a finite mean instead of NaN.
MASKED_SCORE = -1e9


def attend(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v over the slots the mask allows, grouped-query, scores and softmax in float32.

    Query head n reads key-value head n // (N / K). A sink is a score of each head that takes weight and gives nothing.
    Result in the dtype of the queries.
    """
    batch, tokens, heads, width = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = queries.reshape(batch, tokens, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
    q = (q * (width**-0.5)).reshape(batch, kv_heads, tokens * group, width)
    scores = jnp.einsum("bkxh,bksh->bkxs", q, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, tokens, group, -1)
    scores = jnp.where(mask[:, None, :, None, :], scores, MASKED_SCORE)
    if sinks is not None:
        sink = sinks.astype(scores.dtype).reshape(kv_heads, group)[None, :, None, :, None]
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = weights if sinks is None else weights[..., :-1]
    weights = weights.reshape(batch, kv_heads, tokens * group, -1).astype(values.dtype)
    out = jnp.einsum("bkxs,bksh->bkxh", weights, values)
    out = out.reshape(batch, kv_heads, tokens, group, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, tokens, heads, width).astype(queries.dtype)


def packed_causal_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Query t sees key s iff s <= t and both belong to the same document. Padding (segment 0) sees padding only."""
    tokens = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    return causal[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
