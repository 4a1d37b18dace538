"""Word problems of JSON lines, an object with `question` and `answer` each (GSM8K), asked in the policy's chat format.

The answer's last line is ``#### 72``. A response is right if it ended by itself and its last number is that one.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from draftco_jax.data.prompts import digest_of
from draftco_jax.environments.base import Split, split_of
from draftco_jax.errors import UserError
from draftco_jax.text.chat import Chat
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Prompt

ANSWER_MARK = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class WordProblemsConfig:
    """Files of problems and the policy that they are written for."""

    train: str
    """File of the problems to learn from."""
    held_out: str | None = None
    """File of the others; none: one in eight of `train`, by the text of the question."""
    model_dir: str
    """Hugging Face folder of the policy: tokenizer and chat template."""
    instruction: str = ""
    """Follows the question in the user's message."""
    max_prompt_tokens: int = 256
    """Problems with longer prompts are left out."""
    max_response_tokens: int = 256

    def __post_init__(self) -> None:
        """Refuse limits that hold nothing."""
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more; leave it out for the default")


class WordProblemsTask:
    """A finite source: every line is read at the start, so that a bad one is met then and not hours later."""

    def __init__(self, config: WordProblemsConfig, split: Split = "train") -> None:
        self.config = config
        chat = Chat.load(config.model_dir)
        self.tokenizer: Tokenizer = chat.tokenizer
        self._stop_ids = chat.stops.ids
        problems = _problems(config, split)
        asked = [chat.encode([_message(config, p)], add_generation_prompt=True).ids for p in problems]
        kept = [pair for pair in zip(problems, asked, strict=True) if len(pair[1]) <= config.max_prompt_tokens]
        self.left_out: int = len(problems) - len(kept)
        """Problems with prompts over `max_prompt_tokens`."""
        if not kept:
            raise UserError(
                f"max_prompt_tokens={config.max_prompt_tokens} leaves none of the {len(problems)} {split} problems, "
                f"whose shortest prompt has {min(map(len, asked), default=0)}; raise it"
            )
        self._prompts = [
            Prompt(prompt_id=i, text=problem["question"], answer=problem["answer"], token_ids=tuple(ids))
            for i, (problem, ids) in enumerate(kept)
        ]

    @property
    def num_problems(self) -> int | None:
        """Problems in this split."""
        return len(self._prompts)

    @functools.cached_property
    def problems_digest(self) -> str:
        """Of the problems of the split, so that no run is resumed with others."""
        return digest_of((prompt.text, prompt.answer) for prompt in self._prompts)

    @property
    def max_prompt_tokens(self) -> int:
        """As configured."""
        return self.config.max_prompt_tokens

    @property
    def max_response_tokens(self) -> int:
        """As configured."""
        return self.config.max_response_tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Those of the policy's folder, which may end a turn with another token than a text."""
        return self._stop_ids

    @property
    def notes(self) -> tuple[str, ...]:
        """How many problems were left out."""
        if not self.left_out:
            return ()
        return (f"{self.left_out} problems have prompts of more than {self.config.max_prompt_tokens} tokens: left out",)

    def problem(self, index: int) -> Prompt:
        """The problem at an index of the split, in the order of the file."""
        if not 0 <= index < len(self._prompts):
            raise UserError(f"index={index} must be in 0..{len(self._prompts) - 1}, the problems of the file")
        return self._prompts[index]

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """1.0 if the response ended by itself and its last number is the answer, else 0.0."""
        found = last_number(response_text) if finished else None
        return float(found is not None and found == Decimal(prompt.answer))


def last_number(text: str) -> Decimal | None:
    """The last number written in a text, thousands commas aside."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _message(config: WordProblemsConfig, problem: dict[str, str]) -> dict[str, str]:
    return {"role": "user", "content": problem["question"] + config.instruction}


def _problems(config: WordProblemsConfig, split: Split) -> list[dict[str, str]]:
    """question and answer (a number alone) of each line of the split."""
    file = config.train if split == "train" or config.held_out is None else config.held_out
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a text ({error}); give a file of JSON lines") from error
    found = [_problem(line, f"{file} line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if config.held_out is None:
        found = [problem for problem in found if split_of(problem["question"]) == split]
    if not found:
        raise UserError(f"{file} holds no problem of the split {split}; give one a line")
    return found


def _problem(line: str, place: str) -> dict[str, str]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}); give an object with question and answer") from error
    found = value if isinstance(value, dict) else {}
    question, answer = found.get("question"), found.get("answer")
    if not (isinstance(question, str) and question and isinstance(answer, str) and answer):
        raise UserError(f"{place} must be an object with the texts question and answer; correct it")
    number = last_number(answer.rpartition(ANSWER_MARK)[2])
    if number is None:
        raise UserError(f"{place}: answer must end in a number, as in '{ANSWER_MARK} 72'; correct it")
    return {"question": question, "answer": str(number)}
