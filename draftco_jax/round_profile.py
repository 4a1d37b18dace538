"""What one verify round is made of: each part timed alone, in a compiled loop of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from draftco_jax.decoding.engine import no_context
from draftco_jax.drafts.base import Context, Features, Shared
from draftco_jax.models.functional import ModelGraph
from draftco_jax.run import Run
from draftco_jax.weight_sync import Published

Graphs = tuple[ModelGraph, ModelGraph]

_STEPS_PER_CALL = 40
_CALLS = 20


def profile_round(run: Run, weights: Published, batch: int, draft_length: int) -> dict[str, float]:
    """Milliseconds of the parts of a round, each the fastest of several calls of a compiled loop.

    policy_1_token is a step of plain decoding without its sampling; policy_block is the verify forward of k + 1 tokens;
    draft_propose draws the k drafts; draft_absorb lets the draft read the verified tokens. What a round takes beyond
    their sum is rejection, bookkeeping and its share of prefill and dispatch.
    """
    policy_graph, draft_graph = run.rollout_graphs
    assert draft_graph is not None
    graphs, context = (policy_graph, draft_graph), no_context(batch)
    capacity = run.engine.shape.prompt_capacity + run.engine.shape.max_new_tokens + draft_length
    start = jnp.full((batch,), run.engine.shape.prompt_capacity, jnp.int32)
    block = draft_length + 1
    return {
        "policy_1_token": _policy(policy_graph, weights, batch, 1, capacity, start),
        "policy_block": _policy(policy_graph, weights, batch, block, capacity, start),
        "draft_propose": _propose(run, graphs, weights, context, draft_length, capacity, start),
        "draft_absorb": _absorb(graphs, weights, context, block, capacity, start),
    }


def _policy(graph: ModelGraph, weights: Published, batch: int, tokens: int, capacity: int, start: Array) -> float:
    def program(params: Any) -> Array:
        policy = graph.merge(params)

        def body(_: Array, carry: tuple) -> tuple:
            ids, cache = carry
            hidden, _, cache, _ = policy.step(ids, start, cache, tap_layers=())
            return jnp.argmax(policy.logits(hidden), axis=-1).astype(jnp.int32), cache

        start_of_all = jnp.ones((batch, tokens), jnp.int32), policy.empty_cache(batch, capacity, tokens - 1)
        return jax.lax.fori_loop(0, _STEPS_PER_CALL, body, start_of_all)[0]

    return _milliseconds(jax.jit(program), weights.policy)


def _shared(policy: Any, graph: ModelGraph) -> Shared:
    module = graph.merge(policy)
    return Shared(module.embed_tokens[...], module.head_kernel())


def _absorb(graphs: Graphs, weights: Published, context: Context, tokens: int, capacity: int, start: Array) -> float:
    def program(policy: Any, params: Any) -> Any:
        draft, shared = graphs[1].merge(params), _shared(policy, graphs[0])
        batch, width = start.shape[0], shared.embedding.shape[1]
        ids = jnp.ones((batch, tokens), jnp.int32)
        hidden = jnp.broadcast_to(shared.embedding[1], (batch, tokens, width))
        taps = jnp.tile(hidden, (1, 1, len(draft.cfg.tap_layers)))
        features = Features(ids, ids, taps, hidden, start, jnp.full_like(start, tokens - 1))

        def body(_: Array, carry: tuple) -> tuple:
            state, taps = carry
            state = draft.absorb(state, features._replace(taps=taps), shared)
            # The next turn depends on all of this one, or the compiler would leave it out.
            return state, taps + 0.0 * sum(jnp.sum(leaf).astype(taps.dtype) for leaf in jax.tree.leaves(state))

        return jax.lax.fori_loop(0, _STEPS_PER_CALL, body, (draft.empty_state(batch, capacity, context), taps))

    return _milliseconds(jax.jit(program), weights.policy, weights.draft)


def _propose(
    run: Run, graphs: Graphs, weights: Published, context: Context, length: int, capacity: int, start: Array
) -> float:
    def program(policy: Any, params: Any) -> Any:
        draft, shared = graphs[1].merge(params), _shared(policy, graphs[0])
        uniforms = jax.random.uniform(run.speed_key, (start.shape[0], length))

        def body(_: Array, carry: tuple) -> tuple:
            state, newest, total = carry
            proposal, state = draft.propose(state, newest, start, uniforms, run.cfg.rollout.sampling, shared)
            return state, proposal.tokens[:, -1], total + jnp.sum(proposal.laws)

        state = draft.empty_state(start.shape[0], capacity, context)
        return jax.lax.fori_loop(0, _STEPS_PER_CALL, body, (state, jnp.ones_like(start), jnp.float32(0.0)))

    return _milliseconds(jax.jit(program), weights.policy, weights.draft)


def _milliseconds(program: Callable[..., Array], *arguments: Any) -> float:
    """Milliseconds per loop step, fastest of several calls: what is wanted is the cost, not the noise."""
    jax.block_until_ready(program(*arguments))
    fastest = float("inf")
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        fastest = min(fastest, time.perf_counter() - begin)
    return 1e3 * fastest / _STEPS_PER_CALL
