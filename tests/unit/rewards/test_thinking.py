from __future__ import annotations

import pytest

from draftco_jax.rewards.thinking import after_thinking, is_open


@pytest.mark.parametrize(
    ("response", "opened", "answer"),
    [
        ("5", False, "5"),
        (r"<think> so \boxed{5}", False, None),
        (r"<think> so \boxed{5}</think>\boxed{6}", False, r"\boxed{6}"),
        ("<think>5</think>6<think>7", False, None),
        ("<think>5</think>6<think>7</think>8", False, "8"),
        ("<think>5</think>", False, ""),
        ("so 5", True, None),
        ("so 5</think>6", True, "6"),
        ("so 5</think>6<think>", True, None),
    ],
)
def test_bug_case_b86_what_stands_in_an_unfinished_thinking_block_is_no_answer(response, opened, answer):
    assert after_thinking(response, opened=opened) == answer


def test_a_prompt_may_end_inside_a_thinking_block():
    assert is_open("<user>5?<assistant><think>\n")
    assert not is_open("<user>5?<assistant><think>\n\n</think>\n") and not is_open("5?")
