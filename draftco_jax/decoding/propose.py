"""Propose k tokens with a chain draft, one step after another.

Letters: B requests, k drafts, D draft width, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.drafts.eagle3.module import Eagle3
from draftco_jax.models.kv_cache import Cache
from draftco_jax.numerics.sampling import SamplingConfig, draw, law


def propose_chain(
    draft: Eagle3,
    embedding: Float[Array, "V D"],
    hidden: Float[Array, "B D"],
    anchor: Int[Array, " B"],
    cache: Cache,
    uniforms: Float[Array, "B k"],
    sampling: SamplingConfig,
) -> tuple[Int[Array, "B k"], Float[Array, "B k V"], Cache]:
    """Draw d_1 .. d_k, and return the very laws they were drawn from.

    Args:
        draft: the draft model.
        embedding: the policy's embedding table.
        hidden: the draft's state at index anchor - 1, made from true target features; its law is that of d_1.
        anchor: position of the newest committed token.
        cache: the draft's cache, true for every index < anchor. Steps of the chain write their own guesses at
            anchor, anchor + 1, ...; they are overwritten from target features once the round is verified.
        uniforms: one per drafted position.
        sampling: temperature and filters, the same as the policy's.
    """
    tokens, laws = [], []
    count = uniforms.shape[1]
    for i in range(count):
        q = draft.to_target_vocabulary(law(draft.logits(hidden), sampling))
        token = draw(q, uniforms[:, i])
        tokens.append(token)
        laws.append(q)
        if i + 1 < count:
            state, cache = draft.step(
                embedding.at[token].get(mode="promise_in_bounds")[:, None], hidden[:, None], anchor + i, cache
            )
            hidden = state[:, 0]
    return jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1), cache
