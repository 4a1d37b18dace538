"""Addition of two numbers, digit by digit.

Prompt ``347+585=``, response ``7+5=12,4+8+1=13,3+5+1=09>932``: the digit sums from the last digit up, two digits each,
with the carry as third term from the second digit on, then the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftco_jax.environments.base import Split, split_of, stable_hash
from draftco_jax.errors import UserError
from draftco_jax.rewards.exact import ANSWER_MARK, exact_reward
from draftco_jax.text.tokenizer import Tokenizer, arithmetic_tokenizer
from draftco_jax.types import Prompt

# The largest digit sum: 9 + 9 and a carry.
_MAX_DIGIT_SUM = 19
_MAX_DIGITS = 18


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Addition problems of one difficulty."""

    digits: int = 3
    """Digits of either number; the first one is not 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= _MAX_DIGITS:
            raise ValueError(f"digits={self.digits} must be in 1..{_MAX_DIGITS}; 2 and 3 suit the shipped policies")


class ArithmeticTask:
    """Endless addition problems, drawn uniformly from one split."""

    num_problems: int | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, config: ArithmeticConfig, seed: int, split: Split = "train") -> None:
        self.config = config
        self.seed = seed
        self.split: Split = split
        self.tokenizer: Tokenizer = arithmetic_tokenizer()

    @property
    def max_prompt_tokens(self) -> int:
        """Begin-of-sequence, two numbers, ``+`` and ``=``."""
        return 2 * self.config.digits + 3

    @property
    def max_response_tokens(self) -> int:
        """``a+b=ss``, then ``,a+b+c=ss`` for each further digit, ``>``, one digit more than asked, end-of-sequence."""
        digits = self.config.digits
        return 6 + 9 * (digits - 1) + 1 + (digits + 1) + 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence."""
        return (self.tokenizer.eos_id,)

    def problem(self, index: int) -> Prompt:
        """The problem at an index: a pure function of seed, split, digits and index."""
        if index < 0:
            raise UserError(f"index={index} must be 0 or more; problems are numbered from 0")
        left, right = self._operands(index)
        text = f"{left}+{right}="
        return Prompt(prompt_id=index, text=text, answer=str(left + right), token_ids=self.tokenizer.encode(text))

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """1.0 for the exact answer after the only ``>``, else 0.0; the digit sums are not looked at."""
        return exact_reward(prompt.answer, response_text, finished)

    def demonstration(self, prompt: Prompt, rng: np.random.Generator, noise: float = 0.0) -> str:
        """A worked response in which each digit sum is off by one with probability ``noise``.

        Later carries and the final answer follow the wrong sum. A policy fine-tuned on such texts learns the right
        algorithm and samples the slips, which leaves RL a clear signal.
        """
        if not 0.0 <= noise <= 1.0:
            raise UserError(f"noise={noise} must be a probability; 0.15 to 0.2 gives a pass rate of about one half")
        left, right = prompt.text.removesuffix("=").split("+")
        steps: list[str] = []
        answer, carry = "", 0
        for place, (a, b) in enumerate(zip(reversed(left), reversed(right), strict=True)):
            total = int(a) + int(b) + carry
            if rng.random() < noise:
                total = _off_by_one(total, rng)
            steps.append(f"{a}+{b}" + (f"+{carry}" if place else "") + f"={total:02d}")
            carry, digit = divmod(total, 10)
            answer = f"{digit}{answer}"
        return ",".join(steps) + ANSWER_MARK + str(int(f"{carry}{answer}"))

    def _operands(self, index: int) -> tuple[int, int]:
        smallest = 10 ** (self.config.digits - 1)
        count = 9 * smallest
        # Draw again until the pair falls into the split. Both orders of a pair belong to one: a + b gives b + a away.
        attempt = 0
        while True:
            draws = [stable_hash(f"{self.seed}/{self.split}/{index}/{attempt}/{side}") for side in ("left", "right")]
            left, right = (smallest + draw % count for draw in draws)
            if split_of(f"{min(left, right)}+{max(left, right)}") == self.split:
                return left, right
            attempt += 1


def _off_by_one(total: int, rng: np.random.Generator) -> int:
    # At either end there is only one neighbour that two digits and a carry can show.
    if total == 0:
        return 1
    if total == _MAX_DIGIT_SUM:
        return total - 1
    return total + (1 if rng.random() < 0.5 else -1)
