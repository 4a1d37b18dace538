"""Tokenizers in the Hugging Face ``tokenizers`` file format.

A tokenizer directory holds ``tokenizer.json`` (the library's own format) and ``tokenizer_config.json``, from which only
the names of the special tokens are read, so that a directory from elsewhere loads as well as one saved here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from draftco_jax.errors import UserError

ARITHMETIC_CHARACTERS = "0123456789+=,>"
ARITHMETIC_VOCAB_SIZE = 32
"""Padded to a power of two, so that the vocabulary divides over any small tensor axis."""

# No name below contains a character of the arithmetic vocabulary: a special token that is written out (see `decode`)
# can never be read as part of an answer.
_PAD, _EOS, _BOS = "[pad]", "[eos]", "[bos]"


class Tokenizer:
    """Text to ids and back, refusing whatever has no id or no text.

    Example: ``arithmetic_tokenizer().encode("347+585=") == (2, 6, 7, 10, 13, 8, 11, 8, 14)``.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, pad_token: str, eos_token: str, bos_token: str | None) -> None:
        # The text "[eos]" written by a user is five characters, never the control token.
        backend.encode_special_tokens = True
        self._backend = backend
        self._special_tokens = {"pad_token": pad_token, "eos_token": eos_token}
        if bos_token is not None:
            self._special_tokens["bos_token"] = bos_token
        ids = {name: _required_id(backend, name, token) for name, token in self._special_tokens.items()}
        self.pad_id: int = ids["pad_token"]
        self.eos_id: int = ids["eos_token"]
        self.bos_id: int | None = ids.get("bos_token")
        """None for families that start a text with no token of its own (Qwen)."""
        unknown_token = getattr(backend.model, "unk_token", None)
        self._unknown_id = None if unknown_token is None else backend.token_to_id(unknown_token)

    @property
    def vocab_size(self) -> int:
        """Number of ids, unused ones included; ids run from 0 to ``vocab_size - 1``."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text that starts a sequence: begin-of-sequence first, if the family has one."""
        start = () if self.bos_id is None else (self.bos_id,)
        return start + self._encode_bare(text)

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Ids of a text that continues a sequence up to its end: no begin, end-of-sequence last."""
        return (*self._encode_bare(text), self.eos_id)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids.

        ``skip_special=False`` writes special tokens out. A verifier needs that: skipping them would turn ``9 [pad] 32``
        into the answer 932.
        """
        plain_ids = [int(token_id) for token_id in ids]
        if plain_ids and not (0 <= min(plain_ids) and max(plain_ids) < self.vocab_size):
            wrong = next(token_id for token_id in plain_ids if not 0 <= token_id < self.vocab_size)
            raise UserError(
                f"token id={wrong} must be in 0..{self.vocab_size - 1}; decode with the tokenizer that made the ids"
            )
        return self._backend.decode(plain_ids, skip_special_tokens=skip_special)

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer in Hugging Face layout; makes the directory if need be."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Reads a directory in Hugging Face layout."""
        folder = Path(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise UserError(f"tokenizer={folder} must be a folder with {name}; give a Hugging Face model folder")
        try:
            settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise UserError(f"tokenizer={folder} must be readable ({error}); copy the folder again") from error
        special = {name: _token_text(settings.get(name)) for name in ("pad_token", "eos_token", "bos_token")}
        eos_token, pad_token = special["eos_token"], special["pad_token"]
        if eos_token is None or pad_token is None:
            raise UserError(
                f"tokenizer={folder} must name eos_token and pad_token; add them to its tokenizer_config.json"
            )
        return cls(backend, pad_token=pad_token, eos_token=eos_token, bos_token=special["bos_token"])

    def _encode_bare(self, text: str) -> tuple[int, ...]:
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a model without an unknown token raises bare Exception
            raise self._unknown_characters(text) from error
        if self._unknown_id is not None and self._unknown_id in ids:
            raise self._unknown_characters(text)
        return tuple(ids)

    def _unknown_characters(self, text: str) -> UserError:
        missing = "".join(sorted({char for char in text if self._backend.token_to_id(char) is None}))
        return UserError(
            f"text={text!r} must be made of characters in the vocabulary, {missing!r} is not; "
            "use a tokenizer that covers the task's text"
        )


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


def _token_text(entry: str | dict[str, object] | None) -> str | None:
    """Hugging Face writes a special token as its text or as a table that holds its text."""
    if isinstance(entry, dict):
        content = entry.get("content")
        return content if isinstance(content, str) else None
    return entry


def _required_id(backend: tokenizers.Tokenizer, name: str, token: str) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise UserError(f"{name}={token!r} must be in the vocabulary; correct it in tokenizer_config.json")
    return token_id
