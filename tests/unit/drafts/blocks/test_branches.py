"""Tests of what the training-time block of an anchor reads: what the rollout's block reads, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.drafts.blocks.body import head_logits
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.models.functional import graph_of
from draftco_jax.numerics.sampling import SamplingConfig

ONE_LAYER = DFlashConfig(
    tap_layers=(0, 1),
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    mask_token_id=0,
    block_size=4,
)
CONTEXT = Context(jnp.zeros((5, 0), jnp.int32), jnp.zeros((5, 0), jnp.int32))
ANCHORS = np.array([0, 1, 3, 4, 5], np.int32)  # one a request; the last has more than a window before it
NINE = 3  # the document of nine tokens, alone in its row


def rolled_out(cfg, graph, rows=5, k=None):
    """Compiled: true taps of 0..7, rejected ones in between, then one round of each request at its own anchor."""
    k = cfg.max_draft_length if k is None else k

    @jax.jit
    def run(params, target, tokens, taps, wrong, uniforms):
        draft, shared = graph.merge(params), Shared(target.embedding, target.head)
        state = draft.empty_state(rows, 12, CONTEXT)

        def at(start, taps):
            known = jnp.full(rows, start, jnp.int32), jnp.full(rows, 1, jnp.int32)
            return Features(tokens[:, :6], tokens[:, :6], taps, taps[..., :16], *known)

        # Indices 0 and 1 are verified, 2 to 5 rejected; the next round verifies from 2 on.
        first = jnp.concatenate([taps[:, :2], wrong[:, 2:6]], axis=1)
        state = draft.absorb(state, at(0, first), shared)
        state = draft.absorb(state, at(2, taps[:, 2:8]), shared)
        anchors = jnp.asarray(ANCHORS)
        newest = jnp.take_along_axis(tokens, anchors[:, None], axis=1)[:, 0]
        proposal, _ = draft.propose(state, newest, anchors, uniforms[:, :k], SamplingConfig(), shared)
        return proposal, draft.block(state, newest, anchors, shared)

    return run


def test_the_block_of_training_is_the_block_of_a_rollout(case, branches, lay_out_target):
    batch, target = lay_out_target("alone")
    rng = np.random.default_rng(4)
    tokens = jnp.broadcast_to(batch.tokens[NINE][None], batch.tokens.shape)
    taps = jnp.broadcast_to(target.taps[NINE][None], target.taps.shape)
    wrong = jnp.asarray(rng.normal(size=taps.shape), jnp.float32)
    uniforms = jnp.asarray(rng.uniform(size=(5, case.cfg.max_draft_length)), jnp.float32)
    sampled = replace(case.cfg, proposals="sample") if hasattr(case.cfg, "proposals") else case.cfg
    proposal, states = rolled_out(sampled, graph_of(sampled.build))(case.params, target, tokens, taps, wrong, uniforms)
    assert proposal.count.tolist() == [case.cfg.max_draft_length] * 5

    # The same texts as training rows: each request's own, then what it has drafted.
    texts = np.array(tokens)
    for text, anchor, drafted in zip(texts, ANCHORS, proposal.tokens, strict=True):
        text[anchor + 1 :][: len(drafted)] = np.asarray(drafted)[: 13 - anchor]
    whole = np.ones(texts.shape, np.int32)
    positions = np.broadcast_to(np.arange(texts.shape[1], dtype=np.int32), texts.shape)
    rows = batch._replace(tokens=jnp.asarray(texts), segment_ids=jnp.asarray(whole), positions=jnp.asarray(positions))
    anchors, keep = np.zeros((2, *texts.shape), np.int32)
    anchors[:, 0], keep[:, 0] = ANCHORS, 1
    trained, logits = branches(case.cfg)(
        case.params, target._replace(taps=taps), rows, jnp.asarray(anchors), jnp.asarray(keep > 0)
    )
    # Measured 1.3e-6 in states and 2.9e-6 in logs: the same sums, in another order, over the keys that are there.
    np.testing.assert_allclose(states, trained[:, 0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.log(proposal.laws), jax.nn.log_softmax(logits[:, 0]), rtol=0, atol=1e-5)
    assert np.abs(np.asarray(states)).max() > 1 and np.asarray(proposal.laws).max() < 0.999


def test_a_shorter_proposal_is_the_beginning_of_a_longer_one(case, lay_out_target):
    batch, target = lay_out_target("alone")
    tokens = jnp.broadcast_to(batch.tokens[NINE][None], batch.tokens.shape)
    taps = jnp.broadcast_to(target.taps[NINE][None], target.taps.shape)
    uniforms = jnp.asarray(np.random.default_rng(6).uniform(size=(5, case.cfg.max_draft_length)), jnp.float32)
    full, short = (
        rolled_out(case.cfg, case.graph, k=k)(case.params, target, tokens, taps, taps, uniforms)[0] for k in (None, 2)
    )
    np.testing.assert_array_equal(short.tokens, full.tokens[:, :2])
    np.testing.assert_allclose(short.laws, full.laws[:, :2], rtol=1e-5, atol=1e-6)  # two programs
    with pytest.raises(ValueError, match=r"draft_length=\d+ must be in 1..\d+, the drafts of a block; lower it"):
        rolled_out(case.cfg, case.graph, k=None)(
            case.params, target, tokens, taps, taps, jnp.zeros((5, 0), jnp.float32)
        )


@pytest.fixture(scope="module")
def one_block(case, branches, lay_out_target):
    """(tokens, taps) of the packed rows -> logits [d, V] of one block of the longest document."""
    batch, target = lay_out_target("packed")
    row, anchor = 1, 6  # the document of nine tokens is at 2..10 of row 1; one is before it, one after
    anchors = jnp.zeros(batch.tokens.shape, jnp.int32).at[row, 0].set(anchor)
    keep = jnp.zeros(batch.tokens.shape, bool).at[row, 0].set(True)

    def logits(tokens=batch.tokens, taps=target.taps):
        rows = batch._replace(tokens=tokens)
        return np.asarray(branches(case.cfg)(case.params, target._replace(taps=taps), rows, anchors, keep)[1][row, 0])

    return batch, target, (row, anchor), logits


def test_a_block_does_not_see_features_at_or_after_its_anchor(one_block):
    _, target, (row, anchor), logits = one_block
    later = target.taps.at[row, anchor:].add(3.0)
    np.testing.assert_array_equal(logits(taps=later), logits())
    assert np.any(logits(taps=target.taps.at[row, anchor - 1].add(3.0)) != logits())


def test_a_block_does_not_see_another_document(one_block):
    batch, target, (row, _), logits = one_block
    own = np.zeros(batch.tokens.shape, bool)
    own[row, 2:11] = True
    tokens = jnp.where(own, batch.tokens, (batch.tokens + 7) % 19)
    taps = jnp.where(own[..., None], target.taps, target.taps + 3.0)
    np.testing.assert_array_equal(logits(tokens, taps), logits())


def test_a_draft_sees_no_token_from_its_own_on(case, one_block):
    batch, _, (row, anchor), logits = one_block
    base = logits()
    markov = bool(getattr(case.cfg, "markov_rank", 0))
    for i in range(min(case.cfg.max_draft_length, 4)):
        after = batch.tokens.at[row, anchor + 1 + i :].set((batch.tokens[row, anchor + 1 + i :] + 5) % 19)
        changed = logits(after)
        if markov:  # draft i reads the tokens up to a + i
            np.testing.assert_array_equal(changed[: i + 1], base[: i + 1])
            if i + 1 < case.cfg.max_draft_length:
                assert np.any(changed[i + 1] != base[i + 1])
        else:  # nothing after the anchor
            np.testing.assert_array_equal(changed, base)
    at_anchor = logits(batch.tokens.at[row, anchor].set((batch.tokens[row, anchor] + 5) % 19))
    assert np.all(np.any(at_anchor != base, axis=-1)), "the anchor's own token is read by every row"


def test_a_window_hides_what_lies_before_it(make_case, branches, lay_out_target):
    cfg = replace(ONE_LAYER, layer_types=("sliding_attention",), sliding_window=3)
    case = make_case(cfg)
    batch, target = lay_out_target("alone")
    anchors = jnp.zeros(batch.tokens.shape, jnp.int32).at[NINE, 0].set(5)
    keep = jnp.zeros(batch.tokens.shape, bool).at[NINE, 0].set(True)

    def logits(taps):
        return np.asarray(branches(cfg)(case.params, target._replace(taps=taps), batch, anchors, keep)[1][NINE, 0])

    base = logits(target.taps)
    np.testing.assert_array_equal(logits(target.taps.at[NINE, :3].add(3.0)), base)
    # s = 3: a + j - 2 <= 3 holds for row 0 only; row 1, which draft 0 is read off, begins at 4.
    np.testing.assert_array_equal(logits(target.taps.at[NINE, 3].add(3.0)), base)
    seen = logits(target.taps.at[NINE, 4].add(3.0))
    assert np.any(seen[0] != base[0])
    np.testing.assert_array_equal(seen[1:], base[1:])


def test_published_inference_of_dflash_takes_the_likeliest_token_and_says_so(make_case, lay_out_target):
    case = make_case(ONE_LAYER)
    batch, target = lay_out_target("alone")
    tokens = jnp.broadcast_to(batch.tokens[NINE][None], batch.tokens.shape)
    taps = jnp.broadcast_to(target.taps[NINE][None], target.taps.shape)
    proposal, states = rolled_out(case.cfg, case.graph)(
        case.params, target, tokens, taps, taps, jnp.full((5, 3), 0.9, jnp.float32)
    )
    best = np.argmax(head_logits(states, target.head), axis=-1)
    np.testing.assert_array_equal(proposal.tokens, best)
    np.testing.assert_array_equal(proposal.laws, np.eye(19, dtype=np.float32)[best])
