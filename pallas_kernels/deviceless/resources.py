"""What the kernels of a compiled program ask of a GPU: registers, stack, shared memory, read from the machine code.

A compiled program holds the machine code of its kernels as ELF files ("cubins") with NVIDIA's attributes. Registers
and stack are those attributes (`.nv.info`: REGCOUNT, FRAME_SIZE). Static shared memory is the size of the kernel's
`.nv.shared` section, of which the first KiB is the system's own from Hopper on; the dynamic part is what XLA passes
when it launches the kernel.

A register that does not fit is spilled to the stack, so stack 0 means no spill. The reverse does not hold: arrays that
are indexed at run time are on the stack too. `ptxas_resources` tells the two apart, given PTX.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.deviceless.plugin import ptxas
from pallas_kernels.deviceless.riegeli import record_bytes, varint

_ELF = b"\x7fELF"
_ATTRIBUTES = {0x2F: "registers", 0x11: "stack_bytes"}
_SIZED_ATTRIBUTE = 4
SYSTEM_SHARED_BYTES = 1024
"""Kept by the system in each block's shared memory, at its start."""

# Fields of XLA's custom kernel record, xla/backends/gpu/codegen/kernels/custom_kernel.proto.
_NAME, _PROGRAM, _THREADS, _SHARED = 1, 2, 4, 6


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """Of one kernel."""

    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread, spilled registers among them."""
    shared_bytes: int
    """Of a block: static and dynamic, without the system's own KiB."""
    threads: int | None = None
    """Of a block; None where the program does not say."""
    spill_bytes: int | None = None
    """Stored and loaded to spill registers, of a thread; 0 where there is no stack, None where that cannot be told."""


def kernel_resources(compiled: jax.stages.Compiled) -> dict[str, KernelResources]:
    """Resources of all kernels of a compiled program, by name, among them those that jax-triton compiled itself."""
    executable = compiled.runtime_executable()
    return serialized_resources(executable.serialize())  # pyright: ignore[reportOptionalMemberAccess]


def serialized_resources(program: bytes) -> dict[str, KernelResources]:
    """`kernel_resources` of a serialized GPU executable."""
    found: dict[str, KernelResources] = {}
    launches: dict[str, tuple[int, int]] = {}
    for records in record_bytes(program):
        for cubin in _cubins(records, launches):
            found |= cubin_resources(cubin)
    for name, (threads, shared) in launches.items():
        if name in found:
            static = found[name].shared_bytes
            found[name] = dataclasses.replace(found[name], threads=threads, shared_bytes=static + shared)
    return found


def cubin_resources(cubin: bytes) -> dict[str, KernelResources]:
    """Resources of the kernels of one machine code file; shared memory is the static part."""
    sections = _sections(cubin)
    numbers: dict[str, dict[str, int]] = {}
    for section in sections:
        if section.name == ".nv.info":
            symbols = _symbols(cubin, sections)
            for code, symbol, value in _attributes(section.data):
                numbers.setdefault(symbols[symbol], {})[_ATTRIBUTES[code]] = value
    kernels = {section.name.removeprefix(".text.") for section in sections if section.name.startswith(".text.")}
    shared = {s.name.removeprefix(".nv.shared."): s.size for s in sections if s.name.startswith(".nv.shared.")}
    return {
        name: KernelResources(
            **values,
            shared_bytes=max(shared.get(name, 0) - SYSTEM_SHARED_BYTES, 0),
            spill_bytes=None if values["stack_bytes"] else 0,
        )
        for name, values in numbers.items()
        if name in kernels and set(values) == set(_ATTRIBUTES.values())
    }


def ptxas_resources(ptx: str, architecture: str = "sm_90a") -> dict[str, KernelResources]:
    """Resources of the kernels of a PTX program, as NVIDIA's assembler reports them; needs `make setup`'s wheels.

    The assembler inside XLA may be of another version, so registers may differ by a few from `kernel_resources`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(ptx)
        command = [str(ptxas()), "-v", f"-arch={architecture}", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"ptx must assemble for {architecture}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, KernelResources] = {}
    for report in done.stderr.split("Compiling entry function '")[1:]:
        stack, stores, loads = _first_numbers(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        (registers,) = _first_numbers(r"Used (\d+) registers", report)
        shared = re.search(r"(\d+) bytes smem", report)
        found[report.partition("'")[0]] = KernelResources(
            registers=registers,
            stack_bytes=stack,
            shared_bytes=int(shared[1]) if shared else 0,
            spill_bytes=stores + loads,
        )
    return found


def ptx_options(folder: str) -> dict[str, str]:
    """Compiler options (`compile_for(options=...)`) that leave the PTX of a program in `folder`, as *.ptx."""
    return {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}


def _first_numbers(pattern: str, text: str) -> tuple[int, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"report of ptxas must have {pattern!r}; its wording has changed")
    return tuple(int(group) for group in match.groups())


class _Section(NamedTuple):
    name: str
    size: int
    link: int
    data: bytes


def _sections(elf: bytes) -> list[_Section]:
    """All sections of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + entry * i) for i in range(count)]
    start = headers[names][4]
    no_bits = 8
    return [
        _Section(_text(elf, start + h[0]), h[5], h[6], b"" if h[1] == no_bits else elf[h[4] : h[4] + h[5]])
        for h in headers
    ]


def _symbols(elf: bytes, sections: list[_Section]) -> list[str]:
    table = next(section for section in sections if section.name == ".symtab")
    names = sections[table.link].data
    return [_text(names, struct.unpack_from("<I", table.data, place)[0]) for place in range(0, len(table.data), 24)]


def _attributes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) of those that `_ATTRIBUTES` names."""
    place = 0
    while place + 4 <= len(data):
        form, code = data[place], data[place + 1]
        size = struct.unpack_from("<H", data, place + 2)[0] if form == _SIZED_ATTRIBUTE else 0
        if form == _SIZED_ATTRIBUTE and code in _ATTRIBUTES:
            yield code, *struct.unpack_from("<II", data, place + 4)
        place += 4 + size


def _text(data: bytes, place: int) -> str:
    return data[place : data.index(b"\0", place)].decode()


def _cubins(record: bytes, launches: dict[str, tuple[int, int]]) -> Iterator[bytes]:
    """Machine code files anywhere in a protobuf message; notes how each custom kernel is launched.

    jax-triton hands its kernels over as one compressed string, which is opened.
    """
    if record[:4] == _ELF:
        yield record
        return
    if record[:1] == b"\x78":  # zlib
        try:
            record = zlib.decompress(record)
        except zlib.error:
            return
    if _ELF not in record and b"\x78" not in record:
        return
    fields = _fields(record)
    if launch := _launch(dict(fields)):
        name, threads, shared = launch
        launches[name] = (threads, shared)
    for _, value in fields:
        if isinstance(value, bytes):
            yield from _cubins(value, launches)


def _launch(fields: dict[int, int | bytes]) -> tuple[str, int, int] | None:
    """Name, threads of a block and dynamic shared memory, if this message is XLA's record of a custom kernel."""
    name, program, threads, shared = (fields.get(n) for n in (_NAME, _PROGRAM, _THREADS, _SHARED))
    if not (isinstance(name, bytes) and isinstance(program, bytes) and isinstance(threads, bytes)):
        return None
    if _ELF not in program or program.startswith(_ELF):
        return None
    axes = [dict(_fields(axis)) for _, axis in _fields(threads) if isinstance(axis, bytes)] or [dict(_fields(threads))]
    sizes = [size for axis in axes for size in axis.values() if isinstance(size, int)]
    return name.decode(errors="replace"), math.prod(sizes), shared if isinstance(shared, int) else 0


def _fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """(number, value) of all fields of a protobuf message; none where it is not one."""
    fields: list[tuple[int, int | bytes]] = []
    place = 0
    try:
        while place < len(message):
            tag, place = varint(message, place)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, place = varint(message, place)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
                value, place = message[place : place + size], place + size
            elif wire == 2:
                size, place = varint(message, place)
                value, place = message[place : place + size], place + size
            else:
                return []
            if place > len(message):
                return []
            fields.append((number, value))
    except IndexError:
        return []
    return fields
