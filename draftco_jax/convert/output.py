"""The folders that a conversion writes: whole or not at all, weights in shards, and the files beside them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from draftco_jax.convert.wishes import SHARD_BYTES
from draftco_jax.drafts.base import DraftFamily
from draftco_jax.errors import UserError
from draftco_jax.metrics import write_text_whole
from draftco_jax.models.checkpoint_files import Deferred, SafetensorsReader, all_finite, write_sharded
from draftco_jax.models.functional import ModelGraph, Params
from draftco_jax.models.hf_weights import read_config, save_policy
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.text.tokenizer import Tokenizer

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that go along as they are."""
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "num_target_layers")
"""Settings that no config here has a field for."""


@contextmanager
def whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end, and is gone after a failure."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"out={out} exists and is not empty; choose a new or empty folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".unfinished", dir=out.parent))
    except OSError as error:
        raise UserError(f"out={out} cannot be made ({error.strerror}); choose another folder") from error
    try:
        unfinished.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        yield unfinished
        os.replace(unfinished, out)
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror or error}); nothing is left there") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_policy(out: Path, cfg: DecoderConfig, params: Params, max_shard_bytes: int) -> None:
    """A policy as transformers writes it."""
    save_policy(out, cfg, params, max_shard_bytes=max_shard_bytes)


def write_draft(
    out: Path, family: DraftFamily, cfg: Any, graph: ModelGraph, params: Params, max_shard_bytes: int
) -> None:
    """A draft in its family's official layout."""
    assert family.save is not None
    family.save(out, cfg, graph, params)
    _divide(out, max_shard_bytes)


def cast_tree(params: Params, dtype: np.dtype) -> Params:
    """Floats in another dtype, refused where one does not fit it."""

    def cast(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        values = np.asarray(leaf)
        with np.errstate(over="ignore", under="ignore"):
            changed = values.astype(dtype)
        if not all_finite(changed):
            raise UserError(
                f"{jax.tree_util.keystr(path)} holds a value that {dtype} cannot hold; choose another dtype"
            )
        return changed

    return jax.tree_util.tree_map_with_path(cast, params)


def carry_over(raw: Mapping[str, Any], out: Path, dtype: str, *, has_own_config: bool = False) -> None:
    """Settings that the configs here have no field for, and the dtype as transformers reads it."""
    inner = raw.get("text_config")
    places = ({}, {}) if has_own_config else (inner if isinstance(inner, dict) else {}, raw)
    kept = {name: place[name] for place in places for name in _KEPT if place.get(name) is not None}
    written = read_config(out / "config.json")
    settings = kept | written | {"dtype": dtype, "torch_dtype": dtype}
    write_text_whole(out / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")


def copy_files(folder: Path, out: Path) -> None:
    """Tokenizer, chat template and generation settings, as they are."""
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer that the run was trained with, and its tokens where servers look for them."""
    tokenizer.save(folder)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    ids = {name: number for name, number in ids.items() if number is not None}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2, sort_keys=True) + "\n")
    settings = read_config(folder / "config.json") | ids
    write_text_whole(folder / "config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _divide(folder: Path, max_shard_bytes: int) -> None:
    """Into shards of another size than `save_policy` chooses; tensors go over one at a time."""
    if max_shard_bytes == SHARD_BYTES:
        return
    reader = SafetensorsReader(folder)
    deferred = [
        (name, Deferred(shape=stored.shape, dtype=stored.dtype, make=partial(reader.read, name)))
        for name, stored in sorted(reader.tensors.items())
    ]
    write_sharded(folder, deferred, max_shard_bytes)
