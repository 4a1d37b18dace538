"""Problems of the optional ``reasoning-gym`` package, strictly scored.

Its questions are English text, grids and formulas. They need a text tokenizer (any Hugging Face tokenizer directory,
for instance a Qwen model's); the character tokenizer of the arithmetic task refuses them.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from draftco_jax.environments.base import Split, split_of
from draftco_jax.errors import UserError
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Prompt

INSTRUCTION = "\nThink step by step, then give only the final answer between <answer> and </answer>.\n"

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

Option = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """One reasoning-gym dataset at one difficulty."""

    dataset: str
    """Name in the package, for instance ``chain_sum``."""
    tokenizer_dir: str
    """Hugging Face tokenizer directory of the policy."""
    size: int = 2000
    """Problems generated; about one in eight of them is held out."""
    options: tuple[tuple[str, Option], ...] = ()
    """Keyword options of the dataset, for instance ``(("min_terms", 2), ("max_terms", 3))``."""
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("dataset='' must be the name of a reasoning-gym dataset; chain_sum is a simple one")
        for name in ("size", "max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more; leave it out for the default")
        reserved = {"size", "seed"}.intersection(name for name, _ in self.options)
        if reserved:
            raise ValueError(
                f"options={sorted(reserved)} must not set size or seed; set size beside it, seed comes from the run"
            )


@runtime_checkable
class _Dataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


@runtime_checkable
class _Library(Protocol):
    """The one function used of the package."""

    def create_dataset(self, name: str, **options: Any) -> _Dataset: ...


class ReasoningGymTask:
    """A finite source: all problems are generated at the start, so that a bad one is met then and not hours later."""

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        config: ReasoningGymConfig,
        seed: int,
        tokenizer: Tokenizer,
        split: Split = "train",
        library: _Library | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._dataset = _create(library or _import_library(), config, seed)
        entries = (self._dataset[index] for index in range(len(self._dataset)))
        self._entries = [entry for entry in entries if split_of(entry["question"]) == split]
        if not self._entries:
            raise UserError(f"size={config.size} must leave problems for the split {split}; raise size")
        self._prompts = [self._prompt(index, entry) for index, entry in enumerate(self._entries)]

    @property
    def num_problems(self) -> int | None:
        """Problems in this split."""
        return len(self._prompts)

    @property
    def max_prompt_tokens(self) -> int:
        """As configured; every prompt was checked against it."""
        return self.config.max_prompt_tokens

    @property
    def max_response_tokens(self) -> int:
        """As configured."""
        return self.config.max_response_tokens

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence."""
        return (self.tokenizer.eos_id,)

    def problem(self, index: int) -> Prompt:
        """The problem at an index of the split: a pure function of the config, seed, split and index."""
        if not 0 <= index < len(self._prompts):
            raise UserError(f"index={index} must be in 0..{len(self._prompts) - 1}; set size higher for more problems")
        return self._prompts[index]

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """1.0 if the response ended by itself, ends in its only answer tag, and the package gives that the full score.

        The package gives part of a score for any text that contains the answer, which RL would learn to exploit, so
        anything below its full score is 0 here. For a few datasets the package's full score is itself generous
        (gsm_symbolic takes the last number of a sentence); that is kept, since such answers have several right forms.
        """
        answer = strict_answer(response_text) if finished else None
        if answer is None:
            return 0.0
        try:
            points = self._dataset.score_answer(answer=answer, entry=self._entries[prompt.prompt_id])
        except Exception:  # some scorers parse without checking (int("x")); what they cannot read is no answer
            return 0.0
        return float(points == 1.0)

    def _prompt(self, index: int, entry: dict[str, Any]) -> Prompt:
        text = entry["question"] + INSTRUCTION
        token_ids = self.tokenizer.encode(text)
        if len(token_ids) > self.config.max_prompt_tokens:
            raise UserError(
                f"max_prompt_tokens={self.config.max_prompt_tokens} must hold every prompt of {self.config.dataset}, "
                f"number {index} has {len(token_ids)}; raise it or set options that give shorter questions"
            )
        # Where only a checker knows the right answers, the package gives none.
        return Prompt(prompt_id=index, text=text, answer=entry["answer"] or "", token_ids=token_ids)


def strict_answer(response_text: str) -> str | None:
    """What stands in the only answer tag, at the end of the response; None if there is no such thing."""
    found = _ANSWER.findall(response_text)
    tags = response_text.count("<answer>"), response_text.count("</answer>")
    if len(found) != 1 or tags != (1, 1) or not response_text.rstrip().endswith("</answer>"):
        return None
    return found[0].strip()


def _import_library() -> _Library:
    try:
        return cast(_Library, importlib.import_module("reasoning_gym"))
    except ImportError as error:
        raise UserError(
            "environment=reasoning_gym must have its package installed; run: pip install reasoning-gym"
        ) from error


def _create(library: _Library, config: ReasoningGymConfig, seed: int) -> _Dataset:
    try:
        return library.create_dataset(config.dataset, size=config.size, seed=seed, **dict(config.options))
    except (ValueError, TypeError, AssertionError) as error:  # what the package raises for names and options it rejects
        raise UserError(
            f"dataset={config.dataset!r} with options={config.options} must be accepted by reasoning-gym ({error}); "
            "see the package's gallery for names and options"
        ) from error
