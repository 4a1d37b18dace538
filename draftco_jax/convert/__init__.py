"""Writes a policy, a draft or a finished run in the published layouts, from any spelling that is read here.

    policy folder   -> OUT, as transformers writes it, with tokenizer, chat template and generation settings
    draft folder    -> OUT, in its family's official layout
    run directory   -> OUT/policy and, where a draft was trained, OUT/draft, of one checkpoint
    GGUF file       -> OUT, a policy with its tokenizer, dequantised

Everything is written into a folder beside OUT and renamed when it is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from draftco_jax.config import resolve_checkpoint
from draftco_jax.convert.gguf_file import is_gguf, read_gguf
from draftco_jax.convert.gguf_policy import config_of, params_of
from draftco_jax.convert.gguf_tokenizer import write_gguf_tokenizer
from draftco_jax.convert.output import carry_over, cast_tree, copy_files, whole_or_not_at_all, write_draft, write_policy
from draftco_jax.convert.run import DRAFT_FOLDER, convert_run
from draftco_jax.convert.wishes import DTYPES, Converted, Wishes, parse_size
from draftco_jax.drafts.base import DraftFamily
from draftco_jax.drafts.recognise import draft_family_in, family_with_files
from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import SafetensorsReader, is_float, shown
from draftco_jax.models.hf_weights import load_config, load_policy, read_config
from draftco_jax.models.transformer import DecoderConfig

__all__ = ["Converted", "Wishes", "convert", "parse_size"]

_ASIDE = ("mtp.", "model.visual.")
"""Prefixes of what is no part of a policy."""


def convert(source: str | Path, out: Path, wishes: Wishes | None = None) -> Converted:
    """Read `source` (a folder, a run directory or `shipped:NAME`) and write it to `out`, which must be new or empty.

    Raises:
        UserError: the source is not known or damaged, or `out` is in use; `out` is then as it was before.
    """
    wishes = wishes or Wishes()
    folder, found = resolve_checkpoint(str(source)), Converted()
    write = partial(_gguf, folder) if is_gguf(folder) else _folder_writer(folder, wishes)
    with whole_or_not_at_all(out) as unfinished:
        write(unfinished, wishes, found)
    found.written = {name: out / path.relative_to(unfinished) for name, path in found.written.items()}
    return found


def _folder_writer(folder: Path, wishes: Wishes) -> Callable[[Path, Wishes, Converted], None]:
    if not folder.is_dir():
        raise UserError(f"source={folder} is not a folder; give a policy, a draft, a run directory or a GGUF file")
    raw = read_config(folder / "config.json")
    if raw.get("type") == "RunConfig":
        if wishes.draft_family is not None:
            raise UserError(f"draft_family={wishes.draft_family} is for draft folders; a run knows its draft's family")
        return partial(convert_run, folder, raw)
    if raw.get("type") is not None:
        raise _not_a_model(folder, raw)
    _refuse_step(folder, wishes)
    family = _family(folder, wishes)
    return partial(_policy, folder, raw) if family is None else partial(_draft, folder, raw, family)


def _refuse_step(source: Path, wishes: Wishes) -> None:
    if wishes.step is not None:
        raise UserError(f"step={wishes.step} is for run directories, {source} is a model; leave it out")


def _not_a_model(folder: Path, raw: Mapping[str, Any]) -> UserError:
    trained = folder / DRAFT_FOLDER
    if raw["type"] != "PretrainConfig":
        return UserError(f"source={folder} holds a {raw['type']}; give a policy, a draft or a run directory")
    way = f"give {trained}, where it is" if trained.is_dir() else "finish it with `draftco pretrain-draft --resume`"
    return UserError(f"source={folder} is the training of a draft alone; {way}")


def _family(folder: Path, wishes: Wishes) -> DraftFamily | None:
    """The family of a draft folder; None: the folder is to be read as a policy."""
    if wishes.draft_family is not None:
        return family_with_files(wishes.draft_family)
    seen = draft_family_in(folder)
    if wishes.kind == "policy":
        return None
    if wishes.kind == "draft" and seen is None:
        raise UserError(
            f"source={folder} does not say which draft family it holds; name it with draft_family (eagle3, dflash, "
            "dspark, or mtp for the head that a policy brings along)"
        )
    return seen


def _policy(folder: Path, raw: Mapping[str, Any], out: Path, wishes: Wishes, found: Converted) -> None:
    cfg, reader = load_config(folder), SafetensorsReader(folder)
    _check_tied(cfg, reader)
    dtype = _dtype(reader, wishes, found, {name for name in reader.tensors if not name.startswith(_ASIDE)})
    rows = max((t.shape[0] for name, t in reader.tensors.items() if _is_table(name) and t.shape), default=0)
    _, params = load_policy(folder, dtype=dtype, cut_padding=True)
    if rows > cfg.vocab_size:
        found.notes.append(f"cut {rows - cfg.vocab_size} rows beyond vocab_size={cfg.vocab_size}, which are padding")
    write_policy(out, cfg, params, wishes.max_shard_bytes)
    _tell_left_out(reader, found)
    carry_over(raw, out, str(dtype))
    copy_files(folder, out)
    found.written["policy"] = out


def _is_table(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight"))


def _check_tied(cfg: DecoderConfig, reader: SafetensorsReader) -> None:
    """A head stored beside a tied embedding is a copy of it, or the config is wrong and the head would be lost."""
    if not cfg.tie_word_embeddings or "lm_head.weight" not in reader.tensors:
        return
    table = next((name for name in reader.tensors if _is_table(name) and name != "lm_head.weight"), None)
    if table is None:
        return  # loading names the table as missing
    if not np.array_equal(reader.read("lm_head.weight"), reader.read(table)):
        raise UserError(
            f"{reader.tensors['lm_head.weight'].file}: lm_head.weight is not {table} although tie_word_embeddings is "
            "true; set it to false to keep the head, or take lm_head.weight out"
        )


def _tell_left_out(reader: SafetensorsReader, found: Converted) -> None:
    aside = sorted(name for name in reader.tensors if name.startswith(_ASIDE))
    if aside:
        found.notes.append(f"left out {len(aside)} tensors that are no part of the policy: {shown(aside)}")


def _dtype(reader: SafetensorsReader, wishes: Wishes, found: Converted, names: set[str]) -> np.dtype:
    """As wished, or that of all floats in the source; of several, float32, which holds any of them."""
    if wishes.dtype is not None:
        return DTYPES[wishes.dtype]
    kinds = {str(reader.tensors[name].dtype) for name in names if is_float(reader.tensors[name].dtype)}
    if len(kinds) == 1 and (only := kinds.pop()) in DTYPES:
        return DTYPES[only]
    if kinds:
        found.notes.append(f"the source mixes {', '.join(sorted(kinds))}: written as float32; choose a dtype for less")
    return DTYPES["float32"]


def _gguf(path: Path, out: Path, wishes: Wishes, found: Converted) -> None:
    """Everything is in one file; what it was quantised to is told, since no other weights can come of it."""
    _refuse_step(path, wishes)
    if wishes.kind == "draft" or wishes.draft_family is not None:
        raise UserError(f"source={path} is a GGUF file, which holds a policy; leave kind and draft_family out")
    file = read_gguf(path)
    cfg = config_of(file)
    dtype = DTYPES[wishes.dtype or "float32"]
    write_policy(out, cfg, cast_tree(params_of(file, cfg), dtype), wishes.max_shard_bytes)
    carry_over({}, out, str(dtype))
    write_gguf_tokenizer(file, out)
    kinds = Counter(file.kind(name) for name in file.names)
    found.notes.append("dequantised from " + ", ".join(f"{kinds[kind]} tensors of {kind}" for kind in sorted(kinds)))
    found.written["policy"] = out


def _draft(
    folder: Path, raw: Mapping[str, Any], family: DraftFamily, out: Path, wishes: Wishes, found: Converted
) -> None:
    assert family.load is not None
    cfg, graph, params = family.load(folder, None)
    reader = SafetensorsReader(folder)
    head = {name for name in reader.tensors if name.startswith("mtp.")}
    dtype = _dtype(reader, wishes, found, head or set(reader.tensors))
    write_draft(out, family, cfg, graph, cast_tree(params, dtype), wishes.max_shard_bytes)
    carry_over(raw, out, str(dtype), has_own_config=bool(head))
    if family.name != "mtp":
        copy_files(folder, out)
    found.notes.append(f"family {family.name}")
    found.written["draft"] = out
