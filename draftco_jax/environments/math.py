"""Math problems from files, asked in the policy's own format and scored by a reward of the catalog."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftco_jax.data.problem_files import FileRules, Problem, read_problems
from draftco_jax.data.prompts import digest_of
from draftco_jax.environments.base import Split, split_of
from draftco_jax.errors import UserError
from draftco_jax.rewards.catalog import build_scorer, require_gold, require_scorer
from draftco_jax.rewards.pool import PoolConfig
from draftco_jax.rewards.scores import Score, Scorer
from draftco_jax.rewards.thinking import after_thinking, is_open
from draftco_jax.text.chat import Chat
from draftco_jax.text.stop_tokens import StopTokens, find_stop_tokens
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.types import Prompt

_QUESTION = "{question}"


@dataclass(frozen=True, kw_only=True)
class MathConfig:
    """Files of problems, how they are asked, and what a right answer is."""

    train: str
    """File of the problems to learn from."""
    held_out: str | None = None
    """File to evaluate on; its questions are left out of training. none: one in eight of `train`, by the question."""
    files: FileRules = FileRules()
    """How `train` is read."""
    held_out_files: FileRules | None = None
    """How `held_out` is read; none: as `train`."""
    model_dir: str
    """Hugging Face folder of the policy: tokenizer, chat template, stop tokens."""
    prompt_format: Literal["chat", "plain"] = "chat"
    """chat: the template of `model_dir` writes a user's turn. plain: the text alone."""
    template: str = _QUESTION
    """The user's message, or the whole text; `{question}` stands for the question."""
    system: str | None = None
    """A system message, with prompt_format=chat."""
    switches: tuple[tuple[str, bool | int | str], ...] = ()
    """Variables of the chat template, for instance `(("enable_thinking", False),)`."""
    reward: str = "math_verify"
    """One of `rewards.catalog.REWARDS`, or a function of your own, `package.module:function`."""
    scoring: PoolConfig = PoolConfig()
    """Limits of the processes in which math_verify and functions of your own run."""
    score_truncated: bool = False
    """Score responses that were cut at the length limit too; else they are wrong."""
    unfinished_thinking: Literal["wrong", "read"] = "wrong"
    """wrong: the answer must follow a thinking block that was closed, if one was opened. read: all text is."""
    max_prompt_tokens: int = 512
    """Problems with longer prompts are left out, and counted."""
    max_response_tokens: int = 1024

    def __post_init__(self) -> None:
        """Refuse limits that hold nothing, texts that ask nothing, rewards that are not there."""
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more; leave it out for the default")
        if self.template.count(_QUESTION) != 1:
            raise ValueError(f"template={self.template!r} must hold {_QUESTION} once; it stands for the question")
        if self.prompt_format == "plain" and (self.system is not None or self.switches):
            raise ValueError("prompt_format=plain must go without system and switches; put the text into template")
        require_scorer(self.reward)


class MathTask:
    """A finite source: every row is read at the start, so that a bad one is met then and not hours later."""

    def __init__(self, config: MathConfig, split: Split = "train") -> None:
        self.config, self.split = config, split
        self._chat, self.tokenizer, self._stops = _policy_text(config)
        file, problems, report = _problems(config, split)
        for problem in problems:
            require_gold(config.reward, problem.answer, f"{file} row {problem.row}")
        asked = [(problem, *self._asked(file, problem)) for problem in problems]
        kept = [one for one in asked if len(one[2]) <= config.max_prompt_tokens]
        if not kept:
            raise UserError(
                f"max_prompt_tokens={config.max_prompt_tokens} leaves none of the {len(problems)} {split} problems, "
                f"whose shortest prompt has {min(len(ids) for _, _, ids in asked)}; raise it"
            )
        self.left_out: int = len(asked) - len(kept)
        """Problems with prompts over `max_prompt_tokens`."""
        self._prompts = tuple(
            Prompt(prompt_id=i, text=problem.question, answer=problem.answer, token_ids=ids)
            for i, (problem, _, ids) in enumerate(kept)
        )
        self._opened = tuple(is_open(text) for _, text, _ in kept)
        self._report = report

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
        """Those of the policy's folder: `generation_config.json` and the other files that name any."""
        return self._stops.ids

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of the rows of the file."""
        long = f"{self.left_out} with prompts of more than {self.config.max_prompt_tokens} tokens left out"
        return (*self._report, f"{self.split}: {len(self._prompts)} problems" + (f", {long}" if self.left_out else ""))

    def problem(self, index: int) -> Prompt:
        """The problem at an index of the split, in the order of the file."""
        if not 0 <= index < len(self._prompts):
            raise UserError(f"index={index} must be in 0..{len(self._prompts) - 1}, the problems of the split")
        return self._prompts[index]

    def reward(self, prompt: Prompt, response_text: str, finished: bool) -> float:
        """The total of one response's score."""
        return self.score_responses([prompt], [response_text], [finished])[0].total

    def score_responses(
        self, prompts: Sequence[Prompt], response_texts: Sequence[str], finished: Sequence[bool]
    ) -> list[Score]:
        """One score a response; wrong without a look are those that were cut, or never left their thinking."""
        cases = list(zip(prompts, response_texts, finished, strict=True))
        answers = [self._said(prompt, text, ended) for prompt, text, ended in cases]
        asked = [i for i, said in enumerate(answers) if said is not None]
        scores = [Score(0.0, {"correct": 0.0})] * len(cases)
        found = self._scorer.score([answers[i] or "" for i in asked], [prompts[i].answer for i in asked])
        for i, score in zip(asked, found, strict=True):
            scores[i] = score
        return scores

    def _said(self, prompt: Prompt, text: str, ended: bool) -> str | None:
        if not ended and not self.config.score_truncated:
            return None
        if self.config.unfinished_thinking == "read":
            return text
        return after_thinking(text, opened=self._opened[prompt.prompt_id])

    @functools.cached_property
    def _scorer(self) -> Scorer:
        # When it is first needed, which is the evaluation before the first step: drafts are trained without one.
        return build_scorer(self.config.reward, self.config.scoring)

    def _asked(self, file: str, problem: Problem) -> tuple[str, tuple[int, ...]]:
        """Text and ids of a prompt."""
        text = self.config.template.replace(_QUESTION, problem.question)
        try:
            if self._chat is None:
                return text, self.tokenizer.encode(text)
            system = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
            rendered = self._chat.encode([*system, {"role": "user", "content": text}], add_generation_prompt=True)
        except UserError as error:
            raise UserError(f"{file} row {problem.row}: {error}") from error
        return rendered.text, rendered.ids


def _policy_text(config: MathConfig) -> tuple[Chat | None, Tokenizer, StopTokens]:
    if config.prompt_format == "chat":
        chat = Chat.load(config.model_dir, switches=dict(config.switches))
        return chat, chat.tokenizer, chat.stops
    tokenizer = Tokenizer.load(config.model_dir)
    return None, tokenizer, find_stop_tokens(config.model_dir, tokenizer)


def _problems(config: MathConfig, split: Split) -> tuple[str, tuple[Problem, ...], tuple[str, ...]]:
    """(file, its problems of the split, what to say of them)."""
    if config.held_out is None:
        problems, report = read_problems(config.train, config.files)
        found = tuple(problem for problem in problems if split_of(_key(problem)) == split)
        if not found:
            raise UserError(f"{config.train} holds no problem of the split {split}; give a larger file, or held_out")
        return config.train, found, (report.line(),)
    held_out, report = read_problems(config.held_out, config.held_out_files or config.files)
    if split == "held_out":
        return config.held_out, held_out, (report.line(),)
    problems, report = read_problems(config.train, config.files)
    asked = {_key(problem) for problem in held_out}
    found = tuple(problem for problem in problems if _key(problem) not in asked)
    if not found:
        raise UserError(f"{config.train} holds no question that {config.held_out} does not; give another file")
    shared = len(problems) - len(found)
    overlap = (f"{config.train}: {shared} questions of {config.held_out} left out",) if shared else ()
    return config.train, found, (report.line(), *overlap)


def _key(problem: Problem) -> str:
    """What makes two questions one: the text, white space aside. Of such a pair both are in one split."""
    return " ".join(problem.question.split())
