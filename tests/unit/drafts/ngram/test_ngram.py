"""Tests of the prompt-lookup draft against a search written as loops, over texts read in rounds as the engine does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.ngram import NGRAM
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.functional import initialise
from draftco_jax.numerics.sampling import SamplingConfig

VOCAB, CAPACITY, K, BLOCK = 4, 24, 5, 6
CFG = NGramConfig(min_match=2, max_match=4)
SHARED = Shared(jnp.zeros((VOCAB, 2)), jnp.zeros((2, VOCAB)))
GRAPH, PARAMS = initialise(CFG.build, jax.random.key(0))


def reference(text, k, cfg):
    """Longest match first, then the most recent; the copy may run into its own tokens."""
    text = list(text)
    for length in range(cfg.max_match, cfg.min_match - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                grown = list(text)
                for i in range(k):
                    grown.append(grown[end + 1 + i])
                return grown[len(text) :]
    return []


def no_context(batch):
    return Context(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), jnp.int32))


@jax.jit
def absorb(state, tokens, following, start, last):
    wide = jnp.zeros((*tokens.shape, 0))
    return GRAPH.merge(PARAMS).absorb(state, Features(tokens, following, wide, wide, start, last), SHARED)


@jax.jit
def propose(state, anchor):
    newest = jnp.take_along_axis(state, anchor[:, None], axis=1)[:, 0]
    draft, uniforms = GRAPH.merge(PARAMS), jnp.zeros((state.shape[0], K))
    proposal, after = draft.propose(state, newest, anchor, uniforms, SamplingConfig(), SHARED)
    return proposal, after


def read(texts, rng):
    """The state after rounds of 1 to BLOCK true tokens, each followed by rejected ones, up to each text's end."""
    batch = len(texts)
    state = GRAPH.merge(PARAMS).empty_state(batch, CAPACITY, no_context(batch))
    done = np.zeros(batch, np.int32)
    ends = np.array([len(text) - 1 for text in texts])
    while (done < ends).any():
        tokens, following = rng.integers(0, VOCAB, size=(2, batch, BLOCK)).astype(np.int32)
        last = np.zeros(batch, np.int32)
        for b, text in enumerate(texts):
            if done[b] == ends[b]:  # a finished request is given its last token again
                done[b] -= 1
            count = min(int(rng.integers(1, BLOCK + 1)), int(ends[b] - done[b]))
            tokens[b, :count] = text[done[b] : done[b] + count]
            following[b, :count] = text[done[b] + 1 : done[b] + count + 1]
            last[b] = count - 1
        state = absorb(state, *map(jnp.asarray, (tokens, following, done, last)))
        done = done + last + 1
    return state, jnp.asarray(done)


def spoken(proposal, b):
    return np.asarray(proposal.tokens[b, : int(proposal.count[b])]).tolist()


def test_proposals_equal_a_search_by_loops():
    rng, proposing = np.random.default_rng(0), 0
    for _ in range(12):
        texts = [rng.integers(0, VOCAB, size=rng.integers(2, CAPACITY - BLOCK)).astype(np.int32) for _ in range(16)]
        state, anchor = read(texts, rng)
        proposal, after = propose(state, anchor)
        for b, text in enumerate(texts):
            expected = reference(text, K, CFG)
            assert spoken(proposal, b) == expected, text
            proposing += bool(expected)
            # The law is one-hot on what is proposed, and a row of zeros where nothing is.
            law = np.zeros((K, VOCAB), np.float32)
            law[np.arange(len(expected)), expected] = 1.0
            np.testing.assert_array_equal(proposal.laws[b], law)
            assert (np.asarray(proposal.tokens[b, len(expected) :]) == 0).all()
        np.testing.assert_array_equal(after, state)
    assert 30 < proposing < 12 * 16 - 30  # both kinds are met


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 0, 1, 2], [3, 0, 1, 2, 3]),  # runs into its own copy: the period goes on
        ([1, 1, 1], [1] * K),
        ([0, 1, 3, 0, 1, 2, 0, 1], [2, 0, 1, 2, 0]),  # the most recent of two equal matches
        ([2, 0, 1, 3, 0, 1, 2, 2, 0, 1], [3, 0, 1, 2, 2]),  # a longer match beats a more recent one
        ([0, 1, 2, 3], []),
        ([3, 3], []),  # one token is fewer than min_match
    ],
)
def test_examples(text, expected):
    state, anchor = read([np.array(text, np.int32)] * 16, np.random.default_rng(1))
    assert spoken(propose(state, anchor)[0], 0) == expected


def test_bug_case_b37_a_short_request_after_a_long_one_finds_nothing_of_it():
    rng = np.random.default_rng(2)
    long = [rng.integers(0, VOCAB, size=CAPACITY - BLOCK).astype(np.int32) for _ in range(16)]
    short = [text[:2] for text in long]
    read(long, rng)
    state, anchor = read(short, rng)
    assert (np.asarray(propose(state, anchor)[0].count) == 0).all()


def test_bug_case_b38_proposals_of_a_request_do_not_depend_on_the_others():
    rng = np.random.default_rng(3)
    a, b = np.array([1, 2, 3, 1, 2], np.int32), np.array([0, 0, 0], np.int32)
    mixed, anchor = read([a, b, a], rng)
    alone, alone_anchor = read([a], rng)
    together, single = propose(mixed, anchor)[0], propose(alone, alone_anchor)[0]
    for row in (0, 2):
        for one, other in zip(together, single, strict=True):
            np.testing.assert_array_equal(one[row], other[0])
    assert spoken(single, 0) == [3, 1, 2, 3, 1]


def test_it_is_a_family_without_training_or_weights():
    assert NGRAM.config is NGramConfig and not NGRAM.trained and NGRAM.from_policy(PARAMS, {"w": 1}) == PARAMS == {}


@pytest.mark.parametrize(("changes", "message"), [({"min_match": 0}, "min_match=0"), ({"max_match": 1}, "max_match=1")])
def test_ranges_without_a_match_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NGramConfig(**({"min_match": 2, "max_match": 4} | changes))
