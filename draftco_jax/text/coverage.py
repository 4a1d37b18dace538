"""Which characters a vocabulary has no id for, for models that drop them without a word.

Byte-pair encoding without an unknown token leaves a character away if it has no id. A byte-level vocabulary has an id
for each of the 256 bytes and so for every text; one that was trained on few texts without them has gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import models, pre_tokenizers


@dataclass(frozen=True)
class Coverage:
    """What has to be looked at in an encoded text."""

    drops: bool
    """The model leaves unknown characters away."""
    missing_bytes: frozenset[int]
    """Of a byte-level vocabulary: bytes without an id."""
    backend: tokenizers.Tokenizer
    added: frozenset[int]

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Coverage:
        """Coverage of a tokenizer."""
        model = backend.model
        drops = isinstance(model, models.BPE) and model.unk_token is None and not model.byte_fallback
        missing = frozenset[int]()
        byte_level = "ByteLevel(" in repr(backend.pre_tokenizer) or "ByteLevel(" in repr(backend.normalizer)
        if drops and byte_level:
            missing = frozenset(b for b, char in enumerate(byte_characters()) if backend.token_to_id(char) is None)
            drops = False
        return cls(drops, missing, backend, frozenset(backend.get_added_tokens_decoder()))

    def lost(self, text: str, encoding: tokenizers.Encoding) -> str:
        """Characters of the text that no id of the encoding stands for. White space may be left away by design."""
        if self.missing_bytes:
            seen = self._without_added_tokens(text, encoding)
            if self.backend.normalizer is not None:
                seen = self.backend.normalizer.normalize_str(seen)
            return "".join({char for char in seen if not self.missing_bytes.isdisjoint(char.encode())})
        if not self.drops:
            return ""
        covered = bytearray(len(text))
        for start, end in encoding.offsets:
            covered[start:end] = b"\1" * (end - start)
        lost = {char for char, known in zip(text, covered, strict=True) if not known and not char.isspace()}
        # The library counts offsets on over what it dropped, so they tell that something is missing but not what.
        named = {char for char in text if self.backend.token_to_id(char) is None}
        return "".join(named or lost) if lost else ""

    def _without_added_tokens(self, text: str, encoding: tokenizers.Encoding) -> str:
        parts, at = [], 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.added and end > start:
                parts.append(text[at:start])
                at = end
        return "".join(parts) + text[at:]


def byte_characters() -> list[str]:
    """The character that stands for each byte 0..255 in a byte-level vocabulary (the table of GPT-2).

    Printable characters of Latin-1 stand for themselves, the 68 others for U+0100 and on, in order.
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    table = [chr(b) if b in themselves else chr(next(others)) for b in range(256)]
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table
