"""What one verify round is made of: each part timed alone, in a compiled loop of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from draftco_jax.decoding.propose import propose_chain
from draftco_jax.models.functional import ModelGraph
from draftco_jax.run import Run
from draftco_jax.weight_sync import Published

_STEPS_PER_CALL = 40
_CALLS = 20


def profile_round(run: Run, weights: Published, batch: int, draft_length: int) -> dict[str, float]:
    """Milliseconds of the parts of a round, each the fastest of several calls of a compiled loop.

    policy_1_token is a step of plain decoding without its sampling; policy_block is the verify forward of k + 1 tokens;
    draft_chain draws the k drafts; draft_block rewrites the draft's cache at the verified tokens. What a round takes
    beyond their sum is rejection, bookkeeping and its share of prefill and dispatch.
    """
    policy_graph, draft_graph = run.publisher.rollout_graphs(run.models.policy, run.models.draft)
    assert draft_graph is not None
    capacity = run.engine.shape.prompt_capacity + run.engine.shape.max_new_tokens + draft_length
    start = jnp.full((batch,), run.engine.shape.prompt_capacity, jnp.int32)
    block = draft_length + 1
    return {
        "policy_1_token": _policy(policy_graph, weights, batch, 1, capacity, start),
        "policy_block": _policy(policy_graph, weights, batch, block, capacity, start),
        "draft_chain": _chain(run, draft_graph, weights, batch, draft_length, capacity, start),
        "draft_block": _draft(draft_graph, weights, batch, block, capacity, start),
    }


def _policy(graph: ModelGraph, weights: Published, batch: int, tokens: int, capacity: int, start: Array) -> float:
    def program(params: Any) -> Array:
        policy = graph.merge(params)

        def body(_: Array, carry: tuple) -> tuple:
            ids, cache = carry
            hidden, _, cache = policy.step(ids, start, cache, tap_layers=())
            return jnp.argmax(policy.logits(hidden), axis=-1).astype(jnp.int32), cache

        ids = jnp.ones((batch, tokens), jnp.int32)
        return jax.lax.fori_loop(0, _STEPS_PER_CALL, body, (ids, policy.empty_cache(batch, capacity)))[0]

    return _milliseconds(jax.jit(program), weights.policy)


def _draft(graph: ModelGraph, weights: Published, batch: int, tokens: int, capacity: int, start: Array) -> float:
    def program(params: Any, embedding: Array) -> Array:
        draft = graph.merge(params)
        embeds = jnp.broadcast_to(embedding[1], (batch, tokens, embedding.shape[1]))

        def body(_: Array, carry: tuple) -> tuple:
            hidden, cache = carry
            hidden, cache = draft.step(embeds, 0.1 * hidden, start, cache)
            return hidden, cache

        return jax.lax.fori_loop(0, _STEPS_PER_CALL, body, (embeds, draft.empty_cache(batch, capacity)))[0]

    return _milliseconds(jax.jit(program), weights.draft, weights.policy["embed_tokens"])


def _chain(
    run: Run, graph: ModelGraph, weights: Published, batch: int, draft_length: int, capacity: int, start: Array
) -> float:
    def program(params: Any, embedding: Array) -> Array:
        draft = graph.merge(params)
        uniforms = jax.random.uniform(run.speed_key, (batch, draft_length))

        def body(_: Array, carry: tuple) -> tuple:
            hidden, cache, total = carry
            tokens, laws, cache = propose_chain(
                draft, embedding, hidden, start, cache, uniforms, run.cfg.rollout.sampling
            )
            # The next turn depends on all of this one, or the compiler would leave it out.
            return 0.99 * hidden + laws[:, -1, :1], cache, total + jnp.sum(tokens)

        hidden = jnp.broadcast_to(embedding[1], (batch, embedding.shape[1]))
        carry = (hidden, draft.empty_cache(batch, capacity), jnp.int32(0))
        return jax.lax.fori_loop(0, _STEPS_PER_CALL, body, carry)[2]

    return _milliseconds(jax.jit(program), weights.draft, weights.policy["embed_tokens"])


def _milliseconds(program: Callable[..., Array], *arguments: Any) -> float:
    """Milliseconds per loop step, fastest of several calls: what is wanted is the cost, not the noise."""
    jax.block_until_ready(program(*arguments))
    fastest = float("inf")
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        fastest = min(fastest, time.perf_counter() - begin)
    return 1e3 * fastest / _STEPS_PER_CALL
