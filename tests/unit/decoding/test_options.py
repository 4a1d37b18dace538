"""Requests that ask for different things in one program: each gets what the static engine gives it alone.

One program of three slots serves all tests here: options are arrays, and so are weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from draftco_jax.decoding.engine import EngineShape, Request
from draftco_jax.decoding.options import NO_TABLE, RequestLaw, RequestOptions, prepare_options
from draftco_jax.decoding.serving import work_of
from draftco_jax.decoding.slots import SlotShape, open_table, submit
from draftco_jax.decoding.stopping import BY_LENGTH, BY_STOP_ID, BY_STOP_STRING, Limits, stop_id_rows
from draftco_jax.errors import UserError
from draftco_jax.numerics import request_sampling
from draftco_jax.numerics.request_sampling import NO_FILTERS
from draftco_jax.numerics.sampling import SamplingConfig, log_law
from draftco_jax.text.stop_strings import find_response_end
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Rollouts

PLAIN, GREEDY = SamplingConfig(), SamplingConfig(temperature=0.0)
NUCLEUS = SamplingConfig(temperature=0.8, top_k=5, top_p=0.8)
LIKELY = SamplingConfig(temperature=1.5, min_p=0.3)
K, ROWS, VOCAB, MOST = 3, 8, 7, 12
SLOTS = SlotShape(slots=3, draft_lengths=(K,), page=2, chunk=2, walk=4)
LETTERS = ("a", "b", "c", "d", "ab", "e", "f")


class Kind(NamedTuple):
    """What a static engine is compiled for."""

    sampling: SamplingConfig
    stop_ids: tuple[int, ...]


KINDS = (Kind(PLAIN, (1, 4)), Kind(GREEDY, (3,)), Kind(NUCLEUS, (2,)), Kind(LIKELY, (5, 6, 0)))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token of two letters: a string may begin or end within it."""
    backend = tokenizers.Tokenizer(models.WordLevel({letters: i for i, letters in enumerate(LETTERS)}))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, eos_token="d")


@pytest.fixture(scope="module")
def serve(toy, mixed_requests, sampled_shape, tokenizer):
    """(options of each request) -> rollouts, by one program."""
    engine = toy.engine(sampled_shape, PLAIN)

    def run(options, request: Request = mixed_requests, policy="deep", draft="good") -> Rollouts:
        ready = prepare_options(options, VOCAB, tokenizer, stop_ids=3, stop_states=24)
        request = request._replace(options=ready.rows, max_tokens=ready.max_tokens)
        found = engine.generate(*toy.published(policy, draft), request, K, slots=SLOTS, stop_table=ready.stop_table)
        return jax.tree.map(np.asarray, found)

    return run


def asks(count: int = ROWS, **changes) -> list[RequestOptions]:
    """Of all kinds in turn."""
    return [
        RequestOptions(**{"sampling": kind.sampling, "stop_ids": kind.stop_ids, "max_tokens": MOST} | changes)
        for kind in (KINDS * count)[:count]
    ]


@pytest.fixture(scope="module")
def mixed(serve) -> Rollouts:
    return serve(asks())


def rows(rollouts, places):
    return jax.tree.map(lambda field: field[np.asarray(places)], rollouts)


def assert_identical(one, other):
    for name, left, right in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


def test_bug_case_b26_each_request_of_a_mixed_batch_is_that_of_the_static_engine_with_its_settings(
    toy, mixed, mixed_requests, sampled_shape
):
    for number, kind in enumerate(KINDS):
        shape = replace(sampled_shape, stop_ids=kind.stop_ids)
        static = toy.generate("deep", "good", mixed_requests, K, shape, kind.sampling)
        mine = list(range(number, ROWS, len(KINDS)))
        for name in ("tokens", "lengths", "finished", "rounds", "committed", "accepted", "proposed"):
            np.testing.assert_array_equal(getattr(mixed, name)[mine], getattr(static, name)[mine], err_msg=name)
        np.testing.assert_allclose(mixed.logprobs[mine], static.logprobs[mine], atol=1e-5)
    np.testing.assert_array_equal(mixed.end_reasons, np.where(mixed.finished, BY_STOP_ID, BY_LENGTH))
    assert {BY_STOP_ID, BY_LENGTH} == set(mixed.end_reasons.tolist())


def test_bug_case_b27_order_neighbours_and_what_they_ask_change_no_bit(serve, mixed, mixed_requests, select):
    order, options = [3, 7, 0, 5, 1, 6, 2, 4], asks()
    moved = serve([options[i] for i in order], select(mixed_requests, order))
    assert_identical(moved, rows(mixed, order))
    others = [options[0], *asks(ROWS, sampling=GREEDY, stop_strings=("c",), min_tokens=2)[1:]]
    assert_identical(rows(serve(others), [0]), rows(mixed, [0]))


def test_drafts_follow_the_settings_of_their_request(serve):
    """The draft is the policy: under laws of the same settings, early stops taken out, all it proposes is accepted."""
    found = serve(asks(min_tokens=6), policy="bigram", draft="good")
    np.testing.assert_array_equal(found.accepted.sum(axis=1), found.proposed)
    assert found.proposed.min() >= 2 * K


# ---- min_tokens ----


def masked_greedy(toy, prompt: list[int], stop_ids: tuple[int, ...], fewest: int) -> list[int]:
    """Token by token, stop ids left out while the text is too short."""
    text: list[int] = []
    while len(text) < MOST and not (text and text[-1] in stop_ids):
        padded = np.zeros((1, 20), np.int64)
        padded[0, : len(prompt) + len(text)] = prompt + text
        logits = toy.logits("deep", padded.astype(np.int32))[0, len(prompt) + len(text) - 1].copy()
        if len(text) < fewest:
            logits[list(stop_ids)] = -np.inf
        text.append(int(np.argmax(logits)))
    return text


def test_bug_case_b31_a_stop_id_is_out_of_reach_up_to_min_tokens_and_not_a_row_longer(
    toy, serve, mixed_requests, responses
):
    """Greedy, by drafts that are often right and often wrong; 0 .. 7 tokens at least, each request another number."""
    prompts = [np.asarray(p[:n]).tolist() for p, n in zip(*mixed_requests[:2], strict=True)]
    stop_ids = (3, 6)
    options = [
        RequestOptions(sampling=GREEDY, stop_ids=stop_ids, min_tokens=fewest, max_tokens=MOST) for fewest in range(ROWS)
    ]
    wanted = [masked_greedy(toy, prompt, stop_ids, n) for n, prompt in enumerate(prompts)]
    for draft in ("good", "random"):
        assert responses(serve(options, draft=draft)) == wanted
    free = [masked_greedy(toy, prompt, stop_ids, 0) for prompt in prompts]
    assert sum(len(text) <= n for n, text in enumerate(free)) >= 6, "too few wanted to stop early"
    assert sum(len(text) == n + 1 for n, text in enumerate(wanted)) >= 4, "too few stopped as soon as they could"


def test_bug_case_b32_log_probs_are_those_of_the_masked_law_of_each_request(toy, serve, mixed_requests):
    """Of accepted drafts, residual and bonus tokens alike, by one forward over the texts."""
    options = asks(min_tokens=5)
    found = serve(options)
    logits = toy.logits("deep", found.tokens)
    for row, asked in enumerate(options):
        start, end = found.prompt_lengths[row], found.lengths[row]
        for at in range(start, end):
            raw = logits[row, at - 1].copy()
            if at - start < asked.min_tokens:
                raw[list(asked.stop_ids)] = -np.inf
            wanted = np.asarray(log_law(jnp.asarray(raw), asked.sampling))[found.tokens[row, at]]
            np.testing.assert_allclose(found.logprobs[row, at], wanted, atol=1e-5)
        assert end - start > 5 and not set(found.tokens[row, start : start + 5]) & set(asked.stop_ids)


# ---- stop strings ----

STRINGS = (("cab",), ("ba", "ee"), (), ("f", "dd"))


def test_a_response_ends_with_the_token_at_which_its_text_ends(serve, tokenizer, responses):
    """`find_response_end` on the text of the same request without strings says where, by the id or the string."""
    open_end = serve(asks(stop_ids=(0, 5)))
    options = [
        replace(asked, stop_strings=strings) for asked, strings in zip(asks(stop_ids=(0, 5)), STRINGS * 2, strict=True)
    ]
    found = serve(options)
    for row, (asked, text) in enumerate(zip(options, responses(open_end), strict=True)):
        end = find_response_end(tokenizer, text, asked.stop_ids, asked.stop_strings)
        reason = BY_STOP_STRING if end.stop_string else BY_STOP_ID if end.finished else BY_LENGTH
        assert (responses(found)[row], found.end_reasons[row]) == (text[: end.length], reason)
        assert found.finished[row] == end.finished
        np.testing.assert_array_equal(
            found.logprobs[row, : found.lengths[row]], open_end.logprobs[row, : found.lengths[row]]
        )
    assert {BY_STOP_ID, BY_STOP_STRING, BY_LENGTH} == set(found.end_reasons.tolist())


def cycle(start: int, count: int) -> list[int]:
    return [(start + 1 + i) % VOCAB for i in range(count)]


def test_nothing_of_a_request_survives_in_its_slot(serve, mixed_requests, responses):
    """Slots are left in the middle of a string, and the next request's first tokens would complete it: the policy
    counts up, ... d ab e f, cut there, and then a b c d ab e f a b."""
    cut = RequestOptions(sampling=PLAIN, stop_strings=("fab",), max_tokens=3)
    after = RequestOptions(sampling=GREEDY, stop_strings=("fab",), max_tokens=MOST)
    options = [cut, cut, cut, after, after, after, cut, after]
    firsts = [3 if each is cut else 6 for each in options]
    prompts = jnp.broadcast_to(jnp.asarray(firsts, jnp.int32)[:, None], (ROWS, 5))
    request = mixed_requests._replace(prompts=prompts, prompt_lengths=jnp.ones(ROWS, jnp.int32))
    found = serve(options, request, policy="cycle", draft="cycle")
    assert responses(found) == [cycle(3, 3) if each is cut else cycle(6, 9) for each in options]
    reasons = [BY_LENGTH if each is cut else BY_STOP_STRING for each in options]
    assert found.end_reasons.tolist() == reasons


# ---- laws of drafts ----


def test_a_draft_of_few_ids_may_not_propose_an_early_stop_among_them():
    """Columns stand for ids 0, 2, 3; rows are those of drafts 1, 2 after 0, 1, 2 tokens."""
    rng, ids = np.random.default_rng(0), jnp.asarray([0, 2, 3])
    logits = rng.normal(size=(3, 2, 3)).astype(np.float32)
    stop_ids, fewest = stop_id_rows([[2, 1], [2], [0, 2, 3]], 4), jnp.asarray([2, 9, 9])
    limits = Limits(stop_ids, fewest, jnp.asarray([9, 9, 9]))
    rule = RequestLaw(request_sampling.of([PLAIN] * 3), limits, jnp.arange(3), NO_FILTERS)
    weights = np.exp(logits)
    weights[0, 0, 1] = 0.0  # its second draft would be the third token, which may end the response
    weights[1, :, 1] = 0.0
    # The third request may not stop at any id that the draft knows: that draft proposes what it likes.
    wanted = weights / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(rule.law(jnp.asarray(logits), 1, ids), wanted, atol=1e-6)
    np.testing.assert_allclose(rule.law(jnp.asarray(logits[:, 1]), 2, ids), wanted[:, 1], atol=1e-6)


# ---- context, refusals ----


def work(toy, **sizes):
    shape = EngineShape(**{"prompt_capacity": 5, "max_new_tokens": MOST, "stop_ids": (), "pad_id": 0} | sizes)
    return work_of(toy.graphs, toy.published("deep", "good"), shape=shape, slots=SLOTS, sampling=PLAIN)


def test_the_context_ends_a_response_where_a_draft_would_have_no_position(toy, mixed_requests):
    """64 positions; the last round writes K - 1 of them behind the last token that may be committed."""
    limits = open_table(work(toy, max_new_tokens=80), mixed_requests).limits
    np.testing.assert_array_equal(limits + mixed_requests.prompt_lengths + K - 1, [64] * ROWS)
    asked = mixed_requests._replace(max_tokens=jnp.asarray([99, 7] * 4, jnp.int32))
    assert open_table(work(toy, max_new_tokens=80), asked).limits.tolist()[:2] == [64 - 2 - 1, 7]
    assert not work(toy, max_new_tokens=64 - 5 - 2).beyond_context
    assert work(toy, max_new_tokens=64 - 5 - 1).beyond_context
    wide = mixed_requests._replace(prompts=jnp.zeros((ROWS, 62), jnp.int32))
    with pytest.raises(UserError, match="prompt_length=62 must be <= 61"):
        open_table(work(toy, prompt_capacity=62), wide)


def test_options_that_a_program_would_not_see_are_refused(toy, mixed_requests, sampled_shape, tokenizer):
    engine, weights = toy.engine(sampled_shape, PLAIN), toy.published("deep", "good")
    ready = prepare_options(asks(stop_strings=("c",)), VOCAB, tokenizer)
    request = mixed_requests._replace(options=ready.rows)
    with pytest.raises(ValueError, match="options of each request must be None without slots"):
        engine.generate(*weights, request, K)
    with pytest.raises(ValueError, match="must have top_k, which a request asks for"):
        engine.generate(*weights, request, K, replace(SLOTS, filters=NO_FILTERS), ready.stop_table)
    with pytest.raises(ValueError, match="stop_table with 0 states must be the one"):
        engine.generate(*weights, request, K, SLOTS)
    plain = prepare_options(asks(), VOCAB)
    assert plain.stop_table is None and set(plain.rows.stop_start.tolist()) == {NO_TABLE}
    with pytest.raises(ValueError, match="must be the one that stop_start"):
        engine.generate(*weights, mixed_requests._replace(options=plain.rows), K, SLOTS, ready.stop_table)
    with pytest.raises(ValueError, match="stop_table must come with the options"):
        engine.generate(*weights, mixed_requests, K, SLOTS, ready.stop_table)
    with pytest.raises(ValueError, match="for all requests of a table or for none"):
        submit(work(toy), open_table(work(toy), mixed_requests), request)
    with pytest.raises(UserError, match="stop_strings must come with a tokenizer"):
        prepare_options(asks(stop_strings=("c",)), VOCAB)
    with pytest.raises(ValueError, match=r"min_tokens=3 must be in 0..max_tokens=2"):
        RequestOptions(min_tokens=3, max_tokens=2)
    with pytest.raises(ValueError, match="max_tokens=0 must be >= 1"):
        RequestOptions(max_tokens=0)
