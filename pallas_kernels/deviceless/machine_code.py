"""What one kernel asks of a GPU, read from machine code ("cubin", an ELF file) or from NVIDIA's assembler.

Registers and stack are attributes of the machine code (`.nv.info`: REGCOUNT, FRAME_SIZE). Static shared memory is the
size of the kernel's section `.nv.shared`, of which the first KiB is the system's own where there is a section
`.nv.shared.reserved.0` (from Hopper on).
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.deviceless.plugin import ptxas

ELF = b"\x7fELF"
SYSTEM_SHARED_BYTES = 1024
"""Kept by the system in each block's shared memory, at its start."""

_ATTRIBUTES = {0x2F: "registers", 0x11: "stack_bytes"}
_SIZED_ATTRIBUTE = 4
_NO_BITS = 8
_SYMBOL_BYTES = 24


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """Of one kernel."""

    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread, spilled registers among them."""
    shared_bytes: int
    """Of a block, without the system's own KiB. What is asked for at the launch is in it where the launch is known."""
    threads: int | None = None
    """Of a block; None where the launch is not known."""
    spill_bytes: int | None = None
    """Stored and loaded to spill registers, of a thread; 0 where there is no stack, None where that cannot be told."""


def cubin_resources(cubin: bytes) -> dict[str, KernelResources]:
    """Resources of the kernels of one machine code file.

    A register that does not fit is spilled to the stack, so stack 0 means no spill. The reverse does not hold: arrays
    that are indexed at run time are on the stack too, so there the spill is unknown (`ptxas_resources` tells).
    """
    sections = _sections(cubin)
    numbers: dict[str, dict[str, int]] = {}
    for section in sections:
        if section.name == ".nv.info":
            symbols = _symbols(sections)
            for code, symbol, value in _attributes(section.data):
                numbers.setdefault(symbols[symbol], {})[_ATTRIBUTES[code]] = value
    kernels = {section.name.removeprefix(".text.") for section in sections if section.name.startswith(".text.")}
    shared = {s.name.removeprefix(".nv.shared."): s.size for s in sections if s.name.startswith(".nv.shared.")}
    system = SYSTEM_SHARED_BYTES if "reserved.0" in shared else 0
    return {
        name: KernelResources(
            registers=values["registers"],
            stack_bytes=values["stack_bytes"],
            shared_bytes=max(shared.get(name, 0) - system, 0),
            spill_bytes=None if values["stack_bytes"] else 0,
        )
        for name, values in numbers.items()
        if name in kernels and set(values) == set(_ATTRIBUTES.values())
    }


def ptxas_resources(ptx: str, architecture: str = "sm_90a") -> dict[str, KernelResources]:
    """Resources of the kernels of a PTX program as NVIDIA's assembler reports them, the one that `make setup` brings.

    The assembler inside XLA may be of another version, so registers may differ by a few from those of a cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "program.ptx"
        source.write_text(ptx)
        command = [str(ptxas()), "-v", f"-arch={architecture}", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ptx must assemble for {architecture}: {(done.stderr.strip().splitlines() or ['?'])[0]}")
    found: dict[str, KernelResources] = {}
    for report in done.stderr.split("Compiling entry function '")[1:]:
        stack, stores, loads = _numbers(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        (registers,) = _numbers(r"Used (\d+) registers", report)
        shared = re.search(r"(\d+) bytes smem", report)
        found[report.partition("'")[0]] = KernelResources(
            registers=registers,
            stack_bytes=stack,
            shared_bytes=int(shared[1]) if shared else 0,
            spill_bytes=stores + loads,
        )
    return found


def _numbers(pattern: str, report: str) -> tuple[int, ...]:
    match = re.search(pattern, report)
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
    return [
        _Section(_text(elf, start + name), size, link, b"" if kind == _NO_BITS else elf[place : place + size])
        for name, kind, _, _, place, size, link, _, _, _ in headers
    ]


def _symbols(sections: list[_Section]) -> list[str]:
    table = next(section for section in sections if section.name == ".symtab")
    names = sections[table.link].data
    starts = range(0, len(table.data), _SYMBOL_BYTES)
    return [_text(names, struct.unpack_from("<I", table.data, start)[0]) for start in starts]


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
