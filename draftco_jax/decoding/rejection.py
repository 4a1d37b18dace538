r"""Token-level rejection sampling (Leviathan et al., arXiv 2211.17192): the lossless core.

Drafts d_1 .. d_k were drawn one after another, d_i from q_i; the target's law after the same prefix is p_i. Then

    accept d_i with probability  min(1, p_i(d_i) / q_i(d_i)),      i = 1, 2, ... until the first rejection n + 1
    on rejection emit one token from the residual  (p - q)_+ / sum (p - q)_+  of position n + 1
    if all k are accepted emit one bonus token from  p_{k+1}

and every emitted token follows p exactly, whatever q is, as long as q_i IS the law that d_i was drawn from. At
temperature 0 both laws are one-hot and the rule becomes: keep the longest exact match, then emit the argmax.

Letters: B requests, k drafts, r = k + 1 rows of a verify block, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.numerics.rows import pick, row_at
from draftco_jax.numerics.sampling import draw


def accepts(
    p_drafted: Float[Array, "*b k"], q_drafted: Float[Array, "*b k"], uniforms: Float[Array, "*b k"]
) -> Bool[Array, "*b k"]:
    """u < p/q, written u q < p so that nothing is divided; u in [0, 1).

    q > 0 for any token that was drawn from q. A draft whose law is broken (NaN) has none such and is refused.
    """
    return (q_drafted > 0) & (uniforms * q_drafted < p_drafted)


def residual(p: Float[Array, "*b V"], q: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """(p - q)_+, not normalised; p itself where rounding leaves no mass (then p = q up to rounding)."""
    positive = jnp.maximum(p - q, 0.0)
    return jnp.where(jnp.sum(positive, axis=-1, keepdims=True) > 0, positive, p)


def verify(
    p: Float[Array, "B r V"],
    q: Float[Array, "B k V"],
    drafts: Int[Array, "B k"],
    accept_uniforms: Float[Array, "B k"],
    commit_uniforms: Float[Array, "B k+1"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Number of accepted drafts n in 0..k, and the one token emitted after them (residual or bonus).

    All laws float32. `commit_uniforms[:, i]` belongs to the position of draft i + 1, so the emitted token uses entry n.
    """
    k = drafts.shape[1]
    refused = ~accepts(pick(p[:, :k], drafts), pick(q, drafts), accept_uniforms)
    refused = jnp.pad(refused, ((0, 0), (0, 1)), constant_values=True)
    accepted = jnp.argmax(refused, axis=1).astype(jnp.int32)  # drafts before the first refusal
    # q_{k+1} = 0 makes the bonus token the residual of p_{k+1}: one rule for both ends.
    q = jnp.concatenate([q, jnp.zeros_like(q[:, :1])], axis=1)
    weights = residual(row_at(p, accepted), row_at(q, accepted))
    return accepted, draw(weights, pick(commit_uniforms, accepted))
