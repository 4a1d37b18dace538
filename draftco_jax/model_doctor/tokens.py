"""Tokenizer, stop tokens and chat template of a model folder, and where they contradict each other or the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from draftco_jax.errors import UserError

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(kw_only=True)
class Tokens:
    """What was found; `problems` keep the folder from being used, `warnings` do not."""

    tokenizer: str | None = None
    ids: int | None = None
    """Entries of the vocabulary, added tokens included."""
    largest_id: int | None = None
    stop_ids: dict[str, list[int]] = field(default_factory=dict)
    """By the file that names them."""
    chat_template: list[str] = field(default_factory=list)
    """Files that hold one."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def describe_tokens(folder: Path, config: Mapping[str, Any], vocab_size: int | None) -> Tokens:
    """All about tokens that the files of a folder say.

    Args:
        folder: a model folder.
        config: its config.json.
        vocab_size: rows of the model's embedding; None where that is not known.
    """
    found = Tokens()
    settings = _settings(folder / SETTINGS_FILE, found)
    backend = _tokenizer(folder, found)
    _stop_tokens(folder, config, settings, backend, found)
    _chat_template(folder, settings, found)
    if vocab_size is not None:
        _check_ids(folder, vocab_size, found)
    return found


def _settings(path: Path, found: Tokens) -> dict[str, Any]:
    """A JSON object; empty where the file is absent, or cannot be read, which is a problem."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        found.problems.append(f"{path} cannot be read ({error}); get it again")
        return {}
    if not isinstance(values, dict):
        found.problems.append(f"{path} holds a {type(values).__name__} but must hold an object of settings")
        return {}
    return values


def _tokenizer(folder: Path, found: Tokens) -> tokenizers.Tokenizer | None:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
        told = f", only {', '.join(others)}, which is not read here" if others else ""
        found.warnings.append(f"no {TOKENIZER_FILE}{told}: texts need the tokenizer of this model")
        return None
    try:
        backend = _open(path)
    except UserError as error:
        found.problems.append(str(error))
        return None
    ids = backend.get_vocab(with_added_tokens=True).values()
    found.tokenizer, found.ids, found.largest_id = TOKENIZER_FILE, len(ids), max(ids, default=None)
    return backend


def _open(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())}); get it again") from error


def _stop_tokens(
    folder: Path,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    backend: tokenizers.Tokenizer | None,
    found: Tokens,
) -> None:
    """Ids at which each file says that a text ends."""
    inner = config.get("text_config")
    stated = {
        "config.json": config.get("eos_token_id"),
        "config.json text_config": inner.get("eos_token_id") if isinstance(inner, dict) else None,
        GENERATION_FILE: _settings(folder / GENERATION_FILE, found).get("eos_token_id"),
    }
    for name, value in stated.items():
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(one) is int for one in ids):
            found.problems.append(f"{name}: eos_token_id={json.dumps(value)} must be an id or a list of ids")
        elif value is not None:
            found.stop_ids[name] = sorted(set(ids))
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and backend is not None:
        own = backend.token_to_id(text)
        if own is None:
            found.problems.append(f"{SETTINGS_FILE}: eos_token={text!r} is not in {TOKENIZER_FILE}")
        else:
            found.stop_ids[SETTINGS_FILE] = [own]
    if len({tuple(ids) for ids in found.stop_ids.values()}) > 1:
        said = ", ".join(f"{ids} in {name}" for name, ids in found.stop_ids.items())
        found.warnings.append(
            f"stop tokens differ: {said}; readers differ in which of them they obey, and where it is not the one that "
            "the model ends with, answers run on"
        )


def _chat_template(folder: Path, settings: Mapping[str, Any], found: Tokens) -> None:
    texts = {SETTINGS_FILE: settings.get("chat_template")} if settings.get("chat_template") else {}
    for name in _TEMPLATE_FILES:
        path = folder / name
        if path.is_file():
            texts[name] = _settings(path, found).get("chat_template") if name.endswith(".json") else path.read_text()
    found.chat_template = list(texts)
    plain = [text.strip() if isinstance(text, str) else text for text in texts.values()]
    if any(text != plain[0] for text in plain):
        found.warnings.append(f"chat templates differ: {' and '.join(texts)}; readers differ in which of them they use")


def _check_ids(folder: Path, vocab_size: int, found: Tokens) -> None:
    """Ids without a row in the embedding."""
    if found.largest_id is not None and found.largest_id >= vocab_size:
        found.problems.append(
            f"{folder / TOKENIZER_FILE} has ids up to {found.largest_id}, but vocab_size={vocab_size}: the model has "
            "no rows for those from there on; take the tokenizer that came with the weights"
        )
    for name, ids in found.stop_ids.items():
        beyond = [one for one in ids if not 0 <= one < vocab_size]
        if beyond and name != SETTINGS_FILE:
            found.warnings.append(f"{name}: stop tokens {beyond} are outside vocab_size={vocab_size}: never sampled")
