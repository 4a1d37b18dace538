"""What drafts that copy text share: a request's own text, the search for its end elsewhere, proposals without doubt.

Such a proposal is no draw: its law is one-hot, so verification accepts token d with probability p(d) and otherwise
draws from p without d, and the tokens that come out follow p exactly, however good or bad the match was.

Letters: B requests, T tokens, S slots of a text, N slots of a text that is searched, M longest match, k drafts,
V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from draftco_jax.drafts.base import Features, Proposal
from draftco_jax.numerics.rows import update_rows

NO_TOKEN = -1
"""Fills what is no text: padding, and the place between two texts."""

_BEFORE_TEXT = -2


def empty_text(batch: int, capacity: int) -> Int[Array, "B S"]:
    """Texts of nothing; S = capacity + 1, one more because the newest token stands behind the last index."""
    return jnp.full((batch, capacity + 1), NO_TOKEN, jnp.int32)


def write_text(text: Int[Array, "B S"], features: Features) -> Int[Array, "B S"]:
    """The texts up to each new anchor, start + last + 1. What stands after it is left from rejected tokens."""
    rows = jnp.concatenate([features.tokens[:, :1], features.following], axis=1)
    return update_rows(text, rows, features.start)


def up_to(text: Int[Array, "B S"], anchor: Int[Array, " B"]) -> Int[Array, "B S"]:
    """The texts with NO_TOKEN after their anchors."""
    slots = jnp.arange(text.shape[1], dtype=jnp.int32)
    return jnp.where(slots[None, :] <= anchor[:, None], text, NO_TOKEN)


def ending(text: Int[Array, "B S"], anchor: Int[Array, " B"], count: int) -> Int[Array, "B M"]:
    """The last M tokens, newest first: entry i stands at anchor - i. What lies before the text equals no token."""
    at = anchor[:, None] - jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.where(at >= 0, jnp.take_along_axis(text, jnp.maximum(at, 0), axis=1), _BEFORE_TEXT)


def match_lengths(searched: Int[Array, "B N"], end: Int[Array, "B M"]) -> Int[Array, "B N"]:
    """How many tokens up to and including each slot equal the end of the request's text, at most M.

    N * M comparisons. A match never spans a NO_TOKEN, because none of the tokens of `end` is one.
    """
    equal, lengths = jnp.ones(searched.shape, bool), jnp.zeros(searched.shape, jnp.int32)
    for i in range(end.shape[1]):
        earlier = jnp.pad(searched, ((0, 0), (i, 0)), constant_values=NO_TOKEN)[:, : searched.shape[1]]
        equal &= earlier == end[:, i : i + 1]
        lengths += equal.astype(jnp.int32)
    return lengths


def one_hot_laws(tokens: Int[Array, "B k"], proposed: Int[Array, "B k"], vocab_size: int) -> Float32[Array, "B k V"]:
    """Law of each proposed token: 1 on it; a row of zeros where `proposed` is 0."""
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    return ((ids[None, None, :] == tokens[:, :, None]) & (proposed[:, :, None] > 0)).astype(jnp.float32)


def copied(tokens: Int[Array, "B k"], count: Int[Array, " B"], vocab_size: int) -> Proposal:
    """The first `count` of these tokens as a proposal, token 0 as the padding after them."""
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    proposed = (slots[None, :] < count[:, None]).astype(jnp.int32)
    tokens = tokens * proposed
    return Proposal(tokens, one_hot_laws(tokens, proposed, vocab_size), count)


def check_match_range(min_match: int, max_match: int) -> None:
    """Refuse an empty range of match lengths."""
    if min_match < 1:
        raise ValueError(f"min_match={min_match} must be >= 1; a match of no token says nothing, 1 or 2 is usual")
    if max_match < min_match:
        raise ValueError(f"max_match={max_match} must be >= min_match={min_match}; raise it or lower min_match")
