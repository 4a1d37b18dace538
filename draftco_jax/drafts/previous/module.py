r"""The previous epoch's text as a draft.

As long as a request's text equals the earlier text of the same prompt, what followed there is proposed, with the laws q
that the OLD policy had at these places. It is a draw from q, made an epoch ago, so verification by the one rule of this
house (accept with min(1, p/q), at the first rejection draw from the residual (p - q)_+) gives texts that follow the new
policy's p exactly. After a rejection the texts differ, and nothing is proposed for the rest of the request.

SPEC-RL as published (arXiv 2509.23232, in our reading of its Algorithm 1, with its leniency at 1) goes on from p itself
after the rejection. With a = sum_v min(p, q) the token at that place then follows min(p, q) + (1 - a) p and not p: what
was drawn from q and refused must be made good, which is what the residual does. A leniency above 1 accepts more and is
no sampling from p either; it has no place here.

What exactness asks of the caller: the text was drawn by THESE weights under the sampling settings of now, and it was
picked without a look at its tokens or reward. A token that q says is impossible (a text of other weights, or rounding
at the edge of a filter) ends the proposal before it.

One pass of the old policy over the H tokens is made when a request starts; it keeps f32 or bf16 [B, H, D] states, from
which each round makes k rows of logits. The token sampled at prefill, and the one that ends a fully accepted round, are
drawn from p without regard to the old text. Each of them leaves the old text with probability 1 - sum_v p q, however
close p and q are: a longer k means fewer such places.

Letters: B requests, S slots of a text, H history tokens, D width, k drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from draftco_jax.drafts.base import Context, DraftSampling, Features, Proposal, Shared
from draftco_jax.drafts.matching import NO_TOKEN, empty_text, write_text
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.numerics.rows import pick


class PreviousState(NamedTuple):
    """The text of now, the earlier text, and what the old policy made of that."""

    text: jax.Array  # i32[B, S]
    old: jax.Array  # i32[B, H]
    hidden: jax.Array  # [B, H, D] of the old text, after the final norm


class Previous(nnx.Module):
    """The old policy. It reads its own embedding and head, not the live ones."""

    def __init__(self, cfg: PreviousConfig, *, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        self.policy = cfg.policy.build(rngs)

    def empty_state(self, batch: int, capacity: int, context: Context) -> PreviousState:
        """Run the old policy over the earlier texts, `context.history`: prompt and response, then -1."""
        old = context.history
        if old.shape[1] == 0:  # nothing is known yet, which one slot of padding says as well
            old = jnp.full((batch, 1), NO_TOKEN, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(old.shape[1], dtype=jnp.int32)[None], old.shape)
        segments = (old >= 0).astype(jnp.int32)
        hidden = self.policy(jnp.maximum(old, 0), positions, segments).hidden
        return PreviousState(empty_text(batch, capacity), old, hidden)

    def absorb(self, state: PreviousState, features: Features, shared: Shared) -> PreviousState:
        """Write down the tokens."""
        return state._replace(text=write_text(state.text, features))

    def propose(
        self,
        state: PreviousState,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, PreviousState]:
        """The next k tokens of the earlier text where the text of now is its beginning, or what is left of it."""
        steps = jnp.arange(uniforms.shape[1], dtype=jnp.int32)[None, :]
        length = state.old.shape[1]
        before = anchor[:, None] + steps  # the place whose law is that of draft `steps`
        tokens = jnp.take_along_axis(state.old, jnp.minimum(before + 1, length - 1), axis=1)
        known = (before + 1 < length) & (tokens >= 0) & agrees(state.text, state.old, anchor)[:, None]
        tokens = jnp.where(known, tokens, 0)
        states = jnp.take_along_axis(state.hidden, jnp.minimum(before, length - 1)[:, :, None], axis=1)
        laws = sampling.law(self.policy.logits(states))
        known &= pick(laws, tokens) > 0
        proposed = jnp.cumprod(known.astype(jnp.int32), axis=1)
        laws = jnp.where(proposed[:, :, None] > 0, laws, 0.0)
        return Proposal(tokens * proposed, laws, jnp.sum(proposed, axis=1)), state


def agrees(text: Int[Array, "B S"], old: Int[Array, "B H"], anchor: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether the text up to its anchor and the earlier text are the same as far as both go."""
    both = min(text.shape[1], old.shape[1])
    slots = jnp.arange(both, dtype=jnp.int32)[None, :]
    equal = (text[:, :both] == old[:, :both]) | (slots > anchor[:, None])
    return jnp.all(equal, axis=1)
