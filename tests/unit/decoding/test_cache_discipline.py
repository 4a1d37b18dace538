"""The draft's cache is, at every round, the cache of the committed text under true target features."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.engine import Engine
from draftco_jax.drafts.base import Shared
from draftco_jax.drafts.eagle3.module import Eagle3, Eagle3State
from draftco_jax.models.functional import graph_of
from draftco_jax.models.kv_cache import Cache
from draftco_jax.numerics.sampling import PROPOSE, SamplingConfig, draw, law, request_uniforms

SAMPLING = SamplingConfig()
K = 4
CLOSE = {"atol": 2e-5, "rtol": 1e-5}  # float32, one forward over blocks against one over whole rows


class Round(NamedTuple):
    """What the engine's draft knew and proposed in one round."""

    hidden: np.ndarray  # [B, D]
    anchor: np.ndarray  # [B]
    keys: np.ndarray  # [B, K, S, H]
    values: np.ndarray
    drafts: np.ndarray  # [B, k]
    laws: np.ndarray  # [B, k, V]


class Fresh(NamedTuple):
    """The draft's states and cache by one pass over whole texts with true features."""

    states: jax.Array  # [B, S, D]
    cache: Cache


def true_features(graphs, weights, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Embedding table, and taps of whole rows [B, S, A]."""
    policy = graphs[0].merge(weights[0])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    tap_layers = graphs[1].merge(weights[1]).cfg.tap_layers
    _, taps, _ = policy(tokens, positions, jnp.ones_like(tokens), tap_layers=tap_layers)
    return policy.embed_tokens[...], taps


def fresh_prefill(graphs, weights, tokens: jax.Array) -> Fresh:
    """Index s reads the taps of x_s and the embedding of x_{s+1}."""
    embedding, taps = true_features(graphs, weights, tokens)
    draft = graphs[1].merge(weights[1])
    following = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    cache = draft.empty_cache(tokens.shape[0], tokens.shape[1] + K)
    start = jnp.zeros(tokens.shape[:1], jnp.int32)
    return Fresh(*draft.step(embedding[following], draft.fc(taps), start, cache))


def propose_after(graphs, weights, fresh: Fresh, anchor: jax.Array, uniforms: jax.Array):
    """k proposals after the token at `anchor`, from a fresh prefill."""
    policy, draft = graphs[0].merge(weights[0]), graphs[1].merge(weights[1])
    rows = jnp.arange(anchor.shape[0])
    hidden = fresh.states[rows, anchor - 1]
    ahead = uniforms[rows[:, None], anchor[:, None] + 1 + jnp.arange(K)[None, :], PROPOSE]
    shared = Shared(policy.embed_tokens[...], policy.head_kernel())
    proposal, _ = draft.propose(Eagle3State(fresh.cache, hidden), anchor, anchor, ahead, SAMPLING, shared)
    return proposal.tokens, proposal.laws


@pytest.fixture(scope="module")
def weights(toy):
    """A draft whose attention reads the whole prefix, so that any stale entry of its cache shows."""
    return toy.published("deep", "random")


@pytest.fixture(scope="module")
def recorded(toy, weights, mixed_requests, sampled_shape):
    """Rollouts of the real engine, and what its draft knew in each round."""
    rounds: list[Round] = []
    propose = Eagle3.propose

    def propose_and_note(draft, state, newest, anchor, uniforms, sampling, shared):
        proposal, after = propose(draft, state, newest, anchor, uniforms, sampling, shared)
        note = lambda *arrays: rounds.append(Round(*map(np.asarray, arrays)))  # noqa: E731
        layer, drawn = state.cache.layers[0], (proposal.tokens, proposal.laws)
        jax.debug.callback(note, state.hidden, anchor, layer.keys, layer.values, *drawn, ordered=True)
        return proposal, after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3, "propose", propose_and_note)
        engine = Engine(*toy.graphs, shape=sampled_shape, sampling=SAMPLING)
        rollouts = jax.tree.map(np.asarray, engine.generate(*weights, mixed_requests, K))
    jax.effects_barrier()
    return rollouts, rounds


@pytest.fixture(scope="module")
def fresh(toy, weights, recorded) -> Fresh:
    return jax.jit(partial(fresh_prefill, toy.graphs))(weights, jnp.asarray(recorded[0].tokens))


def live_rows(rollouts, anchor: np.ndarray) -> np.ndarray:
    """Requests that still had a token to make."""
    return np.flatnonzero(anchor < rollouts.lengths - 1)


def test_the_recording_covers_rounds_of_every_kind(recorded):
    rollouts, rounds = recorded
    assert len(rounds) == rollouts.rounds.max() >= 5
    assert rollouts.accepted[:, 0].sum() > 5 and rollouts.accepted[:, 2].sum() > 0
    assert sum(len(live_rows(rollouts, each.anchor)) for each in rounds) == rollouts.rounds.sum() > 20


def test_bug_case_b34_draft_cache_equals_a_prefill_of_the_committed_text(recorded, fresh):
    rollouts, rounds = recorded
    worst = 0.0
    for each in rounds:
        for row in live_rows(rollouts, each.anchor):
            anchor = each.anchor[row]
            for kept, true in zip((each.keys, each.values), fresh.cache.layers[0], strict=True):
                kept, true = kept[row, :, :anchor], np.asarray(true)[row, :, :anchor]
                np.testing.assert_allclose(kept, true, **CLOSE)
                worst = max(worst, np.abs(kept - true).max())
    print(f"max difference {worst:.2g}")


def test_bug_case_b36_next_draft_proposals_start_from_true_features(toy, weights, recorded, fresh, mixed_requests):
    rollouts, rounds = recorded
    uniforms = request_uniforms(mixed_requests.keys, rollouts.tokens.shape[1] + K + 1)
    propose = jax.jit(partial(propose_after, toy.graphs))
    for each in rounds:
        rows = live_rows(rollouts, each.anchor)
        np.testing.assert_allclose(each.hidden[rows], np.asarray(fresh.states)[rows, each.anchor[rows] - 1], **CLOSE)
        drafts, laws = propose(weights, fresh, jnp.asarray(each.anchor), uniforms)
        np.testing.assert_array_equal(each.drafts[rows], np.asarray(drafts)[rows])
        np.testing.assert_allclose(each.laws[rows], np.asarray(laws)[rows], **CLOSE)


def slow_propose(graphs, weights, tokens: jax.Array, uniforms: jax.Array, anchor: int):
    """Each step runs the draft over its whole prefix again: true features below `anchor`, its own states from there."""
    embedding, taps = true_features(graphs, weights, tokens)
    draft = graphs[1].merge(weights[1])
    hidden = draft.fc(taps)
    laws = []
    for step in range(uniforms.shape[1]):
        following = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
        cache = draft.empty_cache(tokens.shape[0], tokens.shape[1])
        states, _ = draft.step(embedding[following], hidden, jnp.zeros(tokens.shape[:1], jnp.int32), cache)
        newest = anchor - 1 + step  # index whose state tells the token at newest + 2
        laws.append(law(draft.logits(states[:, newest]), SAMPLING))
        tokens = tokens.at[:, newest + 2].set(draw(laws[-1], uniforms[:, step]))
        hidden = hidden.at[:, newest + 1].set(states[:, newest])
    return tokens[:, anchor + 1 : anchor + 1 + uniforms.shape[1]], jnp.stack(laws, axis=1)


def test_bug_case_b33_proposals_equal_a_reference_without_cache(toy, weights):
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, toy.vocab, (8, 12)), jnp.int32)
    uniforms = jnp.asarray(rng.random((8, K)), jnp.float32)
    anchor = 6

    def fast(weights, tokens, uniforms):
        fresh = fresh_prefill(toy.graphs, weights, tokens)
        table = jnp.zeros((8, anchor + 1 + K, 3)).at[:, anchor + 1 :, PROPOSE].set(uniforms)
        return propose_after(toy.graphs, weights, fresh, jnp.full(8, anchor), table)

    drafts, laws = jax.jit(fast)(weights, tokens, uniforms)
    slow_drafts, slow_laws = jax.jit(partial(slow_propose, toy.graphs), static_argnums=3)(
        weights, tokens, uniforms, anchor
    )
    np.testing.assert_array_equal(drafts, slow_drafts)
    np.testing.assert_allclose(laws, slow_laws, **CLOSE)
    assert len({tuple(row) for row in np.asarray(drafts).tolist()}) > 3


def test_bug_case_b24_returned_laws_are_those_the_drafts_were_drawn_from(recorded, mixed_requests):
    rollouts, rounds = recorded
    uniforms = np.asarray(request_uniforms(mixed_requests.keys, rollouts.tokens.shape[1] + K + 1))
    redraw = jax.jit(draw)
    for each in rounds:
        ahead = uniforms[np.arange(8)[:, None], each.anchor[:, None] + 1 + np.arange(K)[None, :], PROPOSE]
        assert each.laws.dtype == np.float32
        np.testing.assert_array_equal(redraw(jnp.asarray(each.laws), jnp.asarray(ahead)), each.drafts)


def test_bug_case_b40_positions_past_the_drafts_own_limit_are_not_clamped(toy):
    # A draft whose config says 8 positions, read up to position 23, equals one whose config says 64; no table ends.
    rng = np.random.default_rng(3)
    embeds, hidden = (jnp.asarray(rng.normal(size=(1, 24, 16)), jnp.float32) for _ in range(2))
    logits = {}
    for limit, capacity in ((8, 24), (64, 24), (8, 64)):
        graph = graph_of(replace(toy.draft_cfg, max_position_embeddings=limit).build)
        draft = graph.merge(toy.drafts["random"])
        states, _ = jax.jit(draft.step)(embeds, hidden, jnp.zeros(1, jnp.int32), draft.empty_cache(1, capacity))
        logits[limit, capacity] = np.asarray(draft.logits(states))
    np.testing.assert_array_equal(logits[8, 24], logits[64, 24])
    np.testing.assert_allclose(logits[8, 24], logits[8, 64], **CLOSE)
