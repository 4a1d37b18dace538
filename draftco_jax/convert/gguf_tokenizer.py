"""A tokenizer out of a GGUF file: byte-level byte-pair encoding, written as Hugging Face files.

The file holds tokens, their kinds, merges and ids of the special ones; how a text is cut before the merges it says by a
name alone, of which those are known here whose pattern is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from draftco_jax.convert.gguf_file import GgufFile
from draftco_jax.errors import UserError
from draftco_jax.metrics import write_text_whole
from draftco_jax.models.hf_weights import read_config
from draftco_jax.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Kinds of tokens (`llama_token_type`)."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
"""Names under which each digit stands alone and GPT-2's pattern cuts the rest."""
_GPT2 = ("gpt-2",)
_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def write_gguf_tokenizer(file: GgufFile, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json with the chat template, generation_config.json, and the ids in config.json.

    Raises:
        UserError: another kind of tokenizer, another way of cutting texts, or tables that do not fit together.
    """
    tokens = _table(file, "tokens")
    special = {name: tokens[i] for name, key in _IDS.items() if (i := _id(file, key, len(tokens))) is not None}
    if "eos" not in special:
        raise UserError(f"{file.path}: tokenizer.ggml.eos_token_id is missing; get a file that names it")
    backend = _backend(file, tokens, special.get("bos"))
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if "unk" in special:
        settings["unk_token"] = special["unk"]
    template = file.settings.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    length = file.settings.get("llama.context_length")
    if isinstance(length, int):
        settings["model_max_length"] = length
    Tokenizer(
        backend, eos_token=special["eos"], pad_token=special.get("pad"), bos_token=special.get("bos"), settings=settings
    ).save(folder)
    _write_ids(file, folder, len(tokens))


def _backend(file: GgufFile, tokens: Sequence[str], bos: str | None) -> tokenizers.Tokenizer:
    model = file.settings.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UserError(
            f"{file.path}: tokenizer.ggml.model={model!r} must be 'gpt2', byte-level byte-pair encoding; give the "
            "model's Hugging Face folder instead"
        )
    kinds = file.settings.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise UserError(
            f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens; get it again"
        )
    # An unused token is a row of the model without a text; it must not be found in one.
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    if len(vocabulary) != sum(kind != _UNUSED for kind in kinds):
        raise UserError(f"{file.path}: tokenizer.ggml.tokens holds a token twice; get it again")
    merges = [_pair(file, merge) for merge in _table(file, "merges")]
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises bare Exception for a merge of what it does not know
        raise UserError(f"{file.path}: merges do not fit the tokens ({error}); get it again") from error
    backend.pre_tokenizer = _cuts(file)
    backend.decoder = decoders.ByteLevel()
    if file.settings.get("tokenizer.ggml.add_bos_token") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    for kind, is_control in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, of_token in zip(tokens, kinds, strict=True) if of_token == kind]
        added = [tokenizers.AddedToken(token, special=is_control, normalized=False) for token in chosen]
        (backend.add_special_tokens if is_control else backend.add_tokens)(added)
    return backend


def _cuts(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    """How a text is cut into the pieces that merges stay within."""
    name = file.settings.get("tokenizer.ggml.pre")  # missing or "default" names no cut: never guessed
    prefix = bool(file.settings.get("tokenizer.ggml.add_space_prefix", False))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    if name in _GPT2:
        return bytes_
    raise UserError(
        f"{file.path}: tokenizer.ggml.pre={name!r} must be one of {', '.join((*_SINGLE_DIGITS, *_GPT2))}; "
        "convert the model's original Hugging Face folder instead"
    )


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise UserError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, which is no pair; get it again")
    return left, right


def _table(file: GgufFile, name: str) -> list[str]:
    value = file.settings.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UserError(f"{file.path}: tokenizer.ggml.{name} must be a list of texts; get a file with its tokenizer")
    return value


def _id(file: GgufFile, name: str, count: int) -> int | None:
    value = file.settings.get(f"tokenizer.ggml.{name}")
    if value is not None and not (isinstance(value, int) and 0 <= value < count):
        raise UserError(f"{file.path}: tokenizer.ggml.{name}={value!r} must be in 0..{count - 1}; get it again")
    return value


def _write_ids(file: GgufFile, folder: Path, count: int) -> None:
    """Where servers and transformers look for them; all ids that end a response."""
    ends = [_id(file, name, count) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    stops = list(dict.fromkeys(i for i in ends if i is not None))
    ids = {"eos_token_id": stops[0] if len(stops) == 1 else stops}
    ids |= {f"{name}_token_id": i for name in ("bos", "pad") if (i := _id(file, _IDS[name], count)) is not None}
    write_text_whole(folder / "generation_config.json", json.dumps(ids, indent=2, sort_keys=True) + "\n")
    settings = read_config(folder / "config.json") | ids
    write_text_whole(folder / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
