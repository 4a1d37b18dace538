"""Prompts of a file: a text a line, or a JSON object a line.

| line | read as |
|---|---|
| text (`format=text`) | the text; `\\n` in it is two characters, so a prompt of several lines needs JSON |
| `{"prompt": "..."}` | the text |
| `{"messages": [{"role": ..., "content": ...}, ...]}` | a conversation, by the chat template of the policy's folder |
| `{"tokens": [2, 6, ...]}` | ids, taken as they are |

An object may also say how its own responses are made (`generate.line_options`). Other keys are not looked at and come
out with the response, so an object must be one that JSON in UTF-8 can hold. A line ends at a line feed, with or without
a carriage return before it, and nowhere else. Lines of white space are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftco_jax.errors import UserError
from draftco_jax.generate.line_options import LineOptions, read_line_options
from draftco_jax.text.chat import Chat
from draftco_jax.text.tokenizer import Tokenizer

Format = Literal["text", "jsonl"]
_KINDS = ("prompt", "messages", "tokens")
_MOST_LEVELS = 64
"""Of lists and objects in one another. Well below what reading, templates and writing can go down to."""


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line of a file of prompts."""

    place: str
    """Where it stands, for messages: "FILE line 3"."""
    ids: tuple[int, ...]
    """What the policy reads."""
    given: dict[str, Any] = field(default_factory=dict[str, Any])
    """The object of the line; of a text `{"prompt": text}`."""
    options: LineOptions = LineOptions()
    turn_ends: tuple[int, ...] = ()
    """Of a conversation: ids that end a response to it, by the chat template and the files of the folder."""


def read_prompts(lines: Iterable[str], name: str, form: Format, folder: Path, tokenizer: Tokenizer) -> list[PromptLine]:
    """Every prompt of a file; `name` is what messages call it, `folder` the policy's (for its chat template).

    Raises:
        UserError: a line is not what `form` says, holds ids or characters that the tokenizer does not have, or nothing
            is left after the empty ones.
    """
    encode = _Encoder(folder, tokenizer)
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{name} line {number}"
            text = line.removesuffix("\n").removesuffix("\r")
            given = {"prompt": text} if form == "text" else _object(text, place)
            options, ids = _options(given, place), encode(given, place)
            ends = encode.turn_ends if "messages" in given else ()
            found.append(PromptLine(place=place, ids=ids, given=given, options=options, turn_ends=ends))
    if not found:
        raise UserError(f"{name} holds no prompt; give one a line")
    return found


class _Encoder:
    """Objects to ids; the chat template is read when the first conversation comes."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._chat: Chat | None = None

    def __call__(self, given: dict[str, Any], place: str) -> tuple[int, ...]:
        kinds = [kind for kind in _KINDS if kind in given]
        if len(kinds) != 1:
            raise UserError(f"{place} must hold one of {', '.join(_KINDS)}, but has {kinds or 'none'}; give one")
        try:
            ids = {"prompt": self._text, "messages": self._conversation, "tokens": self._ids}[kinds[0]](given[kinds[0]])
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        if not ids:
            raise UserError(f"{place}: {kinds[0]} makes no tokens; a prompt has one at least")
        return ids

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn; none before the first conversation."""
        return () if self._chat is None else self._chat.stops.ids

    def _text(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, str):
            raise UserError(f"prompt={value!r} must be a text; put it in quotes")
        return self._tokenizer.encode(value)

    def _conversation(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise UserError(f"messages={value!r} must be a list of objects with role and content")
        if self._chat is None:
            self._chat = Chat.load(self._folder)
        return tuple(self._chat.encode(value, add_generation_prompt=True).ids)

    def _ids(self, value: Any) -> tuple[int, ...]:
        top = self._tokenizer.vocab_size
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < top for i in value):
            raise UserError(f"tokens={value!r} must be a list of ids in 0..{top - 1}; use the policy's own tokenizer")
        return tuple(value)


def _options(given: dict[str, Any], place: str) -> LineOptions:
    try:
        return read_line_options(given)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _object(line: str, place: str) -> dict[str, Any]:
    deep = f"{place} must have at most {_MOST_LEVELS} lists and objects in one another; flatten it"
    try:
        value = json.loads(line, parse_constant=_no_number)
    except RecursionError as error:
        raise UserError(deep) from error
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}); use --format text for a text a line") from error
    if not isinstance(value, dict):
        raise UserError(f'{place} must be an object such as {{"prompt": "..."}}; correct it')
    if _levels(value) > _MOST_LEVELS:
        raise UserError(deep)
    _require_writable(value, place)
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _levels(value: Any) -> int:
    levels, level = 0, [value]
    while level := [each for each in level if isinstance(each, (dict, list))]:
        levels += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return levels


def _require_writable(value: dict[str, Any], place: str) -> None:
    """Refuse now what could not be written with the responses."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise UserError(
            f"{place} holds {half!r}, half of a surrogate pair, which is no character; correct it"
        ) from error
    except ValueError as error:  # a number such as 1e999 is read as infinite
        raise UserError(f"{place} holds a number beyond all finite ones; write it as a text, or lower it") from error
