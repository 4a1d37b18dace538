"""Tokenizers in the Hugging Face ``tokenizers`` file format: ids of a text, text of ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from draftco_jax.errors import UserError
from draftco_jax.text.coverage import Coverage
from draftco_jax.text.tokenizer_files import SPECIAL_NAMES, read_tokenizer_files, token_text

ARITHMETIC_CHARACTERS = "0123456789+=,>"
ARITHMETIC_VOCAB_SIZE = 32
"""Padded to a power of two, so that the vocabulary divides over any small tensor axis."""

# No name below contains a character of the arithmetic vocabulary: a special token that is written out (see `decode`)
# can never be read as part of an answer.
_PAD, _EOS, _BOS = "[pad]", "[eos]", "[bos]"


@dataclass(frozen=True)
class EncodedText:
    """Ids of a text with, for each, the characters ``start <= i < end`` of the text that it came from."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class Tokenizer:
    """Text to ids and back, refusing whatever has no id or no text.

    Example: ``arithmetic_tokenizer().encode("347+585=") == (2, 6, 7, 10, 13, 8, 11, 8, 14)``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token: str,
        pad_token: str | None = None,
        bos_token: str | None = None,
        settings: Mapping[str, Any] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        # The text "[eos]" written by a user is five characters, never the control token.
        backend.encode_special_tokens = True
        self._backend = backend
        named = {"pad_token": pad_token, "eos_token": eos_token, "bos_token": bos_token}
        self._special_tokens = {name: token for name, token in named.items() if token is not None}
        self._settings = dict(settings or {})
        ids = {name: _required_id(backend, name, token) for name, token in self._special_tokens.items()}
        self.eos_id: int = ids["eos_token"]
        self.pad_id: int = ids.get("pad_token", self.eos_id)
        """Fills cells that hold no token. End-of-sequence where the family names none (Llama): nothing here reads the
        value of such a cell, since lengths are recorded with every sequence."""
        self.bos_id: int | None = ids.get("bos_token")
        """None for families that have no such token (Qwen). The post-processor decides whether `encode` writes it."""
        self.notes = (
            notes if pad_token is not None else (*notes, f"no pad_token is named: {eos_token!r} fills the cells")
        )
        """What the files left open and how it was decided, a line each."""
        unknown_token = getattr(backend.model, "unk_token", None)
        self._unknown_id = None if unknown_token is None else backend.token_to_id(unknown_token)
        self._coverage = Coverage.of(backend)
        vocab = backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocab.values()) + 1
        self._gaps = frozenset(range(self._vocab_size)) - set(vocab.values())

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; ids run from 0 to ``vocab_size - 1``, unused ones and gaps included."""
        return self._vocab_size

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own object; not to be changed."""
        return self._backend

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens that the files name ("eos_token", ...), as text. A missing pad token is not made up here."""
        named = {name: token_text(self._settings.get(name)) for name in SPECIAL_NAMES}
        return {name: token for name, token in named.items() if token is not None} | self._special_tokens

    @functools.cached_property
    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Tokens that are cut out of a text before anything else is done with it."""
        return dict(self._backend.get_added_tokens_decoder())

    def require_fits(self, model_vocab_size: int) -> int:
        """Rows of the model's vocabulary that no id of this tokenizer uses (models pad theirs).

        Raises `UserError` if the model has fewer rows than the tokenizer has ids.
        """
        if self.vocab_size > model_vocab_size:
            raise UserError(
                f"vocab_size={model_vocab_size} of the model must be >= {self.vocab_size}, the ids of the tokenizer; "
                "use the tokenizer that came with the model"
            )
        return model_vocab_size - self.vocab_size + len(self._gaps)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text that starts a sequence: begin-of-sequence first, if the post-processor writes one.

        What the post-processor writes at the end is left away, since the sequence goes on.
        """
        encoding = self._checked(text, add_special_tokens=True)
        ids, written = encoding.ids, encoding.special_tokens_mask
        end = len(ids)
        while end and written[end - 1] and ids[end - 1] != self.bos_id:
            end -= 1
        return tuple(ids[:end])

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Ids of a text in the middle of a sequence: nothing before, nothing after."""
        return tuple(self._checked(text, add_special_tokens=False).ids)

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Ids of a text that continues a sequence up to its end: no begin, end-of-sequence last."""
        return (*self.encode_continuation(text), self.eos_id)

    def encode_marked(self, text: str) -> EncodedText:
        """Ids of a text in which control tokens are written out, as a chat template writes them.

        Nothing is added before or after. Never for a text of a user's alone: "<|im_end|>" ends a turn here.
        """
        encoding = self._encoded(self._marked_backend, text, add_special_tokens=False)
        self._require_known(text, encoding, control_tokens=True)
        return EncodedText(tuple(encoding.ids), tuple((start, end) for start, end in encoding.offsets))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, foreign: bool = False) -> str:
        """Text of the ids.

        ``skip_special=False`` writes special tokens out. A verifier needs that: skipping them would turn ``9 [pad] 32``
        into the answer 932. An id in a gap of the vocabulary is written as U+FFFD for the same reason.
        ``foreign=True`` writes ids beyond the vocabulary so too, which a model with more rows may draw; else they raise
        `UserError`, as negative ones do.
        """
        plain_ids = [int(token_id) for token_id in ids]
        beyond = {token_id for token_id in plain_ids if not 0 <= token_id < self.vocab_size}
        if beyond and not (foreign and min(beyond) >= 0):
            wrong = next(token_id for token_id in plain_ids if token_id in beyond and not (foreign and token_id >= 0))
            raise UserError(
                f"token id={wrong} must be in 0..{self.vocab_size - 1}; decode with the tokenizer that made the ids"
            )
        if not beyond and self._gaps.isdisjoint(plain_ids):
            return self._backend.decode(plain_ids, skip_special_tokens=skip_special)
        parts: list[list[int]] = [[]]
        for token_id in plain_ids:
            parts.append([]) if token_id in self._gaps or token_id in beyond else parts[-1].append(token_id)
        return "\ufffd".join(self._backend.decode(part, skip_special_tokens=skip_special) for part in parts)

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer in Hugging Face layout; makes the directory if need be.

        Settings of the folder it was loaded from are kept, the chat template among them.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._settings, **self._special_tokens}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Reads a model folder in Hugging Face layout; `draftco_jax.text.tokenizer_files` says which file says what."""
        folder = Path(directory)
        files = read_tokenizer_files(folder)
        special = files.special_tokens
        if "eos_token" not in special:
            raise UserError(f"tokenizer={folder} must name eos_token; add it to its tokenizer_config.json")
        return cls(
            files.backend,
            eos_token=special["eos_token"],
            pad_token=special.get("pad_token"),
            bos_token=special.get("bos_token"),
            settings={**files.settings, **special},
            notes=files.notes,
        )

    @functools.cached_property
    def _marked_backend(self) -> tokenizers.Tokenizer:
        # A second copy, since one object would have to be switched to and fro, which another thread could see.
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = False
        return copy

    def _checked(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        encoding = self._encoded(self._backend, text, add_special_tokens=add_special_tokens)
        self._require_known(text, encoding, control_tokens=False)
        return encoding

    def _encoded(self, backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # a model without an unknown token raises bare Exception
            raise self._unknown_characters(text) from error

    def _require_known(self, text: str, encoding: tokenizers.Encoding, *, control_tokens: bool) -> None:
        """No character of the text may have become the unknown token, or nothing at all."""
        unknown = [
            offsets
            for token_id, offsets, written in zip(
                encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True
            )
            if token_id == self._unknown_id and not written
        ]
        name = getattr(self._backend.model, "unk_token", None)
        if any(not control_tokens or text[start:end] != name for start, end in unknown):
            raise self._unknown_characters(text)
        lost = self._coverage.lost(text, encoding)
        if lost:
            raise _not_in_vocabulary(text, lost)

    def _unknown_characters(self, text: str) -> UserError:
        return _not_in_vocabulary(text, "".join({char for char in text if self._backend.token_to_id(char) is None}))


def arithmetic_tokenizer() -> Tokenizer:
    """One id per character: pad 0, eos 1, bos 2, then `ARITHMETIC_CHARACTERS` from 3, then ids without use."""
    special = [_PAD, _EOS, _BOS]
    tokens = special + list(ARITHMETIC_CHARACTERS)
    unused = [f"[unused {chr(ord('a') + i)}]" for i in range(ARITHMETIC_VOCAB_SIZE - len(tokens))]
    vocab = {token: token_id for token_id, token in enumerate(tokens + unused)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single=f"{_BOS} $A", special_tokens=[(_BOS, vocab[_BOS])])
    control = [tokenizers.AddedToken(token, special=True, normalized=False) for token in special + unused]
    backend.add_special_tokens(control)
    return Tokenizer(backend, pad_token=_PAD, eos_token=_EOS, bos_token=_BOS)


def _not_in_vocabulary(text: str, missing: str) -> UserError:
    return UserError(
        f"text={text!r} must be made of characters in the vocabulary, {''.join(sorted(missing))!r} is not; "
        "use a tokenizer that covers the task's text"
    )


def _required_id(backend: tokenizers.Tokenizer, name: str, token: str) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise UserError(f"{name}={token!r} must be in the vocabulary; correct it in tokenizer_config.json")
    return token_id
