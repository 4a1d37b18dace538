"""Tests that training passes are the chain of drafting steps, and that nothing leaks between anchors or documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import split
from draftco_jax.models.transformer import fuse_projections
from draftco_jax.numerics.shift import look_ahead

PASSES = 3


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


def passes_of(draft, batch, target):
    """(tokens, taps, other params or None) -> states [passes, R, T, D] of the packed rows."""

    @jax.jit
    def states(tokens, taps, params):
        embeds = [target.embedding[look_ahead(tokens, k + 1)] for k in range(PASSES)]
        return jnp.stack(draft.graph.merge(params).passes(embeds, taps, batch.positions, batch.segment_ids))

    return lambda tokens, taps, params=draft.params: np.asarray(states(tokens, taps, params))


@pytest.fixture(scope="module")
def run(full_draft, lay_out_target):
    return passes_of(full_draft, *lay_out_target("packed"))


def places(segments, position, passes=PASSES):
    """Which (pass, token) of a row have their input token x_{t+1+k} in the document of t, relative to `position`."""
    tokens = len(segments)
    for k in range(passes):
        for t in range(tokens - 1 - k):
            if segments[t] > 0 and segments[t] == segments[t + 1 + k]:
                yield k, t, segments[t] == segments[position]


@pytest.mark.parametrize("flags", [(), FLAGS], ids=["classic", "all flags"])
def test_every_pass_equals_a_chain_of_drafting_steps_from_its_anchor(make_draft, flags, documents, lay_out_target):
    """In the rollout layout: a true cache up to anchor t, then k steps that each write their own guess of the state."""
    draft, (batch, target) = make_draft(**dict.fromkeys(flags, True)), lay_out_target("packed")
    expected = passes_of(draft, batch, target)(batch.tokens, target.taps)
    module = draft.graph.merge(draft.params)
    fuse_projections(module)
    graph, params = split(module)
    step = jax.jit(lambda p, embeds, hidden, start, cache: graph.merge(p).step(embeds, hidden, start, cache))

    anchors = [(row, column) for row, column in np.argwhere(np.asarray(batch.segment_ids) > 0)]
    count, longest = len(anchors), max(len(d.tokens) for d in documents)
    at = np.asarray(batch.positions)[*np.transpose(anchors)]  # index of each anchor in its document
    starts = [(row, column - t) for (row, column), t in zip(anchors, at, strict=True)]

    def cut(a, steps):
        ahead = np.asarray(look_ahead(a, steps))
        return np.stack([ahead[row, start : start + longest] for row, start in starts])

    padded = jnp.pad(batch.tokens, ((0, 0), (0, longest)))
    taps = jnp.pad(target.taps, ((0, 0), (0, longest), (0, 0)))
    embeds = target.embedding[cut(padded, 1)]
    hidden = module.fuse(jnp.asarray(cut(taps, 0)))
    cache = module.empty_cache(count, longest + PASSES)
    states, cache = step(params, embeds, hidden, jnp.zeros(count, jnp.int32), cache)
    state, compared = states[np.arange(count), at], 0
    for k in range(PASSES):
        if k > 0:
            tokens = np.asarray(look_ahead(padded, 1 + k))[*np.transpose(anchors)]
            fed, cache = step(params, target.embedding[tokens][:, None], state[:, None], jnp.int32(at + k), cache)
            state = fed[:, 0]
        for i, (row, column) in enumerate(anchors):
            if batch.segment_ids[row, column] == look_ahead(batch.segment_ids, 1 + k)[row, column]:
                np.testing.assert_allclose(state[i], expected[k, row, column], rtol=0, atol=1e-5)
                compared += 1
    assert compared == sum(len(d.tokens) - 1 - k for d in documents for k in range(min(PASSES, len(d.tokens) - 1)))


def test_no_pass_reads_a_token_past_its_input_or_another_document(run, lay_out_target):
    batch, target = lay_out_target("packed")
    before = run(batch.tokens, target.taps)
    segments = np.asarray(batch.segment_ids)
    for row in (0, 1):
        for position in np.flatnonzero(segments[row] > 0):
            changed = batch.tokens.at[row, position].set((batch.tokens[row, position] + 1) % 19)
            differs = (before != run(changed, target.taps)).any(axis=-1)
            assert not np.delete(differs, row, axis=1).any()
            for k, t, same in places(segments[row], position):
                # Read: x_1 .. x_{t+1} by the trunk, and x_{t+2} .. x_{t+1+k} by the passes.
                if not same or position > t + 1 + k:
                    assert not differs[k, row, t], (row, position, k, t)
                elif position == t + 1 + k:
                    assert differs[k, row, t], (row, position, k, t)


def test_no_pass_reads_a_tap_past_its_anchor_or_of_another_document(run, lay_out_target):
    batch, target = lay_out_target("packed")
    before = run(batch.tokens, target.taps)
    segments = np.asarray(batch.segment_ids)
    for row in (0, 1):
        for position in np.flatnonzero(segments[row] > 0):
            changed = target.taps.at[row, position].add(1.0)
            differs = (before != run(batch.tokens, changed)).any(axis=-1)
            assert not np.delete(differs, row, axis=1).any()
            for k, t, same in places(segments[row], position):
                if not same or position > t:
                    assert not differs[k, row, t], (row, position, k, t)
                elif position == t:
                    assert differs[k, row, t], (row, position, k, t)


def test_bug_case_b06_what_the_draft_would_say_is_never_read_back(full_draft, run, lay_out_target):
    # Other heads, so other argmax tokens in every pass; the inputs are the text's, so no state moves.
    batch, target = lay_out_target("packed")
    kernel = full_draft.params["lm_head"]["kernel"]
    contrary = full_draft.params | {"lm_head": {"kernel": -kernel}}
    np.testing.assert_array_equal(run(batch.tokens, target.taps), run(batch.tokens, target.taps, contrary))


def test_a_law_over_draft_ids_is_spread_to_the_target_ids(make_draft):
    draft = make_draft(draft_vocab_size=11)
    law = jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(11), size=3), jnp.float32)
    spread = np.asarray(draft.graph.merge(draft.params).to_target_vocabulary(law))
    np.testing.assert_array_equal(spread[:, draft.kept], law)
    assert (np.delete(spread, draft.kept, axis=1) == 0).all()
