"""Safetensors files of any size: read by the slice, written in shards.

A file is 8 bytes (length of the header, little-endian), a JSON header (name -> dtype, shape, byte range) and the bytes
of all tensors in C order without gaps. Several files are bound by `model.safetensors.index.json` (name -> file). All
headers are checked, and against each other, before a byte of a weight is read.

Format: the description that comes with the safetensors library.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.errors import UserError

WEIGHTS_FILE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""Customary size of a shard."""
INDEX_FILE = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""Spelling in the file -> dtype in memory."""
_SPELLINGS = {dtype: spelling for spelling, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own implementation
_RUN_BYTES = 2**16  # contiguous pieces of at least this size are read one by one,
_BLOCK_BYTES = 2**23  # smaller ones with what lies between them, this much at a time
_PAGED_BYTES = 2**20  # arrays of at least this size get pages of their own
_CHECKED_VALUES = 2**20  # values looked at in one go, so that the check needs no memory to speak of
_SHOWN = 4  # names in an error

Index = tuple[slice, ...]


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file

    @property
    def end(self) -> int:
        """First byte after the tensor."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no name appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise UserError(f"{path}: {twice[:_SHOWN]} appear twice; the file is damaged, get it again")
        return values

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not JSON where JSON should be ({error}); the file is damaged, get it again"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__} but must hold an object of names; get it again")
    return found


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _entry(path: Path, name: str, entry: Any, body: int) -> Stored:
    """One entry of a header; `body` is the file's first byte after the header."""
    spelling: Any = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(spelling, str) or spelling not in DTYPES:
        raise UserError(f"{path}: tensor {name} has dtype {spelling!r}; supported: {', '.join(DTYPES)}")
    shape, ends = entry.get("shape"), entry.get("data_offsets")
    if not (_counts(shape) and _counts(ends) and len(ends) == 2):
        raise UserError(f"{path}: the header's entry of tensor {name} is malformed; the file is damaged, get it again")
    stored = Stored(path, DTYPES[spelling], tuple(shape), body + ends[0])
    if stored.end != body + ends[1]:
        raise UserError(
            f"{path}: tensor {name} has {ends[1] - ends[0]} bytes but {spelling} of shape {shape} takes "
            f"{stored.end - stored.offset}; the file is damaged, get it again"
        )
    return stored


def read_header(path: Path) -> dict[str, Stored]:
    """Tensors of a safetensors file; refused unless its bytes are exactly theirs."""
    if not path.is_file():
        raise UserError(f"weights file {path} does not exist; the download is not complete, get it again")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 8 + length <= size and length <= _MAX_HEADER_BYTES else None
    except OSError as error:
        raise UserError(f"weights file {path} cannot be read ({error}); allow it to be read or get it again") from error
    if text is None:
        raise UserError(f"{path}: cut short in its header, or not a safetensors file ({size} bytes); get it again")
    header = _parse(text, path)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    stored = {name: _entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].end)):
        if tensor.offset != end:
            raise UserError(
                f"{path}: tensor {name} begins at byte {tensor.offset} but the one before ends at {end}; "
                "the file is damaged, get it again"
            )
        end = tensor.end
        if end > size:
            raise UserError(
                f"{path}: cut short, tensor {name} ends at byte {end} but the file has {size}; get it again"
            )
    if end < size:
        raise UserError(f"{path}: {size - end} bytes follow the last tensor; the file is damaged, get it again")
    return stored


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    places = _parse(path.read_bytes(), path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{path}: weight_map must be an object of tensor names and file names; get it again")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{path}: tensor {name} is said to be in {file!r}, which must be a file of the same folder")
    return places


def shown(names: Sequence[str]) -> str:
    """The first few of several names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _read_shards(index: Path) -> dict[str, Stored]:
    """Tensors of all files an index names; refused unless index and files name the same ones, each once."""
    places = _read_index(index)
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        for name, stored in read_header(index.parent / file).items():
            if name in found:
                raise UserError(
                    f"{index.parent}: tensor {name} is in {found[name].file.name} and in {file}; remove one"
                )
            found[name] = stored
    absent = sorted(places.keys() - found.keys())
    if absent:
        names = shown([f"{name} in {places[name]}" for name in absent])
        raise UserError(f"{index}: names tensors that their files do not hold: {names}; get files and index again")
    stray = sorted(name for name, stored in found.items() if places.get(name) != stored.file.name)
    if stray:
        names = shown([f"{name} in {found[name].file.name}" for name in stray])
        raise UserError(f"{index}: does not name tensors that the files hold: {names}; get files and index again")
    return found


def _find(folder: Path) -> Path:
    """The file to begin with: the index or the only weights file."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if index.is_file() and single.is_file() and set(_read_index(index).values()) != {WEIGHTS_FILE}:
        raise UserError(f"{folder}: holds {WEIGHTS_FILE} and {INDEX_FILE} of other files; remove what is not meant")
    if index.is_file() or single.is_file():
        return index if index.is_file() else single
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise UserError(
        f"{folder}: holds neither {WEIGHTS_FILE} nor {INDEX_FILE}"
        + (f", only {shown(others)}" if others else "")
        + "; give a folder with safetensors weights"
    )


def host_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array to be filled, whose memory goes back to the system with it.

    malloc would keep it: between buffers of devices that stay, what is freed leaves holes (0.36 GB beside 2.1 GB of
    parameters).
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _PAGED_BYTES:
        return np.empty(tuple(shape), dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def host_copy(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in C order and in that dtype, in such an array."""
    out = host_array(values.shape, dtype)
    np.copyto(out, values, casting="unsafe")
    return out


def _fill(file: FileIO, target: np.ndarray, offset: int, what: str) -> None:
    """Read target.size bytes at `offset` into a contiguous u8[n]."""
    file.seek(offset)
    view = memoryview(cast(Any, target))
    while view:
        count = file.readinto(view)
        if not count:
            raise UserError(f"{what} ended while it was read; the file was changed, start again")
        view = view[count:]


def _read_rows(file: FileIO, target: np.ndarray, offset: int, pitch: int, skip: int, what: str) -> None:
    """Read u8[rows, run], whose row r begins at byte offset + r * pitch + skip of the file."""
    rows, run = target.shape
    if run >= _RUN_BYTES or pitch > _BLOCK_BYTES:
        for row in range(rows):
            _fill(file, target[row], offset + row * pitch + skip, what)
        return
    block = max(1, min(rows, _BLOCK_BYTES // pitch))
    buffer = host_array((block, pitch), np.dtype(np.uint8))
    for first in range(0, rows, block):
        count = min(block, rows - first)
        _fill(file, buffer[:count].reshape(-1), offset + first * pitch, what)
        target[first : first + count] = buffer[:count, skip : skip + run]


def _read_box(stored: Stored, low: Sequence[int], counts: Sequence[int], what: str) -> np.ndarray:
    """`counts` entries of every axis from `low` on."""
    out = host_array(counts, stored.dtype)
    if not out.size:
        return out
    pitch = [stored.dtype.itemsize * math.prod(stored.shape[axis + 1 :]) for axis in range(len(stored.shape))]
    cut = [axis for axis, size in enumerate(stored.shape) if counts[axis] != size]
    last = cut[-1] if cut else 0  # entries of the axes behind it are all wanted, and lie together
    with open(stored.file, "rb", buffering=0) as file:
        if last == 0:
            start = stored.offset + (low[0] * pitch[0] if low else 0)
            _fill(file, out.reshape(-1).view(np.uint8), start, what)
            return out
        rows = out.reshape(-1).view(np.uint8).reshape(*counts[:last], -1)
        for outer in itertools.product(*(range(count) for count in counts[: last - 1])):
            begin = [low[axis] + (outer[axis] if axis < len(outer) else 0) for axis in range(last)]
            start = stored.offset + sum(place * pitch[axis] for axis, place in enumerate(begin))
            _read_rows(file, rows[outer], start, pitch[last - 1], low[last] * pitch[last], what)
    return out


def is_float(dtype: np.dtype) -> bool:
    """Floats of any width, bfloat16 included."""
    return jnp.issubdtype(dtype, jnp.floating)


def all_finite(values: np.ndarray) -> bool:
    """No infinity, no NaN."""
    flat = values.reshape(-1)
    pieces = (flat[first : first + _CHECKED_VALUES] for first in range(0, flat.size, _CHECKED_VALUES))
    if values.dtype == DTYPES["BF16"]:  # an exponent of ones only; three times as fast as asking each value
        return all(((piece.view(np.uint16) & np.uint16(0x7F80)) != 0x7F80).all() for piece in pieces)
    return all(np.isfinite(piece).all() for piece in pieces)


class SafetensorsReader:
    """The weights of a folder: `model.safetensors`, or the files that the index names. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        self.source = _find(folder)
        self.tensors: Mapping[str, Stored]
        if self.source.name == INDEX_FILE:
            self.tensors = _read_shards(self.source)
        else:
            self.tensors = read_header(self.source)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor, or the slices of it given for every axis, steps positive; what is not finite is refused."""
        stored = self.tensors[name]
        what = f"{stored.file}: tensor {name}"
        chosen = ranges(index, stored.shape)
        low = [places.start for places in chosen]
        counts = [places[-1] + 1 - places.start if places else 0 for places in chosen]
        values = _read_box(stored, low, counts, what)
        if any(places.step > 1 for places in chosen):
            steps = tuple(slice(None, None, places.step) for places in chosen)
            values = host_copy(values[steps], values.dtype)
        if is_float(stored.dtype) and not all_finite(values):
            raise UserError(f"{what} holds a value that is not finite; the file is damaged, get it again")
        return values


def ranges(index: Index | None, shape: tuple[int, ...]) -> list[range]:
    """The entries of every axis that an index names; None names all."""
    chosen = (slice(None),) * len(shape) if index is None else index
    return [range(size)[places] for size, places in zip(shape, chosen, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """A tensor to write that is made when its turn comes; shape and dtype are needed before, for the header."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], Any]


class _Planned(NamedTuple):
    name: str
    value: Any
    bytes: int
    spelling: str


def _plan(tensors: Iterable[tuple[str, Any]], max_shard_bytes: int) -> list[list[_Planned]]:
    """Tensors by shard, in the order given; one that is larger than a shard gets its own."""
    shards: list[list[_Planned]] = [[]]
    room, seen = max_shard_bytes, set()
    for name, value in tensors:
        dtype = np.dtype(value.dtype)
        if dtype not in _SPELLINGS:
            raise ValueError(f"tensor {name} has dtype={dtype} but it must be one of {list(DTYPES)}; cast it first")
        if name in seen or name == "__metadata__":
            raise ValueError(
                f"name={name!r} must be given once and not be '__metadata__'; give every tensor its own name"
            )
        seen.add(name)
        planned = _Planned(name, value, math.prod(value.shape) * dtype.itemsize, _SPELLINGS[dtype])
        if planned.bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(planned)
        room -= planned.bytes
    return shards


def _on_host(planned: _Planned) -> np.ndarray:
    """C-ordered values; safetensors knows no other order."""
    value = planned.value.make() if isinstance(planned.value, Deferred) else planned.value
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            raise ValueError(
                f"tensor {planned.name} must be on devices of this process; gather it before it is written"
            )
        if next(iter(value.devices())).platform != "cpu":
            # JAX keeps the host's copy with the array; a copy of the array takes it along when it goes.
            value = jnp.copy(value)
    array = np.asarray(value, order="C")
    if array.shape != tuple(planned.value.shape) or array.dtype != np.dtype(planned.value.dtype):
        raise ValueError(
            f"tensor {planned.name} must be {planned.value.dtype}{list(planned.value.shape)} as announced, "
            f"not {array.dtype}{list(array.shape)}; correct the one or the other"
        )
    return array


def _write_file(path: Path, shard: list[_Planned], metadata: Mapping[str, str]) -> None:
    """One safetensors file, tensor by tensor."""
    # Large items first, as the format's own writer does it, keeps every tensor aligned for readers that map the file.
    shard = sorted(shard, key=lambda planned: (-DTYPES[planned.spelling].itemsize, planned.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, value, size, spelling in shard:
        header[name] = {"dtype": spelling, "shape": list(value.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned in shard:
            file.write(cast(Any, _on_host(planned).reshape(-1).view(np.uint8)))
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(folder: Path, names: Sequence[str], index: bytes | None) -> None:
    """Give finished files their names. At any moment the folder holds the old weights, no weights or the new ones."""
    (folder / INDEX_FILE).unlink(missing_ok=True)
    ours = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
    old = [path for path in folder.iterdir() if ours.fullmatch(path.name) and path.name not in names]
    if index is not None:
        for path in old:
            path.unlink()
    for name in names:
        os.replace(folder / f".{name}.writing", folder / name)
    if index is None:
        for path in old:
            path.unlink()
    else:
        (folder / f".{INDEX_FILE}.writing").write_bytes(index)
        os.replace(folder / f".{INDEX_FILE}.writing", folder / INDEX_FILE)


def write_sharded(
    folder: Path,
    tensors: Iterable[tuple[str, Any]],
    max_shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write arrays (NumPy, JAX or `Deferred`) by name: one file, or shards of at most `max_shard_bytes` and an index.

    On the host there is never more than one tensor. Files get their names when all are written, and the index last;
    weights that the folder held before are replaced then. Returns the weights files.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1; 5e9 is customary")
    shards = _plan(tensors, max_shard_bytes)
    count = len(shards)
    names = [WEIGHTS_FILE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".model*.writing"):  # of a process that was killed
        left.unlink()
    try:
        for name, shard in zip(names, shards, strict=True):
            # "pt" says that projections are [out, in]; transformers asks for it.
            _write_file(folder / f".{name}.writing", shard, {"format": "pt"} | dict(metadata or {}))
    except BaseException:
        for left in folder.glob(".model*.writing"):
            left.unlink()
        raise
    index = None
    if count > 1:
        places = {planned.name: name for name, shard in zip(names, shards, strict=True) for planned in shard}
        total = sum(planned.bytes for shard in shards for planned in shard)
        described = {"metadata": {"total_size": total}, "weight_map": places}
        index = json.dumps(described, indent=2, sort_keys=True).encode() + b"\n"
    _put_in_place(folder, names, index)
    return [folder / name for name in names]
