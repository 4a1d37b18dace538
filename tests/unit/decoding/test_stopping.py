"""Ends of responses as data, held to plain Python and to the text's own end."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from draftco_jax.decoding import rejection
from draftco_jax.decoding.stopping import (
    BY_LENGTH,
    BY_STOP_ID,
    BY_STOP_STRING,
    NO_ID,
    NOT_ENDED,
    Limits,
    advance,
    allowed_tokens,
    end_of_block,
    is_stop_id,
    require_room,
    stop_id_rows,
    stop_table,
    without_early_stops,
)
from draftco_jax.errors import UserError
from draftco_jax.numerics.sampling import SamplingConfig, log_law
from draftco_jax.text.stop_automaton import build_stop_automaton
from draftco_jax.text.stop_strings import find_response_end
from draftco_jax.text.tokenizer import Tokenizer

ADVANCE, END, MASK = jax.jit(advance), jax.jit(end_of_block), jax.jit(without_early_stops)
LETTERS = ["[end]", "a", "b", "ab", "ba", "aab", "é", "."]
V = len(LETTERS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Tokens of one or more letters: strings begin and end within them."""
    backend = tokenizers.Tokenizer(models.WordLevel({letters: i for i, letters in enumerate(LETTERS)}))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, eos_token="[end]")


def i32(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def limits(stop_ids, min_tokens, max_tokens) -> Limits:
    return Limits(stop_id_rows(stop_ids, V), i32(min_tokens), i32(max_tokens))


def test_stop_ids_of_a_request_are_its_own():
    rows = stop_id_rows([[3, 5], [], [0]], V)
    np.testing.assert_array_equal(rows, [[3, 5], [NO_ID, NO_ID], [0, NO_ID]])
    tokens = i32([[5, 0, 3], [5, 0, 3], [5, 0, NO_ID + V]])
    np.testing.assert_array_equal(is_stop_id(tokens, rows), [[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    assert stop_id_rows([[1]], V, width=4).shape == (1, 4)
    assert stop_id_rows([], V).shape == (0, 1)


@pytest.mark.parametrize(
    "ids, width, message",
    [([-1], None, "must lie in 0..7"), ([V], None, "must lie in 0..7"), ([1, 2], 1, "must be at most 1 ids"),
     (list(range(V)), None, "leave some id to be written")],
)  # fmt: skip
def test_stop_ids_that_cannot_be_are_refused(ids, width, message):
    with pytest.raises(UserError, match=message):
        stop_id_rows([ids], V, width)


# --- min_tokens -----------------------------------------------------------------------------------------------------


def test_only_stop_ids_of_early_rows_are_masked():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 4, V)).astype(np.float32)
    names, fewest, written = [[0], [0, 7], [], [V - 1], [2, 0]], [5, 3, 9, 0, 4], [3, 0, 0, 0, 4]
    found = np.asarray(MASK(jnp.asarray(logits), i32(written), limits(names, fewest, [9] * 5)))
    for b, row, token in np.ndindex(logits.shape):
        early = written[b] + row < fewest[b] and token in names[b]
        assert found[b, row, token] == (-np.inf if early else logits[b, row, token])


VOCAB, STOP, DRAFTS = 6, 2, 4
BLOCK = DRAFTS + 1


def toy_logits(written: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Of each request, as a function of how many tokens came before and of the last: one that wants to stop."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(64, VOCAB, VOCAB)).astype(np.float32)
    table[..., STOP] += 4.0
    return table[written, before]


def plain_text(fewest: int, most: int) -> list[int]:
    text: list[int] = []
    while len(text) < most and text[-1:] != [STOP]:
        logits = toy_logits(np.asarray(len(text)), np.asarray(text[-1] if text else 0)).copy()
        if len(text) < fewest:
            logits[STOP] = -np.inf
        text.append(int(np.argmax(logits)))
    return text


@jax.jit
def toy_round(logits, drafts, proposed, written, bounds):
    """Verify and end a block of a greedy target; a draft that is not proposed has a law of zeros."""
    p = jnp.exp(log_law(MASK(logits, written, bounds), SamplingConfig(temperature=0.0)))
    there = jnp.arange(DRAFTS)[None, :] < proposed[:, None]
    q = jnp.where(there[..., None], jax.nn.one_hot(drafts, VOCAB), 0.0)
    zeros = jnp.zeros((len(written), BLOCK))
    accepted, final = rejection.verify(p, q, drafts, zeros[:, :DRAFTS], zeros)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(BLOCK)[None, :] == accepted[:, None], final[:, None], padded)
    emitted = jnp.where(written < bounds.max_tokens, accepted + 1, 0)
    return tokens, end_of_block(None, jnp.zeros_like(written), tokens, emitted, written, bounds)


def speculative_texts(fewest: list[int], most: int, proposals, mask_block: bool = False) -> list[list[int]]:
    """Rounds of drafts that are right except where `proposals` says; requests with fewer drafts have fewer."""
    size, done = len(fewest), [False] * len(fewest)
    texts: list[list[int]] = [[] for _ in range(size)]
    goals = [plain_text(f, most) + [0] * (BLOCK + 1) for f in fewest]
    rows = stop_id_rows([[STOP]] * size, VOCAB)
    while not all(done):
        written = np.array([len(text) for text in texts])
        drafts = np.array([goal[w : w + DRAFTS] for goal, w in zip(goals, written, strict=True)])
        wrong, proposed = next(proposals)
        drafts = np.where(wrong, (drafts + 1) % VOCAB, drafts)
        last = np.array([text[-1] if text else 0 for text in texts])
        before = np.concatenate([last[:, None], drafts], axis=1)
        logits = toy_logits(written[:, None] + np.arange(BLOCK)[None, :], before)
        if mask_block:  # the reported fault: all rows of a block judged by its first
            logits[np.ix_(written < np.array(fewest), range(BLOCK), [STOP])] = -np.inf
        bounds = Limits(rows, i32([0] * size if mask_block else fewest), i32([0 if d else most for d in done]))
        tokens, end = toy_round(jnp.asarray(logits), i32(drafts), i32(proposed), i32(written), bounds)
        for b in range(size):
            if not done[b]:
                texts[b] += [int(token) for token in tokens[b, : int(end.count[b])]]
                done[b] = int(end.reason[b]) != NOT_ENDED
    return texts


def some_proposals(seed: int, size: int):
    rng = np.random.default_rng(seed)
    while True:
        yield rng.random((size, DRAFTS)) < 0.2, rng.choice([0, 2, DRAFTS], size)


def test_bug_case_b31_plain_and_speculative_texts_are_one_for_every_min_tokens():
    fewest = list(range(7))  # a mixed batch: some requests have no drafts in a round
    expected = [plain_text(f, 12) for f in fewest]
    assert [len(text) for text in expected] == [f + 1 for f in fewest], "the toy wants to stop as soon as it may"
    for seed in range(4):
        assert speculative_texts(fewest, 12, some_proposals(seed, 7)) == expected
    assert speculative_texts(fewest, 12, some_proposals(0, 7), mask_block=True) != expected


# --- stop strings ---------------------------------------------------------------------------------------------------

SETS = [["ab"], [], ["bab", "aa."], ["é", "abé"]]


@pytest.fixture(scope="module")
def table(tokenizer):
    return stop_table([build_stop_automaton(tokenizer, strings) for strings in SETS], states=40)


def test_reading_a_block_is_reading_its_tokens_one_by_one(tokenizer, table):
    stops, starts = table
    automata = [build_stop_automaton(tokenizer, strings) for strings in SETS]
    rng = np.random.default_rng(1)
    for _ in range(30):
        tokens, count, skip = rng.integers(1, V, (4, 6)), rng.integers(0, 7, 4), rng.integers(0, 3, 4)
        unread = np.where(np.arange(6)[None, :] < count[:, None], tokens, -7)
        state, first = ADVANCE(stops, i32(starts), i32(unread), i32(count), i32(skip))
        for b, automaton in enumerate(automata):
            at, hits = 0, []
            for i in range(skip[b], count[b]):
                at = int(automaton.table[at, tokens[b, i]])
                hits += [i] if automaton.string_at(at) else []
            assert (int(state[b]), int(first[b])) == (starts[b] + at, min(hits, default=6))


def test_a_table_without_room_is_refused(tokenizer):
    with pytest.raises(UserError, match="states=2 must be >= 4, those of all stop strings"):
        stop_table([build_stop_automaton(tokenizer, ["ab"])], states=2)


def response_end(tokenizer, ids, stop_ids, strings, fewest, most) -> tuple[int, int] | None:
    """(length, reason) of a response in these ids, None if it goes on: by the text, which begins behind min_tokens."""
    behind = ids[fewest:most]
    end = find_response_end(tokenizer, behind, stop_ids, strings)
    if end.finished:
        return fewest + end.length, BY_STOP_ID if end.stop_id is not None else BY_STOP_STRING
    return (most, BY_LENGTH) if len(ids) >= most else None


def test_blocks_end_where_the_text_does(tokenizer, table):
    stops, starts = table
    rng = random.Random(5)
    reasons = []
    for _ in range(60):
        names = [[0], [1, 7], [], [0, 4]]
        fewest, most = [rng.randrange(4) for _ in SETS], [rng.randrange(4, 12) for _ in SETS]
        texts = [[rng.randrange(1, V) if rng.random() < 0.9 else 0 for _ in range(12)] for _ in SETS]
        for text, ids, f in zip(texts, names, fewest, strict=True):
            text[:f] = [2 if token in ids else token for token in text[:f]]  # masked, so never drawn
        bounds = limits(names, fewest, most)
        state, written, ended = i32(starts), np.zeros(4, int), [NOT_ENDED] * 4
        while not all(ended) and max(written) < 12:
            emitted = [0 if ended[b] else min(rng.randrange(1, 5), 12 - written[b]) for b in range(4)]
            # Cells behind what a round gave out hold a stop id.
            block = [[*texts[b][written[b] : written[b] + emitted[b]], *[0] * 4][:4] for b in range(4)]
            end = END(stops, state, i32(block), i32(emitted), i32(written), bounds)
            state, written = end.state, written + np.asarray(end.count)
            ended = [ended[b] or int(end.reason[b]) for b in range(4)]
        found = [(int(written[b]), ended[b]) if ended[b] else None for b in range(4)]
        expected = [response_end(tokenizer, texts[b], names[b], SETS[b], fewest[b], most[b]) for b in range(4)]
        assert found == expected
        reasons += [end[1] for end in found if end]
    assert min(reasons.count(reason) for reason in (BY_STOP_ID, BY_STOP_STRING, BY_LENGTH)) > 15


def test_bug_case_b71_cells_that_were_not_written_end_nothing():
    end = END(None, i32([0]), i32([[3, 0, 0, 0]]), i32([1]), i32([4]), limits([[0]], [0], [32]))
    assert (int(end.count[0]), int(end.reason[0])) == (1, NOT_ENDED)


def test_bug_case_b72_any_of_several_stop_ids_ends_and_is_kept():
    end = END(None, i32([0]), i32([[5, 6, 7, 0, 0]]), i32([5]), i32([0]), limits([[7, 1, 0]], [0], [32]))
    assert (int(end.count[0]), int(end.reason[0])) == (3, BY_STOP_ID)


def test_a_stop_in_the_last_place_is_a_stop_and_a_request_at_its_end_stays():
    bounds = limits([[0]] * 3, [0] * 3, [6, 6, 6])
    end = END(None, i32([0] * 3), i32([[3, 0, 4], [3, 4, 4], [3, 0, 4]]), i32([3, 3, 0]), i32([4, 4, 6]), bounds)
    np.testing.assert_array_equal(end.count, [2, 2, 0])
    np.testing.assert_array_equal(end.reason, [BY_STOP_ID, BY_LENGTH, NOT_ENDED])


# --- the context's end ----------------------------------------------------------------------------------------------


def last_position(prompt: int, most: int, lookahead: int) -> int:
    """The last position that is written or given to a token, at worst: rounds that commit one token each."""
    positions = [prompt - 1, prompt + most - 1]
    for written in range(1, most):
        anchor = prompt + written - 1
        positions += range(anchor, anchor + lookahead + 1)
    return max(positions)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
def test_no_token_and_no_write_goes_beyond_the_last_position_and_one_more_token_would(lookahead):
    places, wish = 16, 9
    prompts = np.arange(1, places + 2)
    found = np.asarray(allowed_tokens(i32(prompts), i32([wish] * len(prompts)), places, lookahead))
    for prompt, most in zip(prompts, found, strict=True):
        assert most == 0 or last_position(prompt, most, lookahead) < places
        # A first token alone needs no round, so its limit lies a little higher than the formula's.
        assert most in (0, wish) or last_position(prompt, most + 1, lookahead) >= places
    assert found[0] == wish and found[-1] == 0


def test_the_last_prompt_that_fits_is_served_and_the_next_is_refused():
    for lookahead, most in [(0, 15), (1, 15), (4, 12)]:
        require_room([3, most], 16, lookahead)
        assert allowed_tokens(i32([most]), i32([9]), 16, lookahead)[0] == 1
        assert allowed_tokens(i32([most + 1]), i32([9]), 16, lookahead)[0] == 0
        with pytest.raises(UserError, match=f"prompt_length={most + 1} must be <= {most}, so that a token fits"):
            require_room([most + 1], 16, lookahead)
