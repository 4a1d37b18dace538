"""Registers, stack and shared memory of every kernel of a compiled program.

A serialized program is a set of nested protobuf messages with the machine code of its kernels in them. They are
searched for what is needed instead of being read by a schema, which is XLA's own and changes:

    XLA's and Pallas' kernels   machine code; a record of the launch beside it (name, threads, dynamic shared memory)
    jax-triton's                a compressed record: name, warps, shared memory, and PTX that is assembled when the
                                program is first run; assembled here by the `ptxas` of `make setup`
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import zlib
from typing import Any, NamedTuple

import jax

from pallas_kernels.deviceless.machine_code import ELF, KernelResources, cubin_resources, ptxas_resources
from pallas_kernels.deviceless.riegeli import records, varint

_PTX = re.compile(rb"\A(//[^\n]*\n)*\s*\.version ")
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_ZLIB = b"\x78"
_WARP = 32

Message = list[tuple[int, int | bytes]]


class _Launch(NamedTuple):
    """How a kernel is started."""

    name: str
    threads: int
    """Of a block."""
    shared: int
    """Dynamic shared memory of a block, in bytes."""


class _Found(NamedTuple):
    """What a search has come across, each with its launch where that is known."""

    cubins: list[tuple[bytes, _Launch | None]]
    ptx: list[tuple[str, _Launch]]
    """Of kernels that are assembled later."""


def kernel_resources(compiled: jax.stages.Compiled) -> dict[str, KernelResources]:
    """Resources of all kernels of a program, by name."""
    executable: Any = compiled.runtime_executable()
    return serialized_resources(executable.serialize())


def serialized_resources(program: bytes) -> dict[str, KernelResources]:
    """`kernel_resources` of a serialized GPU executable."""
    found = _Found([], [])
    for record in records(program):
        _search(record, None, found)
    kernels: dict[str, KernelResources] = {}
    for cubin, launch in found.cubins:
        for name, kernel in cubin_resources(cubin).items():
            _note(kernels, name, _launched(name, kernel, launch))
    assembled = set(kernels)
    for ptx, launch in found.ptx:
        if launch.name not in assembled:
            target = _TARGET.search(ptx)
            for name, kernel in ptxas_resources(ptx, target[1] if target else "sm_90a").items():
                _note(kernels, name, _launched(name, kernel, launch))
    return kernels


def _launched(name: str, kernel: KernelResources, launch: _Launch | None) -> KernelResources:
    if launch is None or launch.name != name:
        return kernel
    return dataclasses.replace(kernel, threads=launch.threads, shared_bytes=kernel.shared_bytes + launch.shared)


def _note(kernels: dict[str, KernelResources], name: str, kernel: KernelResources) -> None:
    """Under its name; other kernels of that name get a number: "name#2"."""
    names = (name if number == 1 else f"{name}#{number}" for number in itertools.count(1))
    free = next(n for n in names if kernels.get(n, kernel) == kernel)
    kernels[free] = kernel


def ptx_options(folder: str) -> dict[str, str]:
    """Compiler options (`compile_for(options=...)`) that leave the PTX of a program in `folder`, as *.ptx."""
    return {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}


def _search(data: bytes, launch: _Launch | None, found: _Found) -> None:
    """Look for kernels in a message and in all that is in it; `launch` is that of the message around."""
    if data.startswith(ELF):
        found.cubins.append((data, launch))
        return
    if data.startswith(_ZLIB):
        try:
            data = zlib.decompress(data)
        except zlib.error:
            return
    message = _message(data)
    launch = _xla_launch(dict(message)) or _triton_launch(dict(message), found) or launch
    for _, value in message:
        if isinstance(value, bytes) and (ELF in value or _ZLIB in value or b".version " in value):
            _search(value, launch, found)


def _xla_launch(fields: dict[int, int | bytes]) -> _Launch | None:
    """If these are the fields of XLA's CustomKernelProto: 1 name, 2 program, 4 threads of a block, 6 shared memory."""
    name, program, block, shared = (fields.get(n) for n in (1, 2, 4, 6))
    if not (isinstance(name, bytes) and isinstance(program, bytes) and isinstance(block, bytes)):
        return None
    if ELF not in program or program.startswith(ELF):
        return None
    axes = [dict(_message(axis)) for _, axis in _message(block) if isinstance(axis, bytes)] or [dict(_message(block))]
    sizes = [size for axis in axes for size in axis.values() if isinstance(size, int)]
    return _Launch(name.decode(errors="replace"), math.prod(sizes), shared if isinstance(shared, int) else 0)


def _triton_launch(fields: dict[int, int | bytes], found: _Found) -> _Launch | None:
    """If these are the fields of jaxlib's TritonKernel: 1 name, 2 warps, 3 shared memory, 4 PTX, which is noted."""
    name, warps, shared, ptx = (fields.get(n) for n in (1, 2, 3, 4))
    if not (isinstance(name, bytes) and isinstance(warps, int) and isinstance(ptx, bytes) and _PTX.match(ptx)):
        return None
    launch = _Launch(name.decode(), warps * _WARP, shared if isinstance(shared, int) else 0)
    found.ptx.append((ptx.decode(), launch))
    return launch


def _message(data: bytes) -> Message:
    """(number, value) of all fields of a protobuf message; none where it is not one."""
    fields: Message = []
    place = 0
    try:
        while place < len(data):
            tag, place = varint(data, place)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, place = varint(data, place)
            elif wire in (1, 2, 5):
                size, place = varint(data, place) if wire == 2 else (8 if wire == 1 else 4, place)
                value, place = data[place : place + size], place + size
            else:
                return []
            if place > len(data):
                return []
            fields.append((number, value))
    except IndexError:
        return []
    return fields
