"""From the tensors of a checkpoint to the arrays of a model, straight into their shardings.

Which tensors make an array is said by a source, a small expression that can be read by the slice:

    Tensor("a.weight")                        as stored
    Transposed(Tensor("a.weight"))            [out, in] -> [in, out]
    Stacked((Tensor("e.0"), Tensor("e.1")))   [..] each -> [2, ..], one per expert
    Part(Tensor("gate_up"), 1, slice(0, I))   some entries of one axis
    Computed((Tensor("blocks"), Tensor("scales")), unpack, shape)   anything else

All names, shapes and kinds of dtype are checked before the first array is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from draftco_jax.errors import UserError
from draftco_jax.models.checkpoint_files import (
    DTYPES,
    Index,
    SafetensorsReader,
    all_finite,
    host_array,
    host_copy,
    is_float,
    ranges,
    shown,
)

Key = TypeVar("Key", bound=Hashable)


@runtime_checkable
class Source(Protocol):
    """Tensors that make one array."""

    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        ...

    def shape(self, reader: SafetensorsReader) -> tuple[int, ...]:
        """Shape of the array that they make."""
        ...

    def read(self, reader: SafetensorsReader, index: Index | None = None) -> np.ndarray:
        """That array, or slices of it."""
        ...


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is stored."""

    name: str

    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def shape(self, reader: SafetensorsReader) -> tuple[int, ...]:
        return reader.tensors[self.name].shape

    def read(self, reader: SafetensorsReader, index: Index | None = None) -> np.ndarray:
        return reader.read(self.name, index)


@dataclass(frozen=True)
class Transposed:
    """The last two axes exchanged."""

    of: Source

    def names(self) -> tuple[str, ...]:
        return self.of.names()

    def shape(self, reader: SafetensorsReader) -> tuple[int, ...]:
        found = self.of.shape(reader)
        if len(found) < 2:
            raise UserError(f"{reader.source}: {shown(self.names())} has shape {found} but must have two axes or more")
        return (*found[:-2], found[-1], found[-2])

    def read(self, reader: SafetensorsReader, index: Index | None = None) -> np.ndarray:
        swapped = None if index is None else (*index[:-2], index[-1], index[-2])
        return np.swapaxes(self.of.read(reader, swapped), -1, -2)


@dataclass(frozen=True)
class Stacked:
    """Arrays of one shape along a new first axis: N of [..] -> [N, ..]."""

    parts: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts=() must hold at least one source; leave the array out")

    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names())

    def shape(self, reader: SafetensorsReader) -> tuple[int, ...]:
        found = [part.shape(reader) for part in self.parts]
        odd = [part.names()[0] for part, shape in zip(self.parts, found, strict=True) if shape != found[0]]
        if odd:
            first = f"{self.parts[0].names()[0]} has shape {found[0]}"
            raise UserError(
                f"{reader.tensors[odd[0]].file}: {first} but these have another: {shown(odd)}; "
                "tensors of one stack must agree, get the file again"
            )
        return (len(self.parts), *found[0])

    def read(self, reader: SafetensorsReader, index: Index | None = None) -> np.ndarray:
        chosen = self.parts if index is None else self.parts[index[0]]
        inner = None if index is None else index[1:]
        # Filled one by one: a list of all parts beside the stack would hold everything twice.
        out: np.ndarray | None = None
        for place, part in enumerate(chosen):
            values = part.read(reader, inner)
            out = host_array((len(chosen), *values.shape), values.dtype) if out is None else out
            if values.dtype != out.dtype:
                raise UserError(
                    f"{reader.source}: {part.names()[0]} is {values.dtype} but others of its stack are {out.dtype}; "
                    "tensors of one stack must agree, get the file again"
                )
            out[place] = values
        return self.parts[0].read(reader, inner)[None][:0] if out is None else out


@dataclass(frozen=True)
class Part:
    """Some entries of one axis (a slice with a positive step): half of a fused projection, every second column."""

    of: Source
    axis: int  # counted from the front
    entries: slice

    def __post_init__(self) -> None:
        if self.axis < 0 or (self.entries.step or 1) < 1:
            raise ValueError(
                f"axis={self.axis}, entries={self.entries} must count from the front with a positive step; "
                "name the axis and the entries that way"
            )

    def names(self) -> tuple[str, ...]:
        return self.of.names()

    def shape(self, reader: SafetensorsReader) -> tuple[int, ...]:
        found = list(self.of.shape(reader))
        if self.axis >= len(found):
            raise UserError(f"{reader.source}: {shown(self.names())} has shape {tuple(found)} without axis {self.axis}")
        found[self.axis] = len(range(found[self.axis])[self.entries])
        return tuple(found)

    def read(self, reader: SafetensorsReader, index: Index | None = None) -> np.ndarray:
        whole = self.of.shape(reader)
        chosen = list(index or (slice(None),) * len(whole))
        places = range(whole[self.axis])[self.entries][chosen[self.axis]]
        chosen[self.axis] = slice(places.start, places.stop, places.step)
        return self.of.read(reader, tuple(chosen))


@dataclass(frozen=True)
class Computed:
    """function(*arrays), for what no other source says, e.g. unpacked MXFP4.

    `by_entry`: the function treats the entries of everyone's first axis apart (experts), so that a slice of them can be
    made alone; otherwise all is read and computed for any slice.
    """

    parts: tuple[Source, ...]
    function: Callable[..., np.ndarray]
    result: tuple[int, ...]  # shape
    by_entry: bool = False

    def __post_init__(self) -> None:
        if not self.parts or (self.by_entry and not self.result):
            raise ValueError(
                f"parts={self.parts}, result={self.result} must be at least one part, and an axis where by_entry; "
                "leave the array out"
            )

    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names())

    def shape(self, reader: SafetensorsReader) -> tuple[int, ...]:
        for part in self.parts:
            found = part.shape(reader)
            if self.by_entry and found[:1] != self.result[:1]:
                raise UserError(
                    f"{reader.source}: {shown(part.names())} has shape {found} but must have {self.result[0]} entries"
                )
        return self.result

    def read(self, reader: SafetensorsReader, index: Index | None = None) -> np.ndarray:
        chosen = index or (slice(None),) * len(self.result)
        first = chosen[0] if self.by_entry else slice(None)
        arrays = [part.read(reader, (first, *(slice(None),) * (len(part.shape(reader)) - 1))) for part in self.parts]
        values = self.function(*arrays)
        expected = (len(range(self.result[0])[first]), *self.result[1:]) if self.by_entry else self.result
        if values.shape != expected:
            raise ValueError(f"function gave shape {values.shape} but result={self.result} asks for {expected}")
        return values[(slice(None), *chosen[1:])] if self.by_entry else values[chosen]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An array to load: where it comes from, and the shape and dtype it must have in memory."""

    source: Source
    shape: tuple[int, ...]
    dtype: Any  # floats are cast to it; integers must keep their values

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype not in DTYPES.values():
            raise ValueError(
                f"dtype={dtype} must be one of {[str(known) for known in DTYPES.values()]}; load as one of them"
            )


def _same_kind(one: np.dtype, other: np.dtype) -> bool:
    return is_float(one) == is_float(other) and (one == np.bool_) == (other == np.bool_)


def _cast(values: np.ndarray, spec: TensorSpec, where: str) -> np.ndarray:
    """C-ordered values in the dtype asked for; refused where that would change more than rounding does."""
    dtype = np.dtype(spec.dtype)
    if values.dtype == dtype:
        return values if values.flags.c_contiguous else host_copy(values, dtype)
    if not _same_kind(values.dtype, dtype):
        raise ValueError(
            f"{where} is computed as {values.dtype} but dtype={dtype} is asked for; they must be of one kind"
        )
    # The overflow is told below, with its name.
    with np.errstate(over="ignore", under="ignore"):
        changed = host_copy(values, dtype)
    kept = all_finite(changed) if is_float(dtype) else bool((changed == values).all())
    if not kept:
        raise UserError(f"{where} holds a value that {dtype} cannot hold; load it as {values.dtype}")
    return changed


def _where(reader: SafetensorsReader, source: Source) -> str:
    names = source.names()
    return f"{reader.tensors[names[0]].file}: {shown(names)}"


def _check_names(reader: SafetensorsReader, needed: set[str], ignored: Sequence[str]) -> None:
    missing = sorted(needed - reader.tensors.keys())
    strangers = reader.tensors.keys() - needed
    unexpected = sorted(name for name in strangers if not any(fnmatchcase(name, pattern) for pattern in ignored))
    if missing or unexpected:
        named = [f"missing tensors {shown(missing)}"] if missing else []
        if unexpected:
            files = [f"{name} in {reader.tensors[name].file.name}" for name in unexpected]
            named.append(f"unexpected tensors {shown(files)}")
        raise UserError(
            f"{reader.source}: {', '.join(named)}; the files must hold exactly the model that config.json describes"
        )


def _check_shapes(reader: SafetensorsReader, wanted: Iterable[TensorSpec]) -> None:
    wrong = []
    for spec in wanted:
        names = spec.source.names()
        stored = reader.tensors[names[0]]
        found = spec.source.shape(reader)
        if found != spec.shape:
            wrong.append(
                f"{shown(names)} in {stored.file.name} with stored shape {stored.shape} gives {found} "
                f"but {spec.shape} is asked for"
            )
    if wrong:
        raise UserError(f"{reader.source}: {shown(wrong)}; use the config.json that came with the weights")


def _read_as_stored(source: Source) -> tuple[str, ...]:
    """Names of the tensors that no function comes between."""
    if isinstance(source, Computed):
        return ()
    if isinstance(source, Stacked):
        return tuple(name for part in source.parts for name in _read_as_stored(part))
    return _read_as_stored(source.of) if isinstance(source, Transposed | Part) else source.names()


def _check_dtypes(reader: SafetensorsReader, wanted: Iterable[TensorSpec]) -> None:
    wrong = []
    for spec in wanted:
        dtype = np.dtype(spec.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"dtype={dtype} must be one that JAX holds without x64; ask for 32 bits")
        for name in _read_as_stored(spec.source):
            stored = reader.tensors[name]
            if not _same_kind(stored.dtype, dtype):
                wrong.append(f"{name} in {stored.file.name} is {stored.dtype} but {dtype} is asked for")
    if wrong:
        raise UserError(f"{reader.source}: {shown(wrong)}; use the config.json that came with the weights")


def _load(reader: SafetensorsReader, spec: TensorSpec, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """One array, each device's slice of it read alone; a slice that several devices hold is read once."""
    where = _where(reader, spec.source)
    pieces: dict[tuple[range, ...], np.ndarray] = {}
    whole: np.ndarray | None = None
    if isinstance(spec.source, Computed) and not spec.source.by_entry:
        whole = _cast(spec.source.read(reader), spec, where)

    def piece(index: Index | None) -> np.ndarray:
        key = tuple(ranges(index, spec.shape))
        if key not in pieces:
            values = spec.source.read(reader, index) if whole is None else whole[index or ...]
            pieces[key] = _cast(values, spec, where)
        return pieces[key]

    if sharding is None:
        array = jax.device_put(piece((slice(None),) * len(spec.shape)))
    else:
        array = jax.make_array_from_callback(spec.shape, sharding, piece)
    # Waiting keeps the host buffers of one array alive at a time instead of those of many transfers.
    return array.block_until_ready()


def load_tree(
    reader: SafetensorsReader,
    wanted: Mapping[Key, TensorSpec],
    shardings: Mapping[Key, jax.sharding.Sharding] | None = None,
    ignored: Sequence[str] = (),
) -> dict[Key, jax.Array]:
    """All arrays of a model, by the keys (tree paths, say) of `wanted`, one after the other.

    On the host there is never more than what one array's local devices hold of it, in the file's dtype and in the one
    asked for. Names, shapes and kinds of dtype are checked before the first is read. `ignored` are name patterns
    ("mtp.*") of tensors that may be in the files without being wanted.
    """
    if shardings is not None and wanted.keys() - shardings.keys():
        raise ValueError(
            f"shardings must hold every key of wanted; missing: {list(wanted.keys() - shardings.keys())[:4]}"
        )
    _check_names(reader, {name for spec in wanted.values() for name in spec.source.names()}, ignored)
    _check_shapes(reader, wanted.values())
    _check_dtypes(reader, wanted.values())
    return {key: _load(reader, spec, shardings[key] if shardings else None) for key, spec in wanted.items()}


def vocabulary_rows(reader: SafetensorsReader, name: str, vocab_size: int, cut_padding: bool = False) -> Source:
    """An embedding or head of [rows, D] as [vocab_size, D]: rows beyond are padding, cut if asked for, else refused."""
    stored = reader.tensors.get(name)
    if stored is None or stored.shape[:1] == (vocab_size,):
        return Tensor(name)  # a missing one is told by load_tree, with all others that are missing
    rows = stored.shape[0] if stored.shape else 0
    if rows < vocab_size:
        raise UserError(
            f"{stored.file}: {name} has {rows} rows but vocab_size={vocab_size}; use the config.json of these weights"
        )
    if not cut_padding:
        raise UserError(
            f"{stored.file}: {name} has {rows} rows but vocab_size={vocab_size}; set vocab_size={rows} in config.json "
            "to keep them as tokens, or ask for padding to be cut"
        )
    return Part(Tensor(name), 0, slice(0, vocab_size))


def cut_vocabulary(name: str, array: Any, vocab_size: int) -> Any:
    """[rows, D] -> [vocab_size, D] for export: rows beyond were added in training for an even split."""
    if array.shape[0] < vocab_size:
        raise ValueError(f"{name} has {array.shape[0]} rows but must have vocab_size={vocab_size}; correct vocab_size")
    return array[:vocab_size]
