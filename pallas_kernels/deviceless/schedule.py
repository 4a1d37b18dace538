"""What is under way at the same time in a scheduled program: each permute, and the work between its start and its end.

XLA writes a program for GPUs in the order in which it starts things. A permute that is asynchronous is started
(`collective-permute-start`) and waited for (`-done`); what stands between is computed meanwhile. A permute that is not
appears in two forms: marked `"is_sync":true` (jax 0.10), or without a start and an end (jax 0.11).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.hlo_text import HloText, Operation, arrays

Kind = Literal["loop", "kernel", "fusion", "call"]
"""loop: a while loop. kernel: a custom call (Pallas, jax-triton, a library). fusion: a kernel that XLA made. call: the
rest."""

_KINDS: dict[str, Kind] = {
    "while": "loop", "custom-call": "kernel", "fusion": "fusion", "call": "call", "conditional": "call",
    "async-start": "call",
}  # fmt: skip
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_KERNEL = re.compile(r'\bname = \\*"([^"\\]+)')
_SYNCHRONOUS = re.compile(r'\\*"is_sync\\*":true')


@dataclass(frozen=True, kw_only=True)
class Work:
    """Something a device computes."""

    name: str
    """Of the operation in the program."""
    kind: Kind
    label: str
    """Name of the kernel or target of the custom call; otherwise the place in the source that it was made from."""


@dataclass(frozen=True, kw_only=True)
class PermuteSpan:
    """One permute."""

    name: str
    computation: str
    source: str
    """The place in the traced function that it comes from, JAX's `op_name`."""
    dtype: str
    """Of its (first) array."""
    bytes: int
    """What one device sends each time."""
    times: int | None
    """How often it runs; None where the program does not say."""
    asynchronous: bool
    overlaps: tuple[Work, ...]
    """What is started while it is under way."""

    @property
    def hidden(self) -> bool:
        """Whether a loop or a kernel that is not a mere fusion runs meanwhile."""
        return self.asynchronous and any(work.kind in ("loop", "kernel") for work in self.overlaps)


@dataclass(frozen=True, kw_only=True)
class PlacedPermute:
    """A permute and its place in the order of its computation."""

    span: PermuteSpan
    start: int
    """Works that are started before it."""
    end: int
    """Works that are started before it is waited for; `start` where it is waited for at once."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A computation that sends something: all its work, in the order in which it is started."""

    computation: str
    times: int | None
    """How often it runs; None where the program does not say."""
    works: tuple[Work, ...]
    permutes: tuple[PlacedPermute, ...]


def orders(hlo: str) -> list[Order]:
    """The computations of a scheduled program, `compiled.as_text()`, that have permutes. Order only: no durations."""
    program, found = HloText.of(hlo), []
    times = program.times()
    for name, lines in program.bodies.items():
        spans = _spans(name, lines, times[name]) if times[name] != 0 else []
        if not spans:
            continue
        operations = [operation for operation in map(Operation.of, lines) if operation is not None]
        works = [(place, _work(operation)) for place, operation in enumerate(operations) if operation.opcode in _KINDS]
        starts = {operation.name: place for place, operation in enumerate(operations)}
        before = [sum(at < starts[span.name] for at, _ in works) for span in spans]
        placed = [
            PlacedPermute(span=span, start=first, end=first + len(span.overlaps))
            for span, first in zip(spans, before, strict=True)
        ]
        found.append(
            Order(
                computation=name,
                times=times[name],
                works=tuple(work for _, work in works),
                permutes=tuple(placed),
            )
        )
    return found


def permutes(hlo: str) -> list[PermuteSpan]:
    """All permutes of a scheduled program, `compiled.as_text()`; in each computation in the order of their starts."""
    program = HloText.of(hlo)
    times = program.times()
    return [
        span for name, lines in program.bodies.items() if times[name] != 0 for span in _spans(name, lines, times[name])
    ]


def _spans(computation: str, lines: list[str], times: int | None) -> list[PermuteSpan]:
    operations = [operation for operation in map(Operation.of, lines) if operation is not None]
    found = []
    for place, operation in enumerate(operations):
        if operation.opcode == "collective-permute":
            found.append(_span(computation, operation, times, None))
        elif operation.opcode == "collective-permute-start":
            meanwhile = _until_done(operation, operations[place + 1 :])
            synchronous = _SYNCHRONOUS.search(operation.rest) is not None
            found.append(_span(computation, operation, times, None if synchronous else meanwhile))
    return found


def _until_done(start: Operation, following: list[Operation]) -> list[Operation]:
    for place, operation in enumerate(following):
        if operation.opcode == "collective-permute-done" and operation.operands == (start.name,):
            return following[:place]
    raise ValueError(f"permute {start.name} must have an end in its computation; give compiled.as_text()")


def _span(computation: str, permute: Operation, times: int | None, meanwhile: list[Operation] | None) -> PermuteSpan:
    """`meanwhile` is None for a permute that is waited for at once."""
    result = permute.types[1] if permute.opcode.endswith("-start") else ", ".join(permute.types)
    sent = arrays(result)
    source = _OP_NAME.search(permute.rest)
    return PermuteSpan(
        name=permute.name,
        computation=computation,
        source=source[1] if source else "",
        dtype=sent[0][0],
        bytes=sum(size for _, size in sent),
        times=times,
        asynchronous=meanwhile is not None,
        overlaps=tuple(_work(operation) for operation in meanwhile or [] if operation.opcode in _KINDS),
    )


def _work(operation: Operation) -> Work:
    target = _TARGET.search(operation.rest)
    kernel = _KERNEL.search(operation.rest) if target else None
    source = _OP_NAME.search(operation.rest)
    label = next((match[1] for match in (kernel, target, source) if match), "")
    return Work(name=operation.name, kind=_KINDS[operation.opcode], label=label)
