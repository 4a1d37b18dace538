"""The tokenizer files of a Hugging Face model folder, read into one record.

Which file says what (the reading of transformers 5, `PreTrainedTokenizerFast`; held to it by
``tests/unit/text/test_against_transformers.py``):

- ``tokenizer.json`` holds the vocabulary, the merges and the post-processor. The post-processor alone says whether a
  text starts with a begin-of-sequence token; ``add_bos_token`` beside it is not obeyed, and a note says so where they
  differ.
- ``tokenizer_config.json`` names the special tokens, as their text or as a table, and lists added tokens by id.
- ``special_tokens_map.json`` and ``added_tokens.json`` are read where that list is missing, and then come before the
  config's names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from draftco_jax.errors import UserError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a folder says about its tokenizer."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Name ("eos_token", ...) to text."""
    settings: dict[str, Any]
    """``tokenizer_config.json`` as it stands; empty where there is none."""
    notes: tuple[str, ...]
    """What was found odd and how it was decided, a line each."""


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads a folder. Raises `UserError` for a missing or broken file, or tokens that do not fit the vocabulary."""
    _require_files(folder)
    settings = read_json(folder / "tokenizer_config.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise _unreadable(folder / "tokenizer.json", error) from error
    # A text is never cut or filled behind the caller's back, whatever the file was last saved with.
    backend.no_truncation()
    backend.no_padding()

    listed = settings.get("added_tokens_decoder")
    named = dict(settings)
    if listed is None:
        named |= read_json(folder / "special_tokens_map.json")
    special = {name: text for name in SPECIAL_NAMES if (text := token_text(named.get(name))) is not None}
    _add_listed(folder, backend, listed if listed is not None else _legacy_list(folder, backend, special))
    missing = [(name, token) for name, token in special.items() if backend.token_to_id(token) is None]
    if missing:
        name, token = missing[0]
        raise UserError(f"{name}={token!r} must be in the vocabulary; correct it in {folder / 'tokenizer_config.json'}")
    extra = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
    _mark_special(folder, backend, special, list(extra.values() if isinstance(extra, dict) else extra))
    return TokenizerFiles(backend, special, settings, tuple(_bos_notes(backend, special, settings)))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises `UserError` if it is not an object."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(value, dict):
        raise UserError(f"tokenizer={file} must hold a JSON object, not a {type(value).__name__}; copy the file again")
    return value


def token_text(entry: object) -> str | None:
    """Text of a special token, which is written as its text or as a table that holds it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _require_files(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        other = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        found = f" (found {other[0]}: load it in transformers and save it from there)" if other else ""
        raise UserError(
            f"tokenizer={folder} must be a folder with tokenizer.json{found}; give a Hugging Face model folder"
        )
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", "special_tokens_map.json")):
        raise UserError(
            f"tokenizer={folder} must be a folder with tokenizer_config.json, which names the special tokens; "
            "give a Hugging Face model folder"
        )


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(f"tokenizer={file} must be readable ({error}); copy the file again")


def _legacy_list(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]) -> dict[str, Any]:
    """``added_tokens.json`` (text to id) in the form of the config's list; only what tokenizer.json lacks."""
    texts = read_json(folder / "added_tokens.json")
    return {
        str(token_id): {
            "content": text,
            "special": text in special.values(),
            "normalized": text not in special.values(),
        }
        for text, token_id in texts.items()
        if backend.token_to_id(text) is None
    }


def _add_listed(folder: Path, backend: tokenizers.Tokenizer, listed: dict[str, Any]) -> None:
    """Adds tokens that the config lists by id, in the order of the ids; the vocabulary must give them those ids."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    for token_id, entry in sorted(((int(key), value) for key, value in listed.items()), key=lambda item: item[0]):
        content = token_text(entry)
        if content is None:
            raise UserError(
                f"added_tokens_decoder[{token_id}]={entry!r} must be a table with the token's content; "
                f"correct it in {folder / 'tokenizer_config.json'}"
            )
        flags = {name: bool(entry[name]) for name in _FLAGS if isinstance(entry, dict) and name in entry}
        token = tokenizers.AddedToken(content, **flags)
        if repr(token) not in known:
            backend.add_tokens([token])
        found = backend.token_to_id(content)
        if found != token_id:
            raise UserError(
                f"added token {content!r} must have id {token_id} (tokenizer_config.json), not {found} "
                f"(tokenizer.json); the files of {folder} do not belong together: copy the folder again"
            )


def _mark_special(folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str], extra: list[Any]) -> None:
    """Makes the named tokens control tokens, as every reader of these files does. None of them may be new."""
    texts = list(special.values())
    for entry in extra:
        text = token_text(entry)
        if text is None or backend.token_to_id(text) is None:
            raise UserError(
                f"additional_special_tokens={entry!r} must be in the vocabulary; a token without an id has no row "
                f"in the model: take it out of {folder / 'tokenizer_config.json'} or add it to tokenizer.json"
            )
        texts.append(text)
    already = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [tokenizers.AddedToken(text, special=True, normalized=False) for text in texts if text not in already]
    backend.add_special_tokens(new)


def _bos_notes(backend: tokenizers.Tokenizer, special: dict[str, str], settings: dict[str, Any]) -> list[str]:
    asked = settings.get("add_bos_token")
    bos = special.get("bos_token")
    if asked is None or bos is None:
        return []
    added = backend.token_to_id(bos) in backend.encode("", add_special_tokens=True).ids
    if added == bool(asked):
        return []
    does = "starts" if added else "does not start"
    return [f"add_bos_token={asked} is not obeyed: the post-processor of tokenizer.json {does} a text with {bos!r}"]
