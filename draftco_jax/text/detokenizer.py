"""Text of ids that come one by one: a character is given out when its last byte is there, never half of it.

What is given out, put together, is what `Tokenizer.decode` makes of all the ids at once, letter for letter. U+FFFD
appears only where the ids hold bytes that are no UTF-8 in any continuation.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from draftco_jax.errors import UserError
from draftco_jax.text.coverage import byte_characters
from draftco_jax.text.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NEIGHBOURLY = {"Fuse", "Replace", "ByteFallback", "Strip", "Metaspace"}
"""Decoders that never change what earlier tokens already said, bytes apart."""


class Detokenizer:
    """One text on its way. ``push`` an id, ``finish`` at the end; both return the characters that are new.

    Example, with a byte-level vocabulary: the two ids of "é" give ``""`` and then ``"é"``. With `foreign`, ids beyond
    the vocabulary are U+FFFD, as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False, foreign: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._foreign = foreign
        stages = decoder_stages(tokenizer)
        self._bytes: codecs.IncrementalDecoder | None = None
        if stages == ["ByteLevel"]:
            self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        elif not set(stages) <= _NEIGHBOURLY:
            raise UserError(
                f"decoder={'+'.join(stages)} must be ByteLevel or made of {', '.join(sorted(_NEIGHBOURLY))} for "
                "text to be read token by token; decode the whole sequence instead"
            )
        self._special = {i for i, token in tokenizer.added_tokens.items() if token.special}
        # Ids from `_start` on are decoded together; those before `_given` have been given out.
        self._ids: list[int] = []
        self._start = self._given = 0

    def push(self, token_id: int) -> str:
        """Characters that the id completes; raises `UserError` for an id that `Tokenizer.decode` refuses."""
        if not 0 <= token_id < self._tokenizer.vocab_size:
            self._decode([token_id])  # says so
        if self._skip_special and token_id in self._special:
            return ""
        if self._bytes is not None:
            return self._bytes.decode(byte_level_bytes(self._tokenizer, token_id))
        self._ids.append(token_id)
        # A run of byte tokens is read as a whole: one that is no UTF-8 spoils those before it.
        token = self._tokenizer.backend.id_to_token(token_id)
        return "" if token is not None and BYTE_TOKEN.fullmatch(token) else self._advance()

    @property
    def holds_back(self) -> bool:
        """Some of the ids so far have not been given out whole."""
        return bool(self._bytes.getstate()[0]) if self._bytes is not None else self._given < len(self._ids)

    def finish(self) -> str:
        """What was held back. Half a character becomes U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._advance()

    def _advance(self) -> str:
        old = self._decode(self._ids[self._start : self._given])
        new = self._decode(self._ids[self._start :])
        if not new.startswith(old):
            raise AssertionError(f"the decoder rewrote {old!r} to {new!r}")
        # One token of context is enough for what depends on being first (a leading space).
        self._start, self._given = self._given, len(self._ids)
        return new[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special, foreign=self._foreign)


def byte_level_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What an id adds to a text whose decoder is ByteLevel: bytes, which need not be whole characters."""
    token = tokenizer.backend.id_to_token(token_id)
    if token is None:
        return "\ufffd".encode()
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:  # the text of an added token, as it stands
        return token.encode()


_BYTE_OF = {char: b for b, char in enumerate(byte_characters())}


def decoder_stages(tokenizer: Tokenizer) -> list[str]:
    """Types of the decoder's stages, from the file format, which is the only place that says them."""
    decoder: dict[str, Any] | None = json.loads(tokenizer.backend.to_str())["decoder"]
    if decoder is None:
        return ["none"]
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [stage["type"] for stage in stages]
