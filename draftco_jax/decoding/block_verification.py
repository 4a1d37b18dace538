r"""Block verification (Sun et al., arXiv 2403.10444): the drafts of a round are judged together.

With drafts, laws q_i and p_i as in `decoding.rejection`, w_0 = 1 and q_{k+1} = 0,

    w_i = min(1, w_{i-1} p_i(d_i) / q_i(d_i))                  i = 1 .. k
    S_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))_+                i = 0 .. k;  S_k = w_k
    h_i = S_i / (S_i + 1 - w_i)                                i = 1 .. k;  h_k = w_k
    accepted n = the largest i that passes u_i < h_i, else 0; what happened at smaller i does not matter
    then one token from  (w_n p_{n+1} - q_{n+1})_+ / S_n,      which is p_{k+1} for n = k

and every emitted token, with all that the target adds after it, follows p exactly. Why: given d_1 .. d_i, n >= i has
probability w_i. It is h_k = w_k at the end, and going back one draft, sum_x q min(1, w_i p / q) = w_i - S_i is the
probability of n > i, so that h_i makes it w_i - S_i + (1 - w_i + S_i) h_i = w_i again. A text that begins with
d_1 .. d_i then goes on with x by an accepted draft, q(d_1 .. d_i) min(w_i p(x), q(x)), or by the last token,
q(d_1 .. d_i) (w_i p(x) - q(x))_+: together p(x) times what was there. Drafts are accepted sum_i E[w_i] times, never
fewer than by the token rule, whose n >= i has probability prod_{j <= i} min(1, p_j/q_j) <= w_i.

A row of q that is zero, as of a draft left out by a budget (`decoding.budget`), ends the block there, and whether it is
zero may depend on what a budget may look at: the expected worth of a block that ends at i is the one of a block that
goes on by a draw from q_{i+1}, whatever the worth of a text is.

Unlike the token rule, n depends on drafts and uniforms of LATER positions too: those that failed. A position that is
drafted again must meet fresh uniforms (`decoding.budget.round_uniforms`).

Letters: B requests, k drafts, r = k + 1 rows of a verify block, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.decoding.rejection import residual
from draftco_jax.numerics.rows import pick, row_at
from draftco_jax.numerics.sampling import draw


def running_weights(p_drafted: Float[Array, "B k"], q_drafted: Float[Array, "B k"]) -> Float[Array, "B k+1"]:
    """w_0 .. w_k from p_i(d_i) and q_i(d_i); 0 from a draft on that its law cannot have drawn."""
    weights = [jnp.ones_like(p_drafted[:, 0])]
    for i in range(p_drafted.shape[1]):
        joint, q = weights[-1] * p_drafted[:, i], q_drafted[:, i]
        ratio = jnp.where(joint >= q, 1.0, joint / q)  # no overflow where q is tiny
        weights.append(jnp.where(q > 0, ratio, 0.0))
    return jnp.stack(weights, axis=1)


def accept_probabilities(
    p: Float[Array, "B r V"], q: Float[Array, "B r V"], weights: Float[Array, "B r"]
) -> Float[Array, "B k"]:
    """h_1 .. h_k; row i of p and q is the law of the token after i drafts, the last row of q zero."""
    weight = weights[:, 1:]
    mass = jnp.sum(jnp.maximum(weight[..., None] * p[:, 1:] - q[:, 1:], 0.0), axis=-1)  # S_i
    total = mass + 1.0 - weight
    # 0 / 0 where p = q up to rounding and nothing was lost before: the next draft is certain to pass, this one is too.
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)


def verify(
    p: Float[Array, "B r V"],
    q: Float[Array, "B k V"],
    drafts: Int[Array, "B k"],
    accept_uniforms: Float[Array, "B k"],
    commit_uniforms: Float[Array, "B k+1"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Number of accepted drafts n in 0..k, and the one token emitted after them, as `rejection.verify`.

    All laws float32; uniforms in [0, 1), fresh for each round. `accept_uniforms[:, i]` judges the block that ends with
    draft i + 1, `commit_uniforms[:, n]` draws the emitted token.
    """
    k = drafts.shape[1]
    # A broken law (NaN) drew nothing, and must not spoil what is said of the drafts before it.
    broken = jnp.any(jnp.isnan(q), axis=-1, keepdims=True)
    q = jnp.pad(jnp.where(broken, 0.0, q), ((0, 0), (0, 1), (0, 0)))
    weights = running_weights(pick(p[:, :k], drafts), pick(q[:, :k], drafts))
    passes = accept_uniforms < accept_probabilities(p, q, weights)
    accepted = jnp.max(jnp.where(passes, jnp.arange(1, k + 1)[None, :], 0), axis=1).astype(jnp.int32)
    scaled = pick(weights, accepted)[:, None] * row_at(p, accepted)
    return accepted, draw(residual(scaled, row_at(q, accepted)), pick(commit_uniforms, accepted))
