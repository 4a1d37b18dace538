"""The prompt-lookup draft.

Of the earlier places in a request's own text where its last tokens occurred, the one with the longest match is taken
(max_match down to min_match tokens), and of several the most recent. Proposed is what followed there. A copy that
reaches the newest token goes on with the tokens it has proposed itself, so a text that repeats with period n is
continued with period n.

Letters: B requests, S slots, k drafts.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from draftco_jax.drafts.base import Context, DraftSampling, Features, Proposal, Shared
from draftco_jax.drafts.matching import copied, empty_text, ending, match_lengths, write_text
from draftco_jax.drafts.ngram.config import NGramConfig


class NGram(nnx.Module):
    """A draft without weights. Its state is the text, i32[B, S]."""

    def __init__(self, cfg: NGramConfig) -> None:
        self.cfg = cfg

    def empty_state(self, batch: int, capacity: int, context: Context) -> Int[Array, "B S"]:
        """No text yet; history and siblings are not looked at."""
        return empty_text(batch, capacity)

    def absorb(self, state: Int[Array, "B S"], features: Features, shared: Shared) -> Int[Array, "B S"]:
        """Write down the tokens."""
        return write_text(state, features)

    def propose(
        self,
        state: Int[Array, "B S"],
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, Int[Array, "B S"]]:
        """Copy what followed the best match: k tokens or none. S * max_match comparisons."""
        k, slots = uniforms.shape[1], jnp.arange(state.shape[1], dtype=jnp.int32)
        lengths = match_lengths(state, ending(state, anchor, self.cfg.max_match))
        usable = (slots[None, :] < anchor[:, None]) & (lengths >= self.cfg.min_match)
        lengths = jnp.where(usable, lengths, 0)
        longest = jnp.max(lengths, axis=1)
        place = jnp.max(jnp.where(usable & (lengths == longest[:, None]), slots[None, :], -1), axis=1)
        period = jnp.maximum(anchor - place, 1)
        steps = jnp.arange(k, dtype=jnp.int32)
        source = place[:, None] + 1 + steps[None, :] % period[:, None]
        found = longest > 0
        tokens = jnp.take_along_axis(state, jnp.where(found[:, None], source, 0), axis=1)
        count = jnp.where(found, k, 0).astype(jnp.int32)
        return copied(tokens, count, shared.embedding.shape[0]), state
