r"""Several candidates for one position, judged one after another (SpecInfer, arXiv 2305.09781): still lossless.

Candidate d_j was drawn from q_j given the candidates before it, j = 1 .. c. With r_1 = p the target's law,

    accept d_j with probability  min(1, r_j(d_j) / q_j(d_j)),      and stop
    on refusal                   r_{j+1} = (r_j - q_j)_+ / sum (r_j - q_j)_+
    all refused: emit one token from r_{c+1}

and the emitted token follows p exactly, as long as q_j IS the law that d_j was drawn from:

    independent   q_j = q, the same token may come twice
    distinct      drawn without replacement: q_j = q without d_1 .. d_{j-1}, renormalised
    likeliest     the c largest of q, no draw at all: q_j is one-hot, so r_{j+1} is r_j without d_j, renormalised

The way of drawing and the laws it implies come from one function here, so that they cannot be mixed. At temperature 0 p
is one-hot and the rule becomes: emit the argmax; it is accepted if any candidate is it.

Letters: c candidates, V vocabulary; any leading axes *b.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.decoding.rejection import accepts, residual
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import draw


class Candidates(NamedTuple):
    """Tokens in the order in which they are judged, and the law that each was drawn from."""

    tokens: Int[Array, "*b c"]
    laws: Float[Array, "*b c V"]


def independent(q: Float[Array, "*b V"], uniforms: Float[Array, "*b c"]) -> Candidates:
    """As many draws from q as there are uniforms in [0, 1), with replacement."""
    laws = jnp.broadcast_to(q[..., None, :], (*uniforms.shape, q.shape[-1]))
    return Candidates(draw(laws, uniforms), laws)


def distinct(q: Float[Array, "*b V"], uniforms: Float[Array, "*b c"]) -> Candidates:
    """Draws from q without replacement.

    Where q has fewer tokens than are asked for, the laws of the rest are zero: those are not candidates, and refused.
    """
    tokens, laws = [], []
    law = q
    for j in range(uniforms.shape[-1]):
        tokens.append(draw(law, uniforms[..., j]))
        laws.append(law)
        law = without(law, tokens[-1])
    return Candidates(jnp.stack(tokens, axis=-1), jnp.stack(laws, axis=-2))


def without(q: Float[Array, "*b V"], token: Int[Array, "*b"]) -> Float[Array, "*b V"]:
    """q given that it is another token; zero where there is no other."""
    return _normalised(jnp.where(jax.nn.one_hot(token, q.shape[-1], dtype=bool), 0.0, q))


def likeliest(q: Float[Array, "*b V"], count: int) -> Candidates:
    """The `count` most likely tokens of q, equal ones by id, each with a one-hot law.

    Raises:
        ValueError: more tokens are asked for than there are.
    """
    vocab = q.shape[-1]
    if not 1 <= count <= vocab:
        raise ValueError(f"count={count} must be in 1..{vocab}, the size of the vocabulary; ask for fewer candidates")
    tokens = jax.lax.top_k(q, count)[1].astype(jnp.int32)
    return Candidates(tokens, jax.nn.one_hot(tokens, vocab, dtype=q.dtype))


def judge(
    law: Float[Array, "*b V"], q: Float[Array, "*b V"], token: Int[Array, "*b"], uniform: Float[Array, "*b"]
) -> tuple[Bool[Array, "*b"], Float[Array, "*b V"]]:
    """Whether a candidate drawn from q is accepted as a draw from `law`, and the law that is left if it is not."""
    return accepts(pick(law, token), pick(q, token), uniform), _normalised(residual(law, q))


def verify(
    p: Float[Array, "*b V"],
    candidates: Candidates,
    accept_uniforms: Float[Array, "*b c"],
    commit_uniform: Float[Array, "*b"],
) -> tuple[Int[Array, "*b"], Int[Array, "*b"]]:
    """Index of the accepted candidate, c if none is, and the token that is emitted.

    All laws float32; uniforms in [0, 1), independent of each other and of those that drew the candidates.
    """
    tokens, laws = candidates
    count = tokens.shape[-1]
    law, refused = p, []
    for j in range(count):
        accepted, law = judge(law, laws[..., j, :], tokens[..., j], accept_uniforms[..., j])
        refused.append(~accepted)
    all_refused = jnp.cumprod(jnp.stack(refused, axis=-1).astype(jnp.int32), axis=-1)
    index = jnp.sum(all_refused, axis=-1, dtype=jnp.int32)
    emitted = jnp.concatenate([tokens, draw(law, commit_uniform)[..., None]], axis=-1)
    return index, pick(emitted, index)


def _normalised(weights: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """The law of these weights; zero where there is no mass."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)
