"""Which ids end a response, from every file of a model folder that says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftco_jax.errors import UserError
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.text.tokenizer_files import read_json


@dataclass(frozen=True)
class StopTokens:
    """The ids that end a response: any of them, whichever the policy writes first."""

    ids: tuple[int, ...]
    """Without repetition, in the order of the sources below."""
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    """(name of the source, its ids), in order of precedence; only sources that name any."""
    notes: tuple[str, ...]
    """Where the sources disagree, a line each."""


def find_stop_tokens(folder: str | Path, tokenizer: Tokenizer, turn_end: int | None = None) -> StopTokens:
    """Stop tokens of a model folder: the union of what its files name.

    Order of precedence, which is the order of `StopTokens.ids`: ``generation_config.json``, ``config.json`` (or its
    ``text_config``), the tokenizer's ``eos_token``, and `turn_end`, the token that the chat template writes after an
    assistant's message (`ChatFormat.turn_end_id`). None of them overrules another: a chat model whose config stops at
    "<|endoftext|>" and whose turns end with "<|im_end|>" stops at both.

    Raises `UserError` for an id that is not an id of the tokenizer.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    eos = config.get("eos_token_id")
    if eos is None and isinstance(text_config, dict):
        eos = text_config.get("eos_token_id")
    named: list[tuple[str, Any]] = [
        ("generation_config.json", read_json(folder / "generation_config.json").get("eos_token_id")),
        ("config.json", eos),
        ("eos_token of the tokenizer", tokenizer.eos_id),
        ("turn end of the chat template", turn_end),
    ]
    sources = tuple((name, _ids(name, value, tokenizer, folder)) for name, value in named if value not in (None, []))
    union = tuple(dict.fromkeys(token_id for _, ids in sources for token_id in ids))
    notes = []
    for token_id in union:
        silent = [name for name, ids in sources if token_id not in ids]
        if silent:
            says = [name for name, ids in sources if token_id in ids]
            text = tokenizer.decode([token_id], skip_special=False)
            notes.append(f"{text!r} ({token_id}) stops by {', '.join(says)}, not by {', '.join(silent)}")
    return StopTokens(union, sources, tuple(notes))


def _ids(name: str, value: Any, tokenizer: Tokenizer, folder: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < tokenizer.vocab_size:
            raise UserError(
                f"eos_token_id={value!r} of {name} must be ids in 0..{tokenizer.vocab_size - 1}; correct it in {folder}"
            )
    return tuple(dict.fromkeys(ids))
