from __future__ import annotations

import numpy as np
import pytest

from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.errors import UserError
from draftco_jax.rewards.exact import exact_reward
from draftco_jax.rewards.scores import Score, fault
from draftco_jax.rewards.scoring import score, score_all
from draftco_jax.text.tokenizer import arithmetic_tokenizer
from draftco_jax.types import Prompt, Rollouts

TOKENIZER = arithmetic_tokenizer()
TASK = ArithmeticTask(ArithmeticConfig(digits=3), seed=0)
PROMPT = Prompt(prompt_id=0, text="347+585=", answer="932", token_ids=TOKENIZER.encode("347+585="))


@pytest.mark.parametrize(
    ("response", "finished", "reward"),
    [
        ("7+5=12,4+8+1=13,3+5+1=09>932", True, 1.0),
        (">932", True, 1.0),
        (">932", False, 0.0),
        ("932", True, 0.0),
        ("", True, 0.0),
        (">", True, 0.0),
        (">0932", True, 0.0),
        (">93", True, 0.0),
        (">9321", True, 0.0),
        (">932>", True, 0.0),
        (">932>932", True, 0.0),
        (">>932", True, 0.0),
        ("> 932", True, 0.0),
        (">932 ", True, 0.0),
        (">932\n", True, 0.0),
        (">+932", True, 0.0),
        ("932>", True, 0.0),
    ],
)
def test_only_the_exact_answer_of_a_finished_response_counts(response: str, finished: bool, reward: float):
    assert exact_reward("932", response, finished) == reward


def _rollouts(responses: list[list[int]], finished: list[bool], fill: int, prompt_ids: tuple[int, ...]) -> Rollouts:
    """Responses as the engine would leave them, with ``fill`` in every cell after the end."""
    size, width = len(responses), len(prompt_ids) + max(len(response) for response in responses) + 3
    tokens = np.full((size, width), fill, np.int32)
    for row, response in zip(tokens, responses, strict=True):
        row[: len(prompt_ids) + len(response)] = [*prompt_ids, *response]
    lengths = np.array([len(prompt_ids) + len(response) for response in responses], np.int32)
    zeros = np.zeros(size, np.int32)
    return Rollouts(
        tokens=tokens,
        prompt_lengths=np.full(size, len(prompt_ids), np.int32),
        lengths=lengths,
        logprobs=np.zeros((size, width), np.float32),
        finished=np.array(finished),
        rounds=zeros,
        committed=zeros,
        accepted=np.zeros((size, 0), np.int32),
        proposed=zeros,
    )  # fmt: skip


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text)[1:])


def test_scores_are_laid_out_by_prompt():
    other = Prompt(prompt_id=1, text="100+100=", answer="200", token_ids=TOKENIZER.encode("100+100="))
    right, wrong = [*_ids(">932"), 1], [*_ids(">200"), 1]
    rollouts = _rollouts([right, wrong, right, wrong, right, wrong], [True] * 6, 0, PROMPT.token_ids)
    rewards = score(TASK, (PROMPT, other), rollouts, TOKENIZER, samples_per_prompt=3)
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [[1, 0, 1], [1, 0, 1]])


@pytest.mark.parametrize("fill", range(32))
def test_bug_case_b71_cells_after_the_end_do_not_matter(fill: int):
    responses = [[*_ids(">932"), 1], _ids(">932"), [*_ids(">93"), 1]]
    rollouts = _rollouts(responses, [True, False, True], fill, PROMPT.token_ids)
    np.testing.assert_array_equal(score(TASK, (PROMPT,), rollouts, TOKENIZER, 3), [[1, 0, 0]])


def test_bug_case_b72_any_stop_id_is_cut_off():
    stop_ids = [1, 0, 31]
    rollouts = _rollouts([[*_ids(">932"), stop] for stop in stop_ids], [True] * 3, 0, PROMPT.token_ids)
    np.testing.assert_array_equal(score(TASK, (PROMPT,), rollouts, TOKENIZER, 3), [[1, 1, 1]])


def test_bug_case_b73_pad_equals_eos():
    # Padding cells hold the stop id itself, and so does a place inside the working: only lengths tell them apart.
    responses = [[*_ids("7+5"), 1, *_ids(">932"), 1], [*_ids(">932"), 1]]
    rollouts = _rollouts(responses, [True, True], 1, PROMPT.token_ids)
    np.testing.assert_array_equal(score(TASK, (PROMPT,), rollouts, TOKENIZER, 2), [[1, 1]])


@pytest.mark.parametrize("inside", [0, 1, 2, 17, 31])
def test_a_control_token_inside_the_answer_is_wrong(inside: int):
    rollouts = _rollouts([[*_ids(">93"), inside, *_ids("2"), 1]], [True], 0, PROMPT.token_ids)
    np.testing.assert_array_equal(score(TASK, (PROMPT,), rollouts, TOKENIZER, 1), [[0]])


def test_an_empty_response_scores_nothing():
    rollouts = _rollouts([[], [1]], [False, True], 0, PROMPT.token_ids)
    np.testing.assert_array_equal(score(TASK, (PROMPT,), rollouts, TOKENIZER, 2), [[0, 0]])


def test_the_prompt_is_not_read_as_part_of_the_response():
    prompt = Prompt(prompt_id=0, text=">932=", answer="932", token_ids=TOKENIZER.encode(">932="))
    rollouts = _rollouts([[1]], [True], 0, prompt.token_ids)
    np.testing.assert_array_equal(score(TASK, (prompt,), rollouts, TOKENIZER, 1), [[0]])


def test_rollouts_of_other_prompts_are_refused():
    rollouts = _rollouts([[1], [1]], [True, True], 0, PROMPT.token_ids)
    with pytest.raises(UserError, match="rollouts=2 must be prompts x samples_per_prompt = 1 x 3"):
        score(TASK, (PROMPT,), rollouts, TOKENIZER, 3)


def test_an_id_past_the_tokenizer_scores_nothing_and_stops_nobody():
    # A policy's vocabulary may be padded past the tokenizer's; other rows are scored as ever.
    rollouts = _rollouts([[*_ids(">93"), 39, *_ids("2"), 1], [*_ids(">932"), 1]], [True, True], 0, PROMPT.token_ids)
    np.testing.assert_array_equal(score(TASK, (PROMPT,), rollouts, TOKENIZER, 2), [[0, 1]])


class Parts(ArithmeticTask):
    """Judges many responses at once: the last digit decides, a lone mark is a fault."""

    def score_responses(self, prompts, response_texts, finished):
        return [
            fault("timeout") if text == ">" else Score(float(text.endswith("2")), {"correct": 0.5, "long": len(text)})
            for text in response_texts
        ]


def test_parts_are_averaged_over_all_responses_and_faults_are_counted():
    task = Parts(ArithmeticConfig(digits=3), seed=0)
    responses = [[*_ids(">932"), 1], [*_ids(">9"), 1], [*_ids(">"), 1], [*_ids(">93"), 39, 1]]
    found = score_all(task, (PROMPT,), _rollouts(responses, [True] * 4, 0, PROMPT.token_ids), TOKENIZER, 4)
    np.testing.assert_array_equal(found.rewards, [[1, 0, 0, 0]])
    # An id without a text is wrong and has no other part, a fault has none: both count 0.
    assert found.metrics() == {
        "reward/component_correct": (0.5 + 0.5 + 0.0 + 0.0) / 4,
        "reward/component_long": (4 + 2 + 0 + 0) / 4,
        "reward/faults_fraction": 0.25,
    }
    plain = score_all(TASK, (PROMPT,), _rollouts(responses, [True] * 4, 0, PROMPT.token_ids), TOKENIZER, 4)
    assert plain.metrics() == {}
