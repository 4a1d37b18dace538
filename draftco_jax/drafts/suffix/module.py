"""The suffix draft: the greedy walk in a suffix tree with counts, without building the tree.

Searched are a request's history, its own text and the texts of its siblings. Of all slots that a token follows, those
are kept whose text up to there has the longest match with the end of the request's text. They are the leaves under one
node of the suffix tree of all searched texts. From it the walk goes down: the most frequent next token among the slots
that still agree (the smallest id of several), then its most frequent successor, and so on. A count ratio is a token's
count over the number of agreeing slots that go on; their product estimates the probability of the walk.

Time and memory of a round are O(N * max_match + k * (N + V)) per request, N = H + S + G * S. The counts of next tokens
are one i32[B, V] array per step, a k-th of the laws that a proposal consists of anyway; nothing has the size N * V.

With siblings the tokens of a request depend on how far the others of its batch have come. Their law does not: what is
proposed depends on committed tokens only, and every proposal is verified.

Letters: B requests, S slots of a text, H history tokens, G siblings, N searched slots, M longest match, k drafts,
V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from draftco_jax.drafts.base import Context, DraftSampling, Features, Proposal, Shared
from draftco_jax.drafts.matching import NO_TOKEN, copied, empty_text, ending, match_lengths, up_to, write_text
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.numerics.rows import pick


class SuffixState(NamedTuple):
    """What is searched."""

    text: jax.Array  # i32[B, S]
    history: jax.Array  # i32[B, H]
    siblings: jax.Array  # i32[B, G]


class Suffix(nnx.Module):
    """A draft without weights."""

    def __init__(self, cfg: SuffixConfig) -> None:
        self.cfg = cfg

    def empty_state(self, batch: int, capacity: int, context: Context) -> SuffixState:
        """No text yet. Nothing of an earlier request is left but what `context` brings."""
        siblings = context.siblings if self.cfg.use_siblings else context.siblings[:, :0]
        return SuffixState(empty_text(batch, capacity), context.history, siblings)

    def place_siblings(self, state: SuffixState, rows: Int[Array, "B G"]) -> SuffixState:
        """With siblings in these rows, -1 where one is in none."""
        return state._replace(siblings=rows if self.cfg.use_siblings else rows[:, :0])

    def absorb(self, state: SuffixState, features: Features, shared: Shared) -> SuffixState:
        """Write down the tokens."""
        return state._replace(text=write_text(state.text, features))

    def propose(
        self,
        state: SuffixState,
        newest: Int[Array, " B"],
        anchor: Int[Array, " B"],
        uniforms: Float[Array, "B k"],
        sampling: DraftSampling,
        shared: Shared,
    ) -> tuple[Proposal, SuffixState]:
        """The walk from the longest match, as far as its budget and its probability allow."""
        searched = searched_texts(state, anchor)
        longest, agreeing = self.longest_match(searched, ending(state.text, anchor, self.cfg.max_match))
        tokens, probabilities = greedy_walk(searched, agreeing, uniforms.shape[1], shared.embedding.shape[0])
        budgets = jnp.array([self.cfg.budget(length) for length in range(self.cfg.max_match + 1)], jnp.int32)
        steps = jnp.arange(uniforms.shape[1], dtype=jnp.int32)
        going = (probabilities > 0) & (probabilities >= self.cfg.min_probability)
        going &= steps[None, :] < budgets[longest][:, None]
        # Probabilities and the budget only fall along a walk, so the live steps are its first ones.
        count = jnp.sum(going.astype(jnp.int32), axis=1)
        return copied(tokens, count, shared.embedding.shape[0]), state

    def longest_match(
        self, searched: Int[Array, "B N"], end: Int[Array, "B M"]
    ) -> tuple[Int[Array, " B"], Bool[Array, "B N"]]:
        """Length of the longest match that goes on (0: none of min_match tokens), and the slots that have it."""
        lengths = match_lengths(searched, end)
        lengths = jnp.where((ahead(searched, 1) >= 0) & (lengths >= self.cfg.min_match), lengths, 0)
        longest = jnp.max(lengths, axis=1)
        return longest, (lengths == longest[:, None]) & (longest[:, None] > 0)


def searched_texts(state: SuffixState, anchor: Int[Array, " B"]) -> Int[Array, "B N"]:
    """History, own text and siblings' texts side by side, NO_TOKEN between them and after each anchor."""
    batch, slots = state.text.shape
    texts = up_to(state.text, anchor)
    rows = state.siblings
    known = (rows >= 0) & (rows != jnp.arange(batch, dtype=jnp.int32)[:, None])
    others = jnp.where(known[:, :, None], texts[jnp.maximum(rows, 0)], NO_TOKEN)
    # A text that fills its row to the end would otherwise touch the next one.
    apart = lambda a: jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, 1),), constant_values=NO_TOKEN)  # noqa: E731
    others = apart(others).reshape(batch, rows.shape[1] * (slots + 1))
    return jnp.concatenate([apart(state.history), apart(texts), others], axis=1)


def ahead(searched: Int[Array, "B N"], steps: int) -> Int[Array, "B N"]:
    """The token `steps` after each slot, NO_TOKEN past the end."""
    padded = jnp.pad(searched, ((0, 0), (0, steps)), constant_values=NO_TOKEN)
    return padded[:, steps:]


def greedy_walk(
    searched: Int[Array, "B N"], agreeing: Bool[Array, "B N"], k: int, vocab_size: int
) -> tuple[Int[Array, "B k"], Float32[Array, "B k"]]:
    """The most frequent continuation, token by token, and the product of count ratios up to each; 0 once it ended."""
    batch = searched.shape[0]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    tokens, probabilities, probability = [], [], jnp.ones((batch,), jnp.float32)
    for step in range(1, k + 1):
        after = ahead(searched, step)
        agreeing &= after >= 0
        counts = jnp.zeros((batch, vocab_size), jnp.int32)
        counts = counts.at[rows, jnp.maximum(after, 0)].add(agreeing.astype(jnp.int32))
        token = jnp.argmax(counts, axis=1).astype(jnp.int32)
        most = pick(counts, token).astype(jnp.float32)
        going_on = jnp.sum(agreeing.astype(jnp.int32), axis=1).astype(jnp.float32)
        probability = probability * (most / jnp.maximum(going_on, 1.0))
        agreeing &= after == token[:, None]
        tokens.append(token)
        probabilities.append(probability)
    return jnp.stack(tokens, axis=1), jnp.stack(probabilities, axis=1)
