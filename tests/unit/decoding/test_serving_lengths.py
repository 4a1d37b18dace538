"""Two thousand requests of one to 512 tokens, with ends of their own, some aborted, through sixteen slots."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.admission import end
from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.decoding.options import RequestOptions, prepare_options
from draftco_jax.decoding.pages import unowned
from draftco_jax.decoding.serving import abort, advance, collect, work_of
from draftco_jax.decoding.slots import SlotShape, open_state, open_table, over
from draftco_jax.drafts.ngram.config import NGramConfig
from draftco_jax.models.functional import initialise
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PolicyVersion, Rollouts
from draftco_jax.weight_sync import Publisher
from tests.unit.decoding.test_serving_many import InTurn

COUNT, PROMPT, RESPONSE, VOCAB, LONGEST = 2000, 128, 384, 24, 4
GREEDY, LENGTHS = SamplingConfig(temperature=0.0), (0, 1, 4)
SHAPE = EngineShape(prompt_capacity=PROMPT, max_new_tokens=RESPONSE, stop_ids=(), pad_id=0)
SLOTS = SlotShape(slots=16, draft_lengths=LENGTHS, rule=InTurn(LENGTHS), page=8, walk=64, pages=640)


class Asked(NamedTuple):
    """Random requests and what ends them."""

    request: Request
    options: list[RequestOptions]


def ask(rng) -> Asked:
    group = np.cumsum(rng.random(COUNT) < 0.5)  # neighbours of one group have one prompt
    prompts = rng.integers(0, VOCAB, (group.max() + 1, PROMPT))[group]
    lengths = np.ceil(np.exp(rng.uniform(0, np.log(PROMPT), group.max() + 1))).astype(int)[group]
    most = np.ceil(np.exp(rng.uniform(0, np.log(RESPONSE), COUNT))).astype(int)
    lengths[:LONGEST], most[:LONGEST] = PROMPT, RESPONSE
    options = [
        RequestOptions(
            sampling=GREEDY,
            stop_ids=tuple(rng.choice(VOCAB, rng.integers(0, 3), replace=False).tolist()) if row >= LONGEST else (),
            min_tokens=int(rng.integers(0, limit)) if rng.random() < 0.2 else 0,
            max_tokens=int(limit),
        )
        for row, limit in enumerate(most)
    ]
    i32 = partial(jnp.asarray, dtype=jnp.int32)
    return Asked(
        Request(i32(prompts), i32(lengths), request_keys(jax.random.key(1), COUNT), no_context(COUNT)), options
    )


def text_alone(plain: list[int], options: RequestOptions) -> list[int]:
    """The beginning of a plain greedy text up to the request's own end."""
    ends = [i + 1 for i, token in enumerate(plain) if token in options.stop_ids]
    return plain[: min([*ends, options.max_tokens])]


class Models(NamedTuple):
    """As programs take them."""

    graphs: tuple
    weights: tuple


def small_models() -> Models:
    """A policy of random weights, large ones so that texts depend on all of their prefix, and a draft that copies."""
    cfg = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1024,
    )  # fmt: skip
    graph, params = initialise(cfg.build, jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim >= 2 else leaf, params)
    draft_graph, draft = initialise(NGramConfig(min_match=1, max_match=3).build, jax.random.key(2))
    publisher = Publisher(graph, draft_graph)
    weights = publisher.publish(params, draft, PolicyVersion(0))
    return Models(publisher.rollout_graphs(params, draft), (weights.policy, weights.draft))


class Found(NamedTuple):
    """What came out."""

    rollouts: Rollouts
    owners: np.ndarray
    aborted: np.ndarray


def serve_and_abort(models: Models, request: Request, rng: np.random.Generator) -> Found:
    """All requests; every 200 turns some that wait or are read are aborted, and one that decodes."""
    work = partial(work_of, models.graphs, shape=SHAPE, slots=SLOTS, sampling=GREEDY)
    opened = jax.jit(lambda weights, request: open_state(work(weights), open_table(work(weights), request)))

    @jax.jit
    def some_turns(weights, request, state, aborted):
        table = open_table(work(weights), request)
        return advance(work(weights), table, abort(state, aborted), jnp.int32(200))

    @jax.jit
    def look(weights, request, state):
        table = open_table(work(weights), request)
        ended = end(work(weights), table, state)
        return collect(work(weights), table, state), ended.owners, over(table, state)

    state = opened(models.weights, request)
    done, aborted = np.zeros(COUNT, bool), np.zeros(COUNT, bool)
    while not done.all():
        decoding = np.asarray(state.slots.request)
        now = rng.random(COUNT) < 0.002
        now[decoding[decoding < COUNT][:1]] = True
        now &= ~done
        aborted |= now
        state = some_turns(models.weights, request, state, jnp.asarray(now))
        rollouts, owners, done = jax.tree.map(np.asarray, look(models.weights, request, state))
    return Found(rollouts, owners, aborted)


@pytest.mark.slow
def test_two_thousand_requests_of_one_to_512_tokens_with_ends_and_aborts_of_their_own():
    """No page is lost; what was not aborted equals its run alone, what was is a beginning of it."""
    rng = np.random.default_rng(7)
    models, asked = small_models(), ask(rng)
    ready = prepare_options(asked.options, VOCAB)
    rollouts, owners, aborted = serve_and_abort(
        models, asked.request._replace(options=ready.rows, max_tokens=ready.max_tokens), rng
    )
    np.testing.assert_array_equal(owners, unowned(SLOTS.pages))
    alone = Engine(*models.graphs, shape=SHAPE, sampling=GREEDY).generate(models.weights[0], None, asked.request)
    plain = np.asarray(alone.tokens)
    kinds = dict.fromkeys(("whole", "begun", "never started", "by stop", "by limit"), 0)
    for row, options in enumerate(asked.options):
        start = int(rollouts.prompt_lengths[row])
        text = rollouts.tokens[row, start : rollouts.lengths[row]].tolist()
        wanted = text_alone(plain[row, start:].tolist(), options)
        if options.min_tokens:  # stops are masked before it, so the text is another one: only its end is known
            early = set(text[: options.min_tokens]) & set(options.stop_ids)
            assert not early and (aborted[row] or len(text) >= options.min_tokens), row
        elif aborted[row] and len(text) < len(wanted):
            assert text == wanted[: len(text)], row
            kinds["begun" if text else "never started"] += 1
        else:
            assert text == wanted, row
            kinds["whole"] += 1
            kinds["by stop" if text[-1] in options.stop_ids else "by limit"] += 1
    assert min(kinds.values()) > 5, kinds
    assert 0 < rollouts.accepted.sum() < rollouts.proposed.sum()
    assert (rollouts.lengths == PROMPT + RESPONSE).sum() > 1 and (
        rollouts.lengths - rollouts.prompt_lengths == 1
    ).sum() > 10
