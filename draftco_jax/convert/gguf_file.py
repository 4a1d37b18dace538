"""A GGUF file: its settings, and its tensors as float32. Reading and dequantising are those of the `gguf` package.

    "GGUF" | version | counts | settings (name, type, value) | tensors (name, sizes, kind, offset) | aligned data

Sizes stand in the file from the fastest to the slowest; here they are turned round, [out, in] of a projection.
Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from draftco_jax.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_DAMAGED = (
    ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError, RecursionError,
    FloatingPointError,
)  # fmt: skip
"""What the package raises for bytes that make no sense."""


def is_gguf(path: Path) -> bool:
    """Whether this is meant to be a GGUF file: by its name, or by its first four bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True)
class GgufFile:
    """What a file holds; tensors are read one by one."""

    path: Path
    settings: Mapping[str, Any]
    """Values by name: numbers, booleans, texts and lists of them."""
    _tensors: Mapping[str, Any]
    _library: Any

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in the order of the file."""
        return tuple(self._tensors)

    def kind(self, name: str) -> str:
        """How a tensor is stored: F32, Q8_0, Q4_1, ..."""
        return self._tensors[name].tensor_type.name

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32.

        Raises:
            UserError: its kind is one that the package cannot dequantise.
        """
        found = self._tensors[name]
        try:
            values = self._library.quants.dequantize(found.data, found.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: {name} is stored as {self.kind(name)}, which the gguf package cannot dequantise; give a "
                "file of another kind, such as Q8_0"
            ) from error
        return np.asarray(values, np.float32).reshape(tuple(int(size) for size in reversed(found.shape)))


def read_gguf(path: Path) -> GgufFile:
    """Read settings and the table of tensors.

    Raises:
        UserError: no GGUF file, another version, damaged or cut short, or a kind of tensor that is not known.
    """
    _check_start(path)
    library = _import_library()
    try:
        with np.errstate(over="raise"):  # an offset that wraps around
            reader = library.GGUFReader(path)
        settings = {name: field.contents() for name, field in reader.fields.items()}
    except _DAMAGED as error:
        if "GGMLQuantizationType" in str(error):
            number = re.findall(r"\d+", str(error))[-1]
            raise UserError(
                f"{path}: a tensor is stored in kind {number}, which the gguf package does not know; give a file of "
                "another kind, such as Q8_0, or take a newer package"
            ) from error
        raise UserError(f"{path} is a GGUF file cut short or damaged ({error}); get it again") from error
    _check_places(path, reader)
    return GgufFile(path, settings, {tensor.name: tensor for tensor in reader.tensors}, library)


def _check_places(path: Path, reader: Any) -> None:
    """Tensors lie behind the table, within the file and apart from one another."""
    size, end, before = path.stat().st_size, int(reader.data_offset), "the table"
    for tensor in sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset)):
        start, stop = int(tensor.data_offset), int(tensor.data_offset) + int(tensor.n_bytes)
        if start < end or stop > size:
            raise UserError(
                f"{path} is a GGUF file cut short or damaged ({tensor.name} at bytes {start} to {stop} of {size} must "
                f"lie behind {before}, which ends at {end}); get it again"
            )
        end, before = stop, tensor.name


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] != MAGIC:
        raise UserError(f"{path} is no GGUF file: it must begin with {MAGIC!r}, not {start[:4]!r}; get it again")
    if len(start) < 8:
        raise UserError(f"{path} is a GGUF file cut short or damaged (it has {len(start)} bytes); get it again")
    (version,) = struct.unpack("<I", start[4:])
    if version not in VERSIONS:
        raise UserError(
            f"{path}: GGUF version={version} must be one of {', '.join(map(str, VERSIONS))} (little-endian); convert "
            "the model again with a present llama.cpp"
        )


def _import_library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UserError("a GGUF file needs the gguf package; run: pip install 'draftco[gguf]'") from error
