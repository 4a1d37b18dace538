"""Where a response ends: at a stop token, or at a string that its text must not go beyond."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from draftco_jax.errors import UserError
from draftco_jax.text.detokenizer import Detokenizer
from draftco_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StringMatch:
    """A stop string in a text."""

    string: str
    start: int
    """Characters of the text before the string."""
    end: int
    """Characters of the text up to the end of the string."""


class StringMatcher:
    """Looks for stop strings in a text that comes in pieces.

    The match is the one whose last character comes first; of several that end there, the longest. Hence it does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if not strings or any(not string for string in strings):
            raise UserError(
                f"stop strings={list(strings)!r} must be one or more texts that are not empty; correct the list"
            )
        self._strings = sorted(set(strings), key=len, reverse=True)
        self._tail = ""
        self._seen = 0

    def push(self, piece: str) -> StringMatch | None:
        """The match that the piece completes, if any. After a match the matcher is used up."""
        text = self._tail + piece
        offset = self._seen - len(self._tail)
        found = [(at + len(string), -len(string), string) for string in self._strings if (at := text.find(string)) >= 0]
        self._seen += len(piece)
        keep = len(self._strings[0]) - 1
        self._tail = text[-keep:] if keep else ""
        if not found:
            return None
        end, _, string = min(found)
        return StringMatch(string, offset + end - len(string), offset + end)

    @property
    def undecided(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string: not to be shown yet."""
        most = min(len(self._tail), len(self._strings[0]) - 1)
        return next((n for n in range(most, 0, -1) if any(s.startswith(self._tail[-n:]) for s in self._strings)), 0)


@dataclass(frozen=True)
class ResponseEnd:
    """Where a response ends, and why."""

    length: int
    """Tokens of the response, the one that ended it included."""
    finished: bool
    """False if nothing ended it: it was cut by a limit."""
    text: str
    """Text of the response without what ended it."""
    stop_id: int | None = None
    stop_string: str | None = None
    splits_token: bool = False
    """The stop string begins or ends within a token: whole tokens make neither `text` nor the string."""


def find_response_end(
    tokenizer: Tokenizer, ids: Sequence[int], stop_ids: Collection[int], stop_strings: Sequence[str] = ()
) -> ResponseEnd:
    """The end of a response in ids that may go on behind it.

    A stop string may span tokens, start or end within one, and hold characters of several bytes. The token that
    completes it is the last one of the response, since the policy wrote it whole. Special tokens are part of the text;
    ids beyond the tokenizer's, which a policy with more rows may write, are U+FFFD in it.
    """
    stops = set(stop_ids)
    detokenizer = Detokenizer(tokenizer, foreign=True)
    matcher = StringMatcher(stop_strings) if stop_strings else None
    text = ""
    starts: set[int] = {0}
    whole = 0  # tokens up to the last one after which nothing was held back
    for index in range(len(ids) + 1):
        ends = index == len(ids) or ids[index] in stops
        piece = detokenizer.finish() if ends else detokenizer.push(ids[index])
        text += piece
        match = matcher.push(piece) if matcher is not None else None
        if match is not None:
            read = [int(token_id) for token_id in ids[: index if ends else index + 1]]
            length, said = _completing(tokenizer, read, whole, text[: match.end]) or (len(read), text)
            splits = match.start not in starts or len(said) > match.end or detokenizer.holds_back
            return ResponseEnd(length, True, text[: match.start], stop_string=match.string, splits_token=splits)
        if ends:
            break
        if not detokenizer.holds_back:
            starts.add(len(text))
            whole = index + 1
    if index == len(ids):
        return ResponseEnd(index, False, text)
    return ResponseEnd(index + 1, True, text, stop_id=ids[index])


def _completing(tokenizer: Tokenizer, ids: list[int], whole: int, text: str) -> tuple[int, str] | None:
    """(tokens, their text) where `text` is first complete, if that is before the last of `ids`.

    Bytes that were held back may have made it some tokens before they were given out.
    """
    texts = ((n, tokenizer.decode(ids[:n], skip_special=False, foreign=True)) for n in range(whole + 1, len(ids)))
    return next((found for found in texts if found[1].startswith(text)), None)
