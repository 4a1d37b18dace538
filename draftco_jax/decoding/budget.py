r"""Which drafts of a batch are verified where a step may verify only so many: those most likely to be accepted.

The score of draft i of a request, made of the laws q_1 .. q_i that its drafts came from, is

    s_i = prod_{j <= i} max_x q_j(x)

and the `budget` highest scores of the batch are verified; of equals the smaller i, then the smaller request. At
temperature 0 every law is one-hot, all scores are 1, and the budget goes to first drafts, then second ones, and so on.

Why the output law stays p. Rejection sampling is exact as long as draft i, where it is verified, is a draw from q_i
given all that decided that it is verified, and where it is not, counts as not proposed: its law is then a row of zeros,
it is refused, and the residual of p and zero is p. So the choice may look at q_1 .. q_i, hence at the tokens before i,
which the laws depend on, and never at token i itself or, through a later law, at what follows from it. It does not:
scores never rise with i, so a request's later drafts come after draft i in the order and cannot take its place. The
choice is the same as this walk, which draws a token only when it has been chosen: take the best of the requests' next
drafts, by scores known before that draft is looked at; draw it, accept or refuse it; go on until the budget is spent.
Each step adds a fresh draw and a fresh acceptance to what was known, so the texts of all requests together follow the
law of independent texts. A rule that used q_i(x_i), the very number acceptance is about, would prefer some tokens to
others: `tests/unit/decoding/test_budget.py` shows how wrong that goes.

The freshness of draws has a price. Without a budget a position that is drafted again in a later round meets the same
random numbers again, and may: so far they have decided nothing. With one they have, by way of the scores of later
drafts, decided what neighbours got verified, which comes back as what is left for this request. So rounds have random
numbers of their own here (`round_uniforms`).

With a budget the tokens of a request depend, by way of which drafts are verified, on the other requests of its batch;
their law does not.

Letters: B requests, k drafts, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key

from draftco_jax.drafts.base import Proposal
from draftco_jax.numerics.sampling import request_uniforms


def round_uniforms(keys: Key[Array, " B"], rounds: Int32[Array, " B"], count: int) -> Float32[Array, "B n 3"]:
    """Uniforms of `count` positions for a request's round number `rounds`, apart from those of all other rounds."""
    return request_uniforms(jax.vmap(jax.random.fold_in)(keys, rounds), count)


def scores(laws: Float32[Array, "B k V"]) -> Float32[Array, "B k"]:
    """Products of the laws' largest probabilities; 0 from a law on that is zero or broken (NaN)."""
    # Rounding may give a law's largest probability as more than 1, or a longer product as more than a shorter one.
    likeliest = jnp.clip(jnp.nan_to_num(jnp.max(laws, axis=-1), nan=0.0), 0.0, 1.0)
    return jax.lax.cummin(jnp.cumprod(likeliest, axis=1), axis=1)


def chosen(score: Float32[Array, "B k"], live: Bool[Array, " B"], budget: int | Int32[Array, ""]) -> Bool[Array, "B k"]:
    """The `budget` best drafts of live requests, fewer where fewer score above 0."""
    score = jnp.where(live[:, None], score, 0.0)
    by_place = score.T.reshape(-1)  # first all first drafts, so that a stable sort breaks ties as promised
    rank = jnp.argsort(jnp.argsort(-by_place, stable=True)).reshape(score.T.shape).T
    return (rank < budget) & (score > 0)


def limit(proposal: Proposal, live: Bool[Array, " B"], budget: int) -> Proposal:
    """The proposal without the drafts that the budget does not reach: the first `count` of each request are left."""
    kept = chosen(scores(proposal.laws), live, budget)
    return Proposal(
        tokens=proposal.tokens,
        laws=jnp.where(kept[..., None], proposal.laws, 0.0),
        count=jnp.sum(kept, axis=1, dtype=proposal.count.dtype),
    )
