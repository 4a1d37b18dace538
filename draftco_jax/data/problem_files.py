"""Questions with answers from files, every row accounted for: read, malformed, or said before.

| layout | file | question | answer |
|---|---|---|---|
| jsonl | JSON lines | the field `question_field` | the field `answer_field` |
| gsm8k | JSON lines | question | what follows ``####`` in answer, without commas |
| parquet | Parquet | the column `question_field` | the column `answer_field` |
| dapo | Parquet of DAPO-Math-17K, AIME-2024 | content of the one user message in prompt | reward_model.ground_truth |

Published copies repeat their questions (AIME-2024 has 30 problems and is used in 960 rows): look at the duplicates
before an epoch's length is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from draftco_jax.data.parquet import parquet_rows
from draftco_jax.errors import UserError
from draftco_jax.rewards.gsm8k import ANSWER_MARK, gold_number

Layout = Literal["jsonl", "gsm8k", "parquet", "dapo"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

_SHOWN = 3
_NOT_JSON = object()
_MAX_DIGITS = 600
"""Python refuses to read or write integers of more digits than a limit, which nobody can set below 640."""


@dataclass(frozen=True, kw_only=True)
class FileRules:
    """What is read of a file, and what happens to rows that cannot be used."""

    layout: Layout = "jsonl"
    question_field: str = "question"
    answer_field: str = "answer"
    malformed: Literal["refuse", "skip"] = "refuse"
    """Of a row without question and answer."""
    duplicates: Literal["skip", "keep", "refuse"] = "skip"
    """Of a question that an earlier row has asked, white space aside. skip: the first one stays. A second answer to it
    that differs is told apart in the report, and left out even where duplicates are kept."""


@dataclass(frozen=True)
class Problem:
    """One row."""

    question: str
    answer: str
    row: int
    """Line of a text file, from 1; row of a table, from 0."""


@dataclass(frozen=True)
class FileReport:
    """What became of the rows of a file."""

    path: str
    rows: int
    kept: int
    malformed: int
    duplicates: int
    conflicting: int
    """Rows with another answer to a question that was asked before; not counted in `duplicates`."""
    first: tuple[str, ...]
    """The first few of each kind: where, and what."""

    def line(self) -> str:
        """The report in one line."""
        counts = ", ".join(
            f"{count} {name}"
            for name, count in (
                ("malformed", self.malformed),
                ("duplicate", self.duplicates),
                ("with another answer to an earlier question", self.conflicting),
            )
            if count
        )
        places = f" ({'; '.join(self.first)})" if self.first else ""
        return f"{self.path}: {self.rows} rows, {self.kept} used" + (f", {counts}{places}" if counts else "")


class _Malformed(Exception):
    """A row without question or answer; its argument says what is wrong."""


def read_problems(path: str | Path, rules: FileRules) -> tuple[tuple[Problem, ...], FileReport]:
    """Problems of a file, in its order, with a report.

    Raises `UserError` for a file that cannot be read, a row that `rules` refuses, or a file without any problem.
    """
    kept: list[Problem] = []
    asked: dict[str, tuple[str, int]] = {}
    told = {name: _Told() for name in ("malformed", "duplicates", "conflicting")}
    unit, rows = ("row" if rules.layout in ("parquet", "dapo") else "line"), 0
    for row, value in _rows(Path(path), rules):
        rows, place = rows + 1, f"{unit} {row}"
        try:
            problem = Problem(*_parts(value, rules), row)
        except _Malformed as error:
            _refuse_or_tell(path, rules.malformed, "malformed", told["malformed"], f"{place} {error}")
            continue
        key = " ".join(problem.question.split())
        answer, before = asked.setdefault(key, (problem.answer, row))
        if before != row:
            kind = "duplicates" if answer == problem.answer else "conflicting"
            what = "repeats" if answer == problem.answer else "gives another answer to"
            _refuse_or_tell(path, rules.duplicates, "duplicates", told[kind], f"{place} {what} {unit} {before}")
            if rules.duplicates == "skip" or kind == "conflicting":
                continue
        kept.append(problem)
    if not kept:
        raise UserError(
            f"{path} holds no problem in {rows} rows of layout {rules.layout}; look at layout and its fields"
        )
    shown = tuple(text for one in told.values() for text in one.first)
    counts = {name: one.count for name, one in told.items()}
    return tuple(kept), FileReport(str(path), rows, len(kept), first=shown, **counts)


class _Told:
    """How many rows were of one kind, and the first few of them; a file may have millions."""

    def __init__(self) -> None:
        self.count, self.first = 0, []

    def append(self, what: str) -> None:
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(what)


def _refuse_or_tell(path: str | Path, rule: str, setting: str, told: _Told, what: str) -> None:
    if rule == "refuse":
        raise UserError(f"{path} {what}; correct it, or set {setting}=skip")
    told.append(what)


def _rows(path: Path, rules: FileRules) -> Iterator[tuple[int, Any]]:
    match rules.layout:
        case "jsonl" | "gsm8k":
            yield from _json_lines(path)
        case "parquet":
            yield from parquet_rows(path, (rules.question_field, rules.answer_field))
        case "dapo":
            yield from parquet_rows(path, ("prompt", "reward_model"))


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value); blank lines are no rows, a byte order mark is no part of the first.

    Only a line feed ends a line: a text may hold the other separators.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a text ({error}); give a file of JSON lines") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line, parse_int=_whole)
            except (ValueError, RecursionError):
                yield number, _NOT_JSON


def _whole(digits: str) -> int | str:
    """A whole number; of too many digits, the digits."""
    return int(digits) if len(digits) <= _MAX_DIGITS else digits


def _parts(value: Any, rules: FileRules) -> tuple[str, str]:
    if value is _NOT_JSON:
        raise _Malformed("is not JSON")
    if not isinstance(value, dict):
        raise _Malformed("is no object")
    match rules.layout:
        case "dapo":
            return _dapo_question(value.get("prompt")), _dapo_answer(value.get("reward_model"))
        case "gsm8k":
            answer = _text(value.get("answer"), "answer")
            number = gold_number(answer) if ANSWER_MARK in answer else None
            if number is None:
                raise _Malformed(f"has an answer that does not end in {ANSWER_MARK} and a number")
            return _text(value.get("question"), "question"), f"{number:f}"
        case _:
            question = _text(value.get(rules.question_field), rules.question_field)
            return question, _answer(value.get(rules.answer_field), rules.answer_field)


def _dapo_question(messages: Any) -> str:
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], dict):
        raise _Malformed("has a prompt that is not one message")
    if messages[0].get("role") != "user":
        raise _Malformed(f"has a prompt by {messages[0].get('role')!r}, not by user")
    return _text(messages[0].get("content"), "content of prompt")


def _dapo_answer(reward_model: Any) -> str:
    if not isinstance(reward_model, dict | None):
        raise _Malformed(f"has a reward_model that is a {type(reward_model).__name__}, not columns of its own")
    return _answer((reward_model or {}).get("ground_truth"))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Malformed(f"has no text {name}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Malformed(f"has half a surrogate pair in {name}, which is no text") from error
    return value


def _answer(value: Any, name: str = "ground_truth of reward_model") -> str:
    """A text, or a whole number (AIME's answers in some files); the digits of a float are not those of its text."""
    if type(value) is int:
        return str(value)
    if not isinstance(value, str | None):
        raise _Malformed(f"has the {type(value).__name__} {str(value)[:40]} as {name}, not a text or a whole number")
    return _text(value, name).strip()
