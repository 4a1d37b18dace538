"""What the headers of a folder's weight files say, beside what its config.json asks for. No weight is read.

Loading stops at the first fault; here all of them are found, each tensor by its name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    SafetensorsReader,
    Stored,
    is_float,
    read_header,
    shown,
)
from draftco_jax.models.checkpoint_trees import Source
from draftco_jax.models.families import PolicyFamily, family_of, prefix_of, published, source
from draftco_jax.models.hf_weights import abstract_policy, read_config
from draftco_jax.models.transformer import DecoderConfig

_PACKED = ("_blocks", "_scales")  # MXFP4: integers that are computed to floats


@dataclass(frozen=True, kw_only=True)
class Headers:
    """The tensors of a folder, as far as its files can be read."""

    source: Path
    tensors: Mapping[str, Stored]
    unreadable: frozenset[str] = frozenset()
    """Names that the index promises in files that are absent or damaged."""
    problems: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, dict[str, int]]:
        """Tensors and bytes by dtype."""
        counts, sizes = Counter(), Counter()
        for stored in self.tensors.values():
            counts[str(stored.dtype)] += 1
            sizes[str(stored.dtype)] += stored.end - stored.offset
        return {name: {"tensors": counts[name], "bytes": sizes[name]} for name in sorted(counts)}

    @property
    def files(self) -> list[str]:
        """Files that could be read."""
        return sorted({stored.file.name for stored in self.tensors.values()})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Tensors of the files beside those that the config asks for."""

    parameters: int
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    """One sentence each."""
    left_aside: list[str] = field(default_factory=list)
    """Names that are no part of the policy: prediction heads, vision, a head beside a tied embedding."""


class _Found(SafetensorsReader):
    """A reader of what could be found. A name that is only promised is there, as None."""

    def __init__(self, headers: Headers) -> None:
        promised = dict.fromkeys(headers.unreadable)
        self.source, self.tensors = headers.source, cast(Any, promised | dict(headers.tensors))


def read_headers(folder: Path) -> Headers:
    """Headers of all weight files; a file that is absent or damaged is a problem, the others are read all the same."""
    try:
        reader = SafetensorsReader(folder)
        return Headers(source=reader.source, tensors=reader.tensors)
    except UserError as error:
        refusal = str(error)
    index = folder / INDEX_FILE
    if not index.is_file() or (folder / WEIGHTS_FILE).is_file():
        return Headers(source=folder, tensors={}, problems=(refusal,))
    try:
        places = read_config(index).get("weight_map")
    except UserError:
        places = None
    if not isinstance(places, dict) or not all(isinstance(v, str) and Path(v).name == v for v in places.values()):
        return Headers(source=index, tensors={}, problems=(refusal,))
    tensors, bad, problems = _read_each(folder, places)
    strangers = sorted(f"{name} in {stored.file.name}" for name, stored in tensors.items() if name not in places)
    if strangers:
        problems.append(f"{index}: does not name tensors that the files hold: {shown(strangers)}")
    unreadable = frozenset(name for name, file in places.items() if file in bad)
    # None of the above, and refused all the same: the reader says why, e.g. a tensor in two files.
    return Headers(
        source=index, tensors=tensors, unreadable=unreadable, problems=tuple(problems) if problems else (refusal,)
    )


def _read_each(folder: Path, places: Mapping[str, str]) -> tuple[dict[str, Stored], set[str], list[str]]:
    """Tensors of the files that an index names, the files that cannot be read, and what is wrong."""
    tensors: dict[str, Stored] = {}
    bad, problems = set(), []
    for file in sorted(set(places.values())):
        promised = {name for name, place in places.items() if place == file}
        try:
            found = read_header(folder / file)
        except UserError as error:
            bad.add(file)
            problems.append(f"{error} (the index puts {len(promised)} tensors there)")
            continue
        lost = sorted(promised - found.keys())
        if lost:
            problems.append(f"{folder / file}: does not hold tensors that {INDEX_FILE} puts there: {shown(lost)}")
        tensors |= found
    return tensors, bad, problems


def compare(cfg: DecoderConfig, headers: Headers) -> Comparison:
    """Every tensor that the policy of a config is made of, looked for in the headers."""
    family, reader = family_of(cfg), _Found(headers)
    prefix = prefix_of(family, reader)
    leaves = jax.tree_util.tree_flatten_with_path(abstract_policy(cfg))[0]
    needed, missing, misshapen = set(), set(), []
    for path, leaf in leaves:
        try:
            found = source(path, leaf.shape, cfg, reader, prefix)
        except UserError as error:  # rows of the vocabulary
            misshapen.append(str(error))
            needed.add(published(path, family, prefix))
            continue
        names = set(found.names())
        needed |= names
        absent = names - reader.tensors.keys()
        missing |= absent
        if not absent and all(reader.tensors[name] is not None for name in names):
            misshapen += _misfits(reader, found, leaf.shape)
    strangers = sorted(headers.tensors.keys() - needed)
    aside = [name for name in strangers if _is_left_aside(name, cfg, family)]
    return Comparison(
        parameters=sum(math.prod(leaf.shape) for _, leaf in leaves),
        missing=sorted(missing),
        unexpected=sorted(set(strangers) - set(aside)),
        misshapen=misshapen,
        left_aside=aside,
    )


def _is_left_aside(name: str, cfg: DecoderConfig, family: PolicyFamily) -> bool:
    copy = name == "lm_head.weight" and cfg.tie_word_embeddings
    return copy or any(fnmatchcase(name, pattern) for pattern in family.ignored)


def _misfits(reader: SafetensorsReader, found: Source, shape: tuple[int, ...]) -> list[str]:
    """Why the tensors of one array cannot be it: shape, or numbers of another kind."""
    names = found.names()
    stored = reader.tensors[names[0]]
    where = f"{shown(names)} in {stored.file.name}"
    try:
        given = found.shape(reader)
    except UserError as error:
        return [str(error)]
    if given != shape:
        return [f"{where}: stored shape {stored.shape} gives {given} but {shape} is asked for"]
    kinds = {reader.tensors[name].dtype for name in names if not name.endswith(_PACKED)}
    wrong = sorted(str(dtype) for dtype in kinds if not is_float(np.dtype(dtype)))
    return [f"{where}: stored as {', '.join(wrong)} but floats are asked for"] if wrong else []
