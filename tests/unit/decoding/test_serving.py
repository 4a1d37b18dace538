"""Requests through slots: the tokens of the static batch, whatever is served beside them, and nothing left behind.

Programs are compiled for eight requests and reused: the order of requests decides who shares a prompt, a slot's number
and a turn, and must decide nothing else.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.decoding.admission import end
from draftco_jax.decoding.engine import Engine, Request
from draftco_jax.decoding.pages import unowned
from draftco_jax.decoding.serving import abort, advance, collect, work_of
from draftco_jax.decoding.slots import SlotShape, open_state, open_table, submit
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import Rollouts

SAMPLING, GREEDY = SamplingConfig(), SamplingConfig(temperature=0.0)
K, ROWS, LATE = 3, 8, 5
SIZES = {"page": 2, "chunk": 2, "walk": 4}
POOL = 61
FEW = SlotShape(slots=3, draft_lengths=(K,), pages=POOL, **SIZES)
POISONED = SlotShape(slots=5, draft_lengths=(K,), pages=14, poison=True, **SIZES)  # 14: the least there may be


class Served(NamedTuple):
    """What came out, and what was left."""

    rollouts: Rollouts
    owners: np.ndarray
    turns: int


class Server:
    """One compiled program."""

    def __init__(self, toy, slots, shape, sampling=SAMPLING, policy="deep", draft="good"):
        self.graphs, self.weights = toy.graphs, toy.published(policy, draft)
        self.options = {"shape": shape, "slots": slots, "sampling": sampling}
        self.run = jax.jit(self._run)

    def _run(self, weights, request: Request, turns, aborted, known):
        """Some turns with the first requests, then the others come and some are aborted."""
        work = work_of(self.graphs, weights, **self.options)
        here = jnp.arange(ROWS) < known
        first = request._replace(
            prompts=jnp.where(here[:, None], request.prompts, 0),
            prompt_lengths=jnp.where(here, request.prompt_lengths, 2),
        )
        table = open_table(work, first, known)
        state = abort(advance(work, table, open_state(work, table), turns), aborted)
        table = submit(work, table, jax.tree.map(lambda x: x[LATE:], request))
        state = advance(work, table, state)
        return Served(collect(work, table, state), end(work, table, state).owners, state.turn)

    def arguments(self, request: Request, turns=0, aborted=(), known=ROWS):
        limits = request.max_tokens if request.max_tokens is not None else np.full(ROWS, 99)
        request = request._replace(max_tokens=jnp.asarray(limits, jnp.int32))
        mask = np.isin(np.arange(ROWS), aborted)
        return self.weights, request, jnp.int32(turns), jnp.asarray(mask), jnp.int32(known)

    def __call__(self, request: Request, turns=0, aborted=(), known=ROWS) -> Served:
        return jax.tree.map(np.asarray, self.run(*self.arguments(request, turns, aborted, known)))


@pytest.fixture(scope="module")
def server(toy, sampled_shape) -> Server:
    return Server(toy, FEW, sampled_shape)


@pytest.fixture(scope="module")
def poisoned(toy, sampled_shape) -> Server:
    return Server(toy, POISONED, sampled_shape)


@pytest.fixture(scope="module")
def static(toy, mixed_requests, sampled_shape) -> Rollouts:
    return toy.generate("deep", "good", mixed_requests, K, sampled_shape, SAMPLING)


def rows(rollouts, places):
    return jax.tree.map(lambda field: field[np.asarray(places, int)], rollouts)


def assert_identical(one, other):
    for name, left, right in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


def assert_same_texts(found: Rollouts, wanted: Rollouts):
    for name, left, right in zip(found._fields, found, wanted, strict=True):
        if name == "logprobs":
            np.testing.assert_allclose(left, right, atol=2e-6)
        elif name != "experts_touched":
            np.testing.assert_array_equal(left, right, err_msg=name)


def test_more_requests_than_slots_get_the_texts_of_the_static_batch(server, static, mixed_requests):
    served = server(mixed_requests)
    assert_same_texts(served.rollouts, static)
    assert served.turns > static.rounds.max() + 2, "slots must have been used again"
    assert static.accepted.sum() > 0 and static.finished.any()
    np.testing.assert_array_equal(served.owners, unowned(POOL))


def test_bug_case_b27_order_neighbours_and_slot_change_no_bit(server, mixed_requests, select):
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    assert_identical(server(select(mixed_requests, order)).rollouts, rows(server(mixed_requests).rollouts, order))


def in_groups(request: Request, select) -> Request:
    """Four samples of a prompt of five tokens, three of one of four, one of one; each with a key of its own."""
    return select(request, [1, 1, 1, 1, 4, 4, 4, 0])._replace(keys=request.keys)


def test_a_shared_prompt_changes_no_bit(server, mixed_requests, select):
    """Neighbours with the same prompt share its pages; with others between them each reads it for itself."""
    request, apart = in_groups(mixed_requests, select), [0, 4, 1, 5, 2, 6, 3, 7]
    together, alone = server(request), server(select(request, apart))
    assert_identical(rows(together.rollouts, apart), alone.rollouts)
    assert together.turns < alone.turns, "the shared prompt must have been read once"
    assert len({tuple(row) for row in together.rollouts.tokens.tolist()}) == ROWS
    np.testing.assert_array_equal(together.owners, unowned(POOL))


def test_a_limit_cuts_a_text_and_changes_nothing_before(server, mixed_requests):
    limits = np.array([1, 12, 3, 2, 5, 1, 7, 4])
    whole = server(mixed_requests).rollouts
    cut = server(mixed_requests._replace(max_tokens=limits)).rollouts
    wanted = np.minimum(whole.lengths, whole.prompt_lengths + limits)
    np.testing.assert_array_equal(cut.lengths, wanted)
    np.testing.assert_array_equal(cut.finished, whole.finished & (whole.lengths == wanted))
    assert (wanted < whole.lengths).sum() >= 3
    written = np.arange(whole.tokens.shape[1])[None] < wanted[:, None]
    np.testing.assert_array_equal(np.where(written, cut.tokens, 0), np.where(written, whole.tokens, 0))
    np.testing.assert_array_equal(cut.logprobs, np.where(written, whole.logprobs, 0))


def test_aborted_requests_stop_where_they_are_and_leave_no_page(server, mixed_requests):
    whole = server(mixed_requests).rollouts
    served = server(mixed_requests, turns=2, aborted=(0, 1, 7))
    others = [2, 3, 4, 5, 6]
    assert_identical(rows(served.rollouts, others), rows(whole, others))
    assert served.rollouts.lengths[7] == whole.prompt_lengths[7], "it had not begun"
    assert served.rollouts.lengths[1] < whole.lengths[1]
    np.testing.assert_array_equal(served.owners, unowned(POOL))


@pytest.mark.parametrize("turns", [2, 99])
def test_requests_that_come_later_change_no_bit(server, mixed_requests, select, turns):
    """Some come while others decode, or when all are over; the first of them has the prompt of the one before it."""
    for request in (mixed_requests, in_groups(mixed_requests, select)):
        served = server(request, turns=turns, known=LATE)
        assert_identical(served.rollouts, server(request).rollouts)
        np.testing.assert_array_equal(served.owners, unowned(POOL))


def test_bug_case_b37_nothing_of_a_request_survives_and_the_least_pages_do(poisoned, static, mixed_requests, select):
    """What a request leaves is filled with NaN; fewer pages than slots want are enough."""
    served = poisoned(mixed_requests)
    assert_same_texts(served.rollouts, static)
    np.testing.assert_array_equal(served.owners, unowned(POISONED.pages))
    grouped = in_groups(mixed_requests, select)
    assert np.isfinite(poisoned(grouped).rollouts.logprobs).all()


def test_the_program_calls_no_host_and_copies_no_pool(server, mixed_requests):
    lowered = server.run.lower(*server.arguments(mixed_requests))
    assert "callback" not in lowered.as_text()
    body = lowered.compile().as_text().split("ENTRY")[0]
    pool = rf"= f32\[1,{POOL},2,8\]\S* "
    assert re.search(pool + r"(fusion|scatter)\(", body), "the pools have another shape"
    assert not re.search(pool + r"copy\(", body)


def test_the_engine_queues_what_does_not_fit(toy, mixed_requests, greedy_shape):
    plain = toy.generate("deep", "good", mixed_requests, 0, greedy_shape, GREEDY)
    engine = toy.engine(greedy_shape, GREEDY)
    served = jax.tree.map(np.asarray, engine.generate(*toy.published("deep", None), mixed_requests, 0, slots=2))
    assert_same_texts(served, plain)


def test_wishes_that_cannot_be_met_are_refused(toy, mixed_requests, sampled_shape):
    engine, weights = toy.engine(sampled_shape, SAMPLING), toy.published("deep", "good")
    generate = partial(engine.generate, *weights, mixed_requests)
    with pytest.raises(ValueError, match=r"draft_length=2 must be one of draft_lengths=\(0, 3\)"):
        generate(2, slots=SlotShape(slots=2, draft_lengths=(0, 3)))
    with pytest.raises(ValueError, match=r"pages=13 must be >= 14"):
        generate(K, slots=SlotShape(slots=2, draft_lengths=(K,), pages=13, page=2))
    with pytest.raises(ValueError, match="max_tokens"):
        engine.generate(*weights, mixed_requests._replace(max_tokens=jnp.ones(ROWS, jnp.int32)), K)
    plain = Engine(toy.graphs[0], None, shape=sampled_shape, sampling=SAMPLING)
    with pytest.raises(ValueError, match="need a draft"):
        plain.generate(weights[0], None, mixed_requests, K, slots=2)
    with pytest.raises(ValueError, match="slots=0"):
        SlotShape(slots=0)
    with pytest.raises(ValueError, match=r"draft_lengths=\(\)"):
        SlotShape(slots=1, draft_lengths=())


def test_a_request_aborted_while_it_waits_takes_no_turn_no_slot_and_no_page(server, mixed_requests, select):
    """Of a group too: those that are left start, and a prompt that nobody waits for any more is given up."""
    whole = server(mixed_requests)
    alone = server(mixed_requests, aborted=(0, 1, 2, 3, 4, 5, 6))
    assert_identical(rows(alone.rollouts, [7]), rows(whole.rollouts, [7]))
    assert (alone.rollouts.lengths == alone.rollouts.prompt_lengths)[:7].all()
    assert alone.turns < whole.turns / 2
    grouped = in_groups(mixed_requests, select)
    both = server(grouped)
    for aborted in ((0, 1), (1, 3, 5), (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(ROWS))):
        served = server(grouped, aborted=aborted)
        left = [row for row in range(ROWS) if row not in aborted]
        assert_identical(rows(served.rollouts, left), rows(both.rollouts, left))
        np.testing.assert_array_equal(served.owners, unowned(POOL))
