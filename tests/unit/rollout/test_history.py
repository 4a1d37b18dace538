"""Which earlier texts a request is given."""

from __future__ import annotations

import json

import numpy as np

from draftco_jax.rollout.history import RolloutHistory
from draftco_jax.types import Prompt, Rollouts


def prompts(*ids: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(prompt_id=i, text="", answer="", token_ids=()) for i in ids)


def rollouts(*texts: list[int]) -> Rollouts:
    """Only tokens and lengths matter; cells after a text hold a token that must not be read."""
    size = len(texts)
    tokens = np.full((size, 6), 99, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths, zeros = np.array([len(text) for text in texts], np.int32), np.zeros(size, np.int32)
    empty = np.zeros((size, 0), np.int32)
    logprobs = np.zeros(tokens.shape, np.float32)
    return Rollouts(tokens, zeros, lengths, logprobs, np.ones(size, bool), zeros, zeros, empty, zeros)


def test_own_texts_come_first_then_the_newest_one_of_each_other_prompt():
    history = RolloutHistory(request_tokens=12, total_tokens=100)
    history.add(prompts(1, 2), rollouts([1, 1], [1, 2], [2, 1], [2, 2]))  # two samples each
    history.add(prompts(3), rollouts([3, 1], [3, 2]))
    found = history.rows(prompts(2, 9), samples_per_prompt=2)
    assert found.dtype == np.int32 and (found[0] == found[1]).all() and (found[2] == found[3]).all()
    assert found[0].tolist() == [2, 2, -1, 2, 1, -1, 3, 2, -1, 1, 2, -1]
    assert found[2].tolist() == [3, 2, -1, 2, 2, -1, 1, 2, -1, -1, -1, -1]


def test_problems_of_two_splits_with_one_number_do_not_get_each_others_texts():
    train, held_out = (Prompt(prompt_id=4, text="", answer="", token_ids=ids) for ids in ((1, 2), (1, 3)))
    history = RolloutHistory(request_tokens=8, total_tokens=100)
    history.add((train,), rollouts([1, 2, 5], [1, 2, 6]))
    assert history.rows((train,), 1).tolist() == [[1, 2, 6, -1, 1, 2, 5, -1]]
    assert history.rows((held_out,), 1).tolist() == [[1, 2, 6, -1, -1, -1, -1, -1]], "one text of another prompt"


def test_no_text_is_cut_and_room_that_is_left_is_empty():
    history = RolloutHistory(request_tokens=6, total_tokens=100)
    history.add(prompts(1, 2), rollouts([1, 1, 1], [2, 2, 2, 2]))
    assert history.rows(prompts(1), 1).tolist() == [[1, 1, 1, -1, -1, -1]]
    assert history.rows(prompts(5), 1).tolist() == [[2, 2, 2, 2, -1, -1]]
    assert RolloutHistory(4, 100).rows(prompts(1), 1).tolist() == [[-1] * 4]


def test_the_oldest_texts_are_forgotten():
    history = RolloutHistory(request_tokens=9, total_tokens=6)
    for i in range(1, 6):
        history.add(prompts(i), rollouts([i, i]))
    assert history.rows(prompts(1), 1).tolist() == [[5, 5, -1, 4, 4, -1, 3, 3, -1]]
    history.add(prompts(1), rollouts([7, 7, 7, 7, 7, 7]))
    assert len(history.get_state()) == 1
    history.add(prompts(2), rollouts([8] * 6))
    assert history.rows(prompts(1), 1).tolist() == [[8] * 6 + [-1] * 3]


def test_the_state_survives_a_checkpoint():
    history, again = (RolloutHistory(request_tokens=12, total_tokens=8) for _ in range(2))
    for i in range(5):
        history.add(prompts(i % 2), rollouts([i, i]))
    again.set_state(json.loads(json.dumps(history.get_state())))
    for other in (history, again):
        other.add(prompts(7), rollouts([7]))
    assert again.get_state() == history.get_state()
    np.testing.assert_array_equal(again.rows(prompts(0, 1, 7), 1), history.rows(prompts(0, 1, 7), 1))
