"""The exact verifier: a response is right or wrong, with nothing in between."""

from __future__ import annotations

ANSWER_MARK = ">"


def exact_reward(answer: str, response_text: str, finished: bool) -> float:
    """1.0 if the response ended by itself and what follows its only ``>`` is the answer to the letter, else 0.0.

    Nothing is stripped or parsed as a number: " 932", "0932" and "932," are wrong, since any slack here is slack the
    policy will learn to live on. Two marks are wrong even if both answers are right.
    """
    parts = response_text.split(ANSWER_MARK)
    return float(finished and len(parts) == 2 and parts[1] == answer)
