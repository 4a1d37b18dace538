"""What comes out of a round follows the policy's law exactly: by enumeration of everything that is random in it.

All probabilities are sixths, so a grid of 60 uniforms at (i + 1/2) / 60 hits every event of `verify` exactly as often
as its probability says (60 is a multiple of 1 .. 6, the numerators that a law or a residual's mass can have), and no
uniform is within 1/120 of a boundary. Counting outcomes over the grid is then the law of `verify`, not an estimate.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.rejection import accepts, verify
from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.drafts.previous.config import PreviousConfig
from draftco_jax.drafts.suffix.config import SuffixConfig
from draftco_jax.models.functional import initialise, split
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.rows import pick, row_at
from draftco_jax.numerics.sampling import SamplingConfig, draw

V, K, CAPACITY, GRID = 3, 2, 12, 60
# Row: the token before. NEW is the policy's law p, OLD that of the policy of an epoch ago.
NEW = np.array([[1, 2, 3], [4, 1, 1], [0, 3, 3]]) / 6
OLD = np.array([[3, 1, 2], [1, 1, 4], [2, 3, 1]]) / 6

TICKS = (np.arange(GRID, dtype=np.float32) + 0.5) / GRID
UNIFORMS = np.array(list(itertools.product(TICKS, repeat=K + 1)), np.float32)  # [60^3, 3]


@jax.jit
def outcomes(p, q, drafts):
    """Share of the grid for each (accepted, token emitted after them), [k + 1, V], under `verify`."""
    p, q, drafts = (jnp.broadcast_to(a[None], (UNIFORMS.shape[0], *a.shape)) for a in (p, q, drafts))
    commit = jnp.broadcast_to(jnp.asarray(UNIFORMS[:, 2:]), (UNIFORMS.shape[0], K + 1))
    return shares(*verify(p, q, drafts, jnp.asarray(UNIFORMS[:, :2]), commit))


@jax.jit
def flawed_outcomes(p, q, drafts):
    """The same where the token after a rejection is drawn from p."""
    p, q, drafts = (jnp.broadcast_to(a[None], (UNIFORMS.shape[0], *a.shape)) for a in (p, q, drafts))
    refused = ~accepts(pick(p[:, :K], drafts), pick(q, drafts), jnp.asarray(UNIFORMS[:, :2]))
    accepted = jnp.argmax(jnp.pad(refused, ((0, 0), (0, 1)), constant_values=True), axis=1).astype(jnp.int32)
    return shares(accepted, draw(row_at(p, accepted), jnp.asarray(UNIFORMS[:, 2])))


def shares(accepted, final):
    counts = jnp.zeros((K + 1, V), jnp.int32).at[accepted, final].add(1)
    return counts.astype(jnp.float32) / UNIFORMS.shape[0]


def chain(first, tokens, law):
    """Probability of these tokens after `first`."""
    return np.prod([law[a, b] for a, b in itertools.pairwise([first, *tokens])])


def law_of_three(first, proposals, rule=outcomes):
    """Law of the next K + 1 tokens: a round per (weight, tokens, laws), and the policy itself for what it leaves."""
    total = np.zeros((V,) * (K + 1))
    for weight, tokens, laws in proposals:
        p = NEW[[first, *tokens]]
        out = rule(*(jnp.asarray(a, d) for a, d in ((p, jnp.float32), (laws, jnp.float32), (tokens, jnp.int32))))
        for accepted, final in itertools.product(range(K + 1), range(V)):
            begun = [*tokens[:accepted], final]
            for rest in itertools.product(range(V), repeat=K - accepted):
                share = float(out[accepted, final]) * chain(final, rest, NEW)
                total[(*begun, *rest)] += weight * share
    return total


def expected_law(first):
    return np.array([chain(first, tokens, NEW) for tokens in itertools.product(range(V), repeat=K + 1)]).reshape(
        (V,) * (K + 1)
    )


def drafted(graph, params, shared, text, history):
    """(tokens, laws, count) that the draft proposes after `text`."""
    draft, tokens = graph.merge(params), jnp.asarray(text, jnp.int32)[None]
    at, zero = jnp.array([len(text) - 1], jnp.int32), jnp.zeros((1,), jnp.int32)
    wide = jnp.zeros((1, len(text) - 1, 0))
    history = jnp.asarray(history, jnp.int32).reshape(1, -1)
    state = draft.empty_state(1, CAPACITY, Context(history, jnp.full((1, 1), -1, jnp.int32)))
    state = draft.absorb(state, Features(tokens[:, :-1], tokens[:, 1:], wide, wide, zero, at - 1), shared)
    proposal, _ = draft.propose(state, tokens[:, -1], at, jnp.zeros((1, K)), SamplingConfig(), shared)
    return [np.asarray(a[0]) for a in proposal]


NO_TABLES = Shared(jnp.zeros((V, 1)), jnp.zeros((1, V)))


def markov_policy():
    """A real decoder whose law of the next token is OLD[last token]: no block adds anything to the embedding."""
    sizes = {"intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    policy = Qwen3Config(
        vocab_size=V, hidden_size=V, head_dim=2, max_position_embeddings=32, rms_norm_eps=1e-12, **sizes
    )
    cfg = PreviousConfig(policy=policy, history_tokens=6)
    graph, params = initialise(cfg.build, jax.random.key(0))
    module = graph.merge(params)
    block = module.policy.layers[0]
    for projection in (block.self_attn.o_proj, block.mlp.down_proj):
        projection.kernel[...] = jnp.zeros_like(projection.kernel[...])
    module.policy.embed_tokens[...] = jnp.eye(V)
    # The final norm turns a unit vector of width V into sqrt(V) times it.
    module.policy.lm_head.kernel[...] = jnp.asarray(np.log(OLD) / np.sqrt(V), jnp.float32)
    return split(module)


@pytest.fixture(scope="module")
def earlier_texts():
    """The proposals after the text [1, 0], one for each pair of tokens that the old policy may have gone on with."""
    graph, params = markov_policy()
    propose = jax.jit(lambda history: drafted_arrays(graph, params, history))
    made = []
    for pair in itertools.product(range(V), repeat=K):
        tokens, laws, count = (np.asarray(a) for a in propose(jnp.array([1, 0, *pair, -1, -1], jnp.int32)))
        assert count == K and tokens.tolist() == list(pair)
        np.testing.assert_allclose(laws, OLD[[0, pair[0]]], rtol=0, atol=1e-6)  # float32 logs and exps
        made.append((chain(0, pair, OLD), list(pair), laws))
    return made


def drafted_arrays(graph, params, history):
    draft, text = graph.merge(params), jnp.array([[1, 0]], jnp.int32)
    none, zero, wide = jnp.full((1, 1), -1, jnp.int32), jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1, 0))
    state = draft.empty_state(1, CAPACITY, Context(history[None], none))
    state = draft.absorb(state, Features(text[:, :1], text[:, 1:], wide, wide, zero, zero), NO_TABLES)
    proposal, _ = draft.propose(state, zero, zero + 1, jnp.zeros((1, K)), SamplingConfig(), NO_TABLES)
    return proposal.tokens[0], proposal.laws[0], proposal.count[0]


def test_an_earlier_text_under_its_old_law_leaves_the_new_law_as_it_is(earlier_texts):
    # Sums of products of sixths: what is left is float64 and the float32 shares.
    np.testing.assert_allclose(law_of_three(0, earlier_texts), expected_law(0), rtol=0, atol=1e-7)


def test_going_on_from_the_policy_after_a_rejection_is_not_exact(earlier_texts):
    """The published rule. Its first token follows min(p, q) + (1 - a) p, which is not p."""
    found = law_of_three(0, earlier_texts, flawed_outcomes)
    p, q = NEW[0], OLD[0]
    least = np.minimum(p, q)
    np.testing.assert_allclose(found.sum(axis=(1, 2)), least + (1 - least.sum()) * p, rtol=0, atol=1e-7)
    assert np.abs(found.sum(axis=(1, 2)) - p).max() > 0.05
    assert np.abs(found - expected_law(0)).max() > 0.01


COPIES = {
    "ngram": (NGramConfig(min_match=1, max_match=2), [0, 1, 2, 0], [], [1, 2]),
    "ngram, refused": (NGramConfig(min_match=1, max_match=2), [2, 0, 2], [], [0, 2]),  # p(0 | 2) = 0
    "ngram, silent": (NGramConfig(min_match=2, max_match=2), [0, 1, 2], [], []),
    "suffix": (SuffixConfig(budget_per_match=2.0, history_tokens=6), [2, 0], [0, 1, 1, -1, 0, 2], [1, 1]),
    "suffix, one": (SuffixConfig(history_tokens=6), [2, 0], [1, 0, 2, 1, -1, -1], [2]),
}


@pytest.mark.parametrize(("cfg", "text", "history", "expected"), COPIES.values(), ids=COPIES)
def test_a_copied_text_leaves_the_law_as_it_is(cfg, text, history, expected):
    tokens, laws, count = drafted(*initialise(cfg.build, jax.random.key(0)), NO_TABLES, text, history)
    assert tokens[:count].tolist() == expected
    found = law_of_three(text[-1], [(1.0, tokens.tolist(), laws)])
    np.testing.assert_allclose(found, expected_law(text[-1]), rtol=0, atol=1e-7)


def test_a_copied_text_that_passes_for_a_draw_from_the_policy_is_not_exact():
    """What the one-hot law is for: under p as its law every copy would be accepted."""
    found = law_of_three(0, [(1.0, [1, 1], NEW[[0, 1]])])
    np.testing.assert_allclose(found[1, 1], NEW[1], rtol=0, atol=1e-7)
    assert np.abs(found - expected_law(0)).max() > 0.1


def test_two_rounds_on_one_earlier_text_leave_the_law_as_it_is():
    """The second round goes on with a text that was left to chance twice: by its tokens, and by the bonus token.

    The bonus token is drawn from p; where it happens to be the earlier text's, that text is a draw from q again.
    """
    graph, params = markov_policy()
    olds = np.array(list(itertools.product(range(V), repeat=K + 2)), np.int32)
    begun = np.concatenate([np.tile([[1, 0]], (len(olds), 1)), olds[:, : K + 1]], axis=1).astype(np.int32)

    @jax.jit
    def second(olds, text):
        draft, batch = graph.merge(params), len(olds)
        history = jnp.concatenate([text[:, :2], olds], axis=1)
        state = draft.empty_state(batch, CAPACITY, Context(history, jnp.full((batch, 1), -1, jnp.int32)))
        at, wide = jnp.full(batch, text.shape[1] - 1, jnp.int32), jnp.zeros((batch, text.shape[1] - 1, 0))
        read = Features(text[:, :-1], text[:, 1:], wide, wide, jnp.zeros_like(at), at - 1)
        state = draft.absorb(state, read, NO_TABLES)
        return draft.propose(state, text[:, -1], at, jnp.zeros((batch, K)), SamplingConfig(), NO_TABLES)[0]

    again = second(jnp.asarray(olds), jnp.asarray(begun))
    assert (np.asarray(again.count) == 1).all() and (np.asarray(again.tokens[:, 0]) == olds[:, -1]).all()
    rounds = {}

    def verified(first, tokens, laws):
        key = (first, *tokens, laws.tobytes())
        if key not in rounds:
            p = NEW[[first, *tokens]]
            arrays = ((p, jnp.float32), (laws, jnp.float32), (tokens, jnp.int32))
            rounds[key] = np.asarray(outcomes(*(jnp.asarray(a, d) for a, d in arrays)), np.float64)
        return rounds[key]

    total = np.zeros((V,) * (K + 2))
    for old, tokens, laws in zip(olds, np.asarray(again.tokens), np.asarray(again.laws), strict=True):
        weight, (first, second_draft, bonus, _) = chain(0, old, OLD), old
        out = verified(0, [first, second_draft], OLD[[0, first]].astype(np.float32))
        for accepted, final in itertools.product(range(K + 1), range(V)):
            come = [*old[:accepted], final]
            if accepted == K and final == bonus:  # the text is still the earlier one: a second round
                last = verified(final, tokens.tolist(), laws)
                law = last[0] + last[1:].sum() * (np.arange(V) == old[-1])
                total[tuple(come)] += weight * out[accepted, final] * law
                continue
            for rest in itertools.product(range(V), repeat=K + 1 - accepted):
                total[(*come, *rest)] += weight * out[accepted, final] * chain(final, rest, NEW)
    expected = [chain(0, tokens, NEW) for tokens in itertools.product(range(V), repeat=K + 2)]
    np.testing.assert_allclose(total.reshape(-1), expected, rtol=0, atol=1e-7)
