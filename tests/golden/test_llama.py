"""Holds Llama to transformers where only its folders have values: packed rows, and a prompt read on token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models.functional import graph_of
from draftco_jax.models.hf_weights import load_policy

# float32 rounding in another order of summation; measured 2.9e-6 for logits of size 3.
ATOL = 1e-5


@pytest.fixture(scope="module", params=["llama", "llama_tied"])
def recorded(request, golden):
    """Config, structure, parameters and the recorded values."""
    cfg, params = load_policy(golden / request.param)
    with np.load(golden / request.param / "golden.npz") as values:
        return cfg, graph_of(cfg.build), params, dict(values)


def test_logits_of_packed_documents(recorded):
    _, graph, params, values = recorded
    positions = jnp.asarray(values["packed_positions"], jnp.int32)
    segments = jnp.cumsum(positions == 0, axis=1, dtype=jnp.int32)
    assert segments.max() == 4 and segments[1].max() == 3

    @jax.jit
    def logits(params, tokens):
        policy = graph.merge(params)
        return policy.logits(policy(tokens, positions, segments)[0])

    found = logits(params, jnp.asarray(values["ids"], jnp.int32))
    np.testing.assert_allclose(found, values["packed_logits"], rtol=0, atol=ATOL)
    # The two recordings part after the first document, or nothing would be told.
    assert np.abs(values["packed_logits"] - values["logits"])[0, 1:].max() > 0.5


def test_logits_of_a_prompt_and_of_every_token_after_it(recorded):
    _, graph, params, values = recorded
    ids = jnp.asarray(values["ids"], jnp.int32)
    rows, length = ids.shape
    prompt = 12

    @jax.jit
    def step(params, tokens, start, cache, lengths):
        policy = graph.merge(params)
        found = policy.step(tokens, start, cache, tap_layers=(), lengths=lengths)
        return policy.logits(found[0]), found[2]

    full = lambda value: jnp.full(rows, value, jnp.int32)  # noqa: E731
    logits, cache = step(params, ids[:, :prompt], full(0), graph.merge(params).empty_cache(rows, length), full(prompt))
    parts = [logits]
    for t in range(prompt, length):
        logits, cache = step(params, ids[:, t : t + 1], full(t), cache, None)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), values["cached_logits"], rtol=0, atol=ATOL)
