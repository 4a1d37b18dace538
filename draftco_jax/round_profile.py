"""What one verify round is made of: each part timed alone, in a compiled loop of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from draftco_jax.decoding.engine import no_context
from draftco_jax.decoding.tree_drafts import draft_tree
from draftco_jax.drafts.base import Features, Shared, TreeCall, borrowed
from draftco_jax.models.functional import ModelGraph
from draftco_jax.models.token_tree import Tree
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.run import Run
from draftco_jax.weight_sync import Published

Graphs = tuple[ModelGraph, ModelGraph]

STEPS_PER_CALL = 40
_CALLS = 20


def profile_round(run: Run, weights: Published, batch: int, draft_length: int) -> dict[str, float]:
    """Milliseconds of the parts of a round (`RoundParts`), each the fastest of several calls of a compiled loop.

    What a round takes beyond the sum of the last three is rejection, bookkeeping and its share of prefill and dispatch.
    """
    policy_graph, draft_graph = run.rollout_graphs
    assert draft_graph is not None
    parts = RoundParts(
        (policy_graph, draft_graph),
        weights,
        run.cfg.rollout.sampling,
        batch=batch,
        draft_length=draft_length,
        prompt_tokens=run.engine.shape.prompt_capacity,
        new_tokens=run.engine.shape.max_new_tokens,
        tree=run.engine.shape.tree_of(draft_length),
    )
    return {name: _milliseconds(program) for name, program in parts.programs(run.speed_key).items()}


class RoundParts:
    """What a verify round is made of, as programs that repeat one part STEPS_PER_CALL times.

    policy_1_token is a step of plain decoding without its sampling; policy_block is the verify forward of k + 1 tokens,
    or of all nodes of a tree; draft_propose draws the drafts; draft_absorb lets the draft read the verified tokens.
    """

    def __init__(
        self,
        graphs: Graphs,
        weights: Published,
        sampling: SamplingConfig,
        *,
        batch: int,
        draft_length: int,
        prompt_tokens: int,
        new_tokens: int,
        tree: Tree | None = None,
    ) -> None:
        self._policy_graph, self._draft_graph = graphs
        self._weights, self._sampling, self._length = weights, sampling, draft_length
        self._context = no_context(batch)
        self._tree, self._drafted = tree, draft_length if tree is None else tree.drafted
        self._capacity = prompt_tokens + new_tokens + self._drafted
        self._start = jnp.full((batch,), prompt_tokens, jnp.int32)

    def programs(self, key: Key[Array, ""]) -> dict[str, Callable[[], Any]]:
        """Each a compiled loop that is called without arguments."""
        policy, draft = self._weights.policy, self._weights.draft
        propose, absorb = jax.jit(self._propose), jax.jit(partial(self._absorb, self._length + 1))
        one, many = (
            jax.jit(partial(self._policy, 1, None)),
            jax.jit(partial(self._policy, self._drafted + 1, self._tree)),
        )
        return {
            "policy_1_token": lambda: one(policy),
            "policy_block": lambda: many(policy),
            "draft_propose": lambda: propose(policy, draft, key),
            "draft_absorb": lambda: absorb(policy, draft),
        }

    def _policy(self, tokens: int, tree: Tree | None, params: Any) -> Array:
        policy, batch = self._policy_graph.merge(params), self._start.shape[0]

        def body(_: Array, carry: tuple) -> tuple:
            ids, cache = carry
            hidden, _, cache, _ = policy.step(ids, self._start, cache, tap_layers=(), tree=tree)
            return jnp.argmax(policy.logits(hidden), axis=-1).astype(jnp.int32), cache

        start_of_all = jnp.ones((batch, tokens), jnp.int32), policy.empty_cache(batch, self._capacity, tokens - 1)
        return jax.lax.fori_loop(0, STEPS_PER_CALL, body, start_of_all)[0]

    def _shared(self, policy: Any) -> Shared:
        module = self._policy_graph.merge(policy)
        return Shared(module.embed_tokens[...], module.head_kernel())

    def _absorb(self, tokens: int, policy: Any, params: Any) -> Array:
        draft, shared, batch = self._draft_graph.merge(params), self._shared(policy), self._start.shape[0]
        ids = jnp.ones((batch, tokens), jnp.int32)
        hidden = jnp.broadcast_to(shared.embedding[1], (batch, tokens, shared.embedding.shape[1]))
        taps = jnp.tile(hidden, (1, 1, len(draft.cfg.tap_layers)))
        features = Features(ids, ids, taps, hidden, self._start, jnp.full_like(self._start, tokens - 1))

        def body(_: Array, carry: tuple) -> tuple:
            state, taps = carry
            state = draft.absorb(state, features._replace(taps=taps), shared)
            # The next turn depends on all of this one, or the compiler would leave it out.
            return state, taps + 0.0 * sum(jnp.sum(leaf).astype(taps.dtype) for leaf in jax.tree.leaves(state))

        empty = draft.empty_state(batch, self._capacity, self._context)
        return jax.lax.fori_loop(0, STEPS_PER_CALL, body, (empty, taps))[1]

    def _propose(self, policy: Any, params: Any, key: Key[Array, ""]) -> Any:
        draft, shared, start = self._draft_graph.merge(params), self._shared(policy), self._start
        uniforms = jax.random.uniform(key, (start.shape[0], self._drafted))

        def body(_: Array, carry: tuple) -> tuple:
            state, newest, total = carry
            if self._tree is None:
                drafted, state = draft.propose(state, newest, start, uniforms, self._sampling, shared)
            else:
                call = TreeCall(self._tree, newest, start, self._sampling, shared)
                (drafted, _), state = draft_tree(draft, state, call, uniforms)
            return state, drafted.tokens[:, -1], total + jnp.sum(drafted.laws)

        batch = start.shape[0]
        cache = self._policy_graph.merge(policy).empty_cache(batch, self._capacity, self._drafted)
        empty = draft.empty_state(batch, self._capacity, self._context)
        state = borrowed(draft, empty, cache, jnp.ones((batch,), bool))
        return jax.lax.fori_loop(0, STEPS_PER_CALL, body, (state, jnp.ones_like(start), jnp.float32(0.0)))


def _milliseconds(program: Callable[[], Any]) -> float:
    """Milliseconds per loop step, fastest of several calls: what is wanted is the cost, not the noise."""
    jax.block_until_ready(program())
    fastest = float("inf")
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(program())
        fastest = min(fastest, time.perf_counter() - begin)
    return 1e3 * fastest / STEPS_PER_CALL
