from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask
from draftco_jax.environments.base import HELD_OUT_SHARE, split_of
from draftco_jax.environments.catalog import build_task
from draftco_jax.errors import UserError
from draftco_jax.types import Prompt

GOLDEN_TRAIN = ["140+229=", "421+755=", "855+519="]
GOLDEN_HELD_OUT = ["696+873=", "419+648=", "295+182="]


def _task(digits: int = 3, seed: int = 0, split: str = "train") -> ArithmeticTask:
    return ArithmeticTask(ArithmeticConfig(digits=digits), seed, split)  # pyright: ignore[reportArgumentType]


def _prompt(left: int, right: int) -> Prompt:
    text = f"{left}+{right}="
    return Prompt(prompt_id=0, text=text, answer=str(left + right), token_ids=_task().tokenizer.encode(text))


def test_demonstrations_have_the_documented_form():
    rng = np.random.default_rng(0)
    task = _task()
    assert task.demonstration(_prompt(347, 585), rng) == "7+5=12,4+8+1=13,3+5+1=09>932"
    assert task.demonstration(_prompt(999, 999), rng) == "9+9=18,9+9+1=19,9+9+1=19>1998"
    assert task.demonstration(_prompt(100, 100), rng) == "0+0=00,0+0+0=00,1+1+0=02>200"


def test_a_problem_is_a_function_of_its_index_alone():
    forwards = [_task().problem(index) for index in range(50)]
    backwards = [_task().problem(index) for index in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert [prompt.prompt_id for prompt in forwards] == list(range(50))


def test_problems_are_well_formed_and_fit():
    task = _task()
    rng = np.random.default_rng(1)
    for index in range(300):
        prompt = task.problem(index)
        left, right = (int(number) for number in prompt.text.removesuffix("=").split("+"))
        assert 100 <= left <= 999 and 100 <= right <= 999
        assert prompt.answer == str(left + right)
        assert prompt.token_ids == task.tokenizer.encode(prompt.text)
        assert len(prompt.token_ids) <= task.max_prompt_tokens
        for noise in (0.0, 0.5):
            response = task.tokenizer.encode_response(task.demonstration(prompt, rng, noise))
            assert len(response) <= task.max_response_tokens


@pytest.mark.parametrize("digits", [1, 2, 3, 7, 18])
def test_token_limits_are_reached_and_not_passed(digits: int):
    task = _task(digits)
    largest = 10**digits - 1
    prompt = _prompt(largest, largest)
    assert len(prompt.token_ids) == task.max_prompt_tokens
    response = task.demonstration(prompt, np.random.default_rng(0))
    assert len(task.tokenizer.encode_response(response)) == task.max_response_tokens


def test_clean_demonstrations_are_right():
    task, rng = _task(), np.random.default_rng(0)
    for index in range(200):
        prompt = task.problem(index)
        assert task.reward(prompt, task.demonstration(prompt, rng), finished=True) == 1.0


def test_seeds_give_different_problems():
    texts = {seed: [_task(seed=seed).problem(index).text for index in range(20)] for seed in range(3)}
    for one, other in itertools.combinations(texts.values(), 2):
        assert one != other


def test_splits_share_no_problem_in_either_order():
    # 2 digits: 8100 pairs, so 1500 draws cover a good part of them and an overlap could not hide.
    def pairs(split: str, seed: int) -> set[tuple[str, ...]]:
        texts = (_task(2, seed, split).problem(index).text for index in range(1500))
        return {tuple(sorted(text.removesuffix("=").split("+"))) for text in texts}

    train, held_out = pairs("train", 0), pairs("held_out", 1)
    assert len(train) > 1000 and len(held_out) > 300
    assert not train & held_out


def test_every_pair_belongs_to_one_split_and_the_share_is_kept():
    pairs = [f"{left}+{right}" for left in range(10, 100) for right in range(left, 100)]
    held_out = sum(split_of(pair) == "held_out" for pair in pairs)
    assert held_out / len(pairs) == pytest.approx(1 / HELD_OUT_SHARE, abs=0.02)  # 4 standard deviations of 4095 draws


def test_the_easiest_setting_has_both_splits():
    pairs = {f"{left}+{right}" for left in range(1, 10) for right in range(left, 10)}
    assert {split_of(pair) for pair in pairs} == {"train", "held_out"}


def test_problems_do_not_depend_on_the_process():
    # Python's own hash is salted by PYTHONHASHSEED: a resume in a new process would see other problems.
    program = (
        "from draftco_jax.environments.arithmetic import ArithmeticConfig, ArithmeticTask\n"
        "print([ArithmeticTask(ArithmeticConfig(), 3).problem(i).text for i in range(5)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    here = [ArithmeticTask(ArithmeticConfig(), 3).problem(index).text for index in range(5)]
    assert outputs == {f"{here}\n"}


def test_known_problems_stay_the_same():
    # Golden: the shipped warm start was measured on these. A change here makes its card wrong.
    assert [_task(3, 0, "train").problem(index).text for index in range(3)] == GOLDEN_TRAIN
    assert [_task(3, 0, "held_out").problem(index).text for index in range(3)] == GOLDEN_HELD_OUT


def test_noise_makes_each_digit_sum_wrong_by_one_with_its_probability():
    task, rng = _task(), np.random.default_rng(0)
    wrong = total = 0
    for index in range(1500):
        working, answer = task.demonstration(task.problem(index), rng, noise=0.2).split(">")
        carry, digits = 0, ""
        for place, step in enumerate(working.split(",")):
            terms, shown = step.split("=")
            parts = [int(term) for term in terms.split("+")]
            assert len(shown) == 2 and len(parts) == (2 if place == 0 else 3)
            assert place == 0 or parts[2] == carry  # later carries follow the sum that was written
            assert abs(int(shown) - sum(parts)) <= 1
            wrong += int(shown) != sum(parts)
            total += 1
            carry, digits = int(shown) // 10, shown[1] + digits
        assert answer == str(int(f"{carry}{digits}"))
    # 4500 draws have a standard deviation of 0.006; five of them.
    assert wrong / total == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(("left", "right"), [(100, 100), (999, 999)])
def test_full_noise_is_always_wrong_even_at_the_ends(left: int, right: int):
    working = _task().demonstration(_prompt(left, right), np.random.default_rng(0), noise=1.0).split(">")[0]
    for step in working.split(","):
        terms, shown = step.split("=")
        assert abs(int(shown) - sum(int(term) for term in terms.split("+"))) == 1
        assert 0 <= int(shown) <= 19


def test_demonstrations_follow_the_generator():
    texts = [_task().demonstration(_prompt(347, 585), np.random.default_rng(5), 0.5) for _ in range(2)]
    assert texts[0] == texts[1]


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match=r"digits=0 must be in 1..18"):
        ArithmeticConfig(digits=0)
    with pytest.raises(ValueError, match=r"digits=19 must be in 1..18"):
        ArithmeticConfig(digits=19)
    with pytest.raises(UserError, match="index=-1 must be 0 or more"):
        _task().problem(-1)
    with pytest.raises(UserError, match="noise=1.5 must be a probability"):
        _task().demonstration(_prompt(1, 1), np.random.default_rng(0), 1.5)


def test_the_catalog_builds_it():
    task = build_task(ArithmeticConfig(digits=2), seed=4, split="held_out")
    assert task.problem(9) == _task(2, 4, "held_out").problem(9)
    assert task.num_problems is None
