r"""How many of its drafts each request has verified, where requests of a batch are not worth the same.

    ConfidencePrefix   drafts most likely to survive, as long as each makes the batch faster (DSpark, 2607.05147)
    LengthAware        more drafts for what will take longest, so that the last ends sooner (DAS, 2511.13841)

A choice is a count per request; the first drafts of a request are the ones verified, and the law of one that is not is
a row of zeros for verification, as in `budget`, which also says why the output law stays the policy's: whether draft i
is verified may depend on what was known before draft i was drawn, never on draft i or, through a later score, on what
follows from it. The published trap is to take the number of drafts that is best in hindsight. Where a second draft's
confidence depends on the first draft's token, the first is then verified only if it turned out well: a policy of
(.7, .3) with drafts from (.5, .5) comes out as (.85, .15). Here the walk through the drafts, by falling score, ends at
the first one that does not pay, whatever may come behind it.

Rounds of `ConfidencePrefix` need random numbers of their own (`budget.round_uniforms`): scores of drafts that were not
accepted have had a say in what was verified. `LengthAware` looks at finished rounds only, like `speculation_control`.

Letters: B requests, k drafts, S = B k + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from draftco_jax.decoding.budget import chosen
from draftco_jax.decoding.speculation_control import Acceptance, AcceptanceEstimate, Outcome, expected_tokens


@dataclass(frozen=True, kw_only=True)
class ConfidencePrefix:
    """Drafts by falling survival, the product of a request's confidences so far, while they raise tokens per second.

        speed(n) = (active + sum of the n best survivals) / seconds(n)

    The walk goes on while speed(n) > speed(n - 1) and stops at the first n that does not, or at the budget.
    """

    budget: int
    """Drafts verified in a round over the whole batch, at most."""

    def __post_init__(self) -> None:
        """Refuse a budget for nothing."""
        if self.budget < 1:
            raise ValueError(f"budget={self.budget} must be >= 1; decode plainly to verify nothing")

    def init(self) -> None:
        """Nothing to know."""

    def choose(
        self,
        state: None,
        confidences: Float32[Array, "B k"],
        live: Bool[Array, " B"],
        seconds: Float32[Array, " S"] | Float32[np.ndarray, " S"],
    ) -> Int32[Array, " B"]:
        """Drafts to be verified of each request.

        Args:
            state: none.
            confidences: chance that draft i is accepted where those before it were, said BEFORE draft i is drawn: of
                the draft's head, or the largest probability of q_i. Never of the drawn token.
            live: requests in flight; the others get nothing.
            seconds: of a round that verifies 0 .. B k drafts of the requests in flight.
        """
        confidences = jnp.clip(jnp.nan_to_num(confidences, nan=0.0), 0.0, 1.0)
        survival = jnp.where(live[:, None], jax.lax.cummin(jnp.cumprod(confidences, axis=1), axis=1), 0.0)
        falling = -jnp.sort(-survival.reshape(-1))
        tokens = jnp.sum(live, dtype=jnp.float32) + jnp.pad(jnp.cumsum(falling), (1, 0))
        speed = tokens / jnp.asarray(seconds)
        pays = (speed[1:] > speed[:-1]) & (jnp.arange(falling.shape[0]) < self.budget)
        count = jnp.sum(jnp.cumprod(pays.astype(jnp.int32)), dtype=jnp.int32)
        return taken(survival, live, count)

    def observe(self, state: None, outcome: Outcome) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, kw_only=True)
class LengthAware:
    """The counts, of `budget` drafts in all, that end the slowest request soonest: least max_i remaining_i / E(k_i).

    E is the expected number of tokens of a round (`speculation_control`), the same for all requests. One more draft
    always goes to the request that would take the most rounds, which is the best there is because E rises with k.
    """

    budget: int
    longest: int
    """Drafts of one request, at most."""
    estimate: AcceptanceEstimate = AcceptanceEstimate()

    def __post_init__(self) -> None:
        """Refuse a budget for nothing."""
        for name in ("budget", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; decode plainly to verify nothing")

    def init(self) -> Acceptance:
        """No rounds yet."""
        return self.estimate.init(self.longest)

    def choose(self, state: Acceptance, remaining: Float32[Array, " B"], live: Bool[Array, " B"]) -> Int32[Array, " B"]:
        """Drafts to be verified of each request.

        Args:
            state: acceptance so far.
            remaining: tokens that each request is expected to write still, from what is known before the round: lengths
                of earlier responses to the prompt less what is written, say. Below 1 counts as 1.
            live: requests in flight; the others get nothing.
        """
        rounds = jnp.maximum(remaining, 1.0)[:, None] / expected_tokens(self.estimate.rates(state))[None, :-1]
        return taken(rounds, live, jnp.asarray(self.budget, jnp.int32))

    def observe(self, state: Acceptance, outcome: Outcome) -> Acceptance:
        """Count a round."""
        return self.estimate.observe(state, outcome)


def taken(score: Float32[Array, "B k"], live: Bool[Array, " B"], count: Int[Array, ""]) -> Int32[Array, " B"]:
    """How many of each request are among the `count` highest scores, which never rise with the draft's number.

    Of equals the smaller number comes first, then the smaller request.
    """
    return jnp.sum(chosen(score, live, count), axis=1, dtype=jnp.int32)
