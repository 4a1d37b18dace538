"""Collectives of a compiled program, read from its HLO text: what is sent, how often, how many bytes.

An operation inside a loop counts as often as the loop runs, which XLA writes down (`known_trip_count`). A pair of
`-start` and `-done` counts once. An operation in a loop without a known count, or under a conditional, is refused: its
number would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("collective-permute", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-broadcast")
NUMBER_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(rf"\b({'|'.join(NUMBER_BYTES)})\[([\d,]*)\]")
_CALLERS = "body|condition|to_apply|calls|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"(?:{_CALLERS})=\{{?([^}}\s,]+(?:, %[^}}\s,]+)*)")
_TRIPS = re.compile(r'known_trip_count[":{ ]+n[": ]+(\d+)')


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation of the program."""

    kind: str
    dtype: str
    """Of its (first) array."""
    result_bytes: int
    """Of the result on one device: what a permute sends."""
    times: int
    """How often it runs."""

    @property
    def total_bytes(self) -> int:
        """Over the whole program."""
        return self.result_bytes * self.times


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a compiled program, `compiled.as_text()`."""
    bodies, entry = _computations(hlo)
    times = _times(bodies, entry)
    found: list[Collective] = []
    for name, lines in bodies.items():
        for line in lines:
            if match := _OPERATION.search(line):
                arrays = _ARRAY.findall(match[1])
                if match[3] and match[2] in ("collective-permute", "all-gather"):
                    arrays = arrays[len(arrays) // 2 :] if match[2] == "all-gather" else arrays[1:2]
                if times[name] is None:
                    raise ValueError(f"{match[2]} in {name} runs an unknown number of times; use loops of fixed length")
                size = sum(NUMBER_BYTES[t] * _product(d) for t, d in arrays)
                found.append(Collective(kind=match[2], dtype=arrays[0][0], result_bytes=size, times=times[name] or 0))
    return found


def permuted_bytes(found: Iterable[Collective], dtypes: Iterable[str] | None = None) -> int:
    """Bytes that one device sends in permutes, of these types only if given."""
    wanted = None if dtypes is None else set(dtypes)
    return sum(c.total_bytes for c in found if c.kind == "collective-permute" and (wanted is None or c.dtype in wanted))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name:
            bodies[name].append(line)
    if not entry:
        raise ValueError("hlo has no ENTRY computation; give compiled.as_text()")
    return bodies, entry


def _times(bodies: dict[str, list[str]], entry: str) -> dict[str, int | None]:
    """How often each computation runs; None where that is not known."""
    times: dict[str, int | None] = dict.fromkeys(bodies, 0)

    def visit(name: str, count: int | None) -> None:
        known = times.get(name)
        times[name] = None if known is None or count is None else known + count
        for line in bodies.get(name, []):
            trips = _TRIPS.search(line)
            for group in _CALLED.findall(line):
                for called in group.replace("%", "").split(", "):
                    if " while(" in line:
                        inner = count * int(trips[1]) if trips and count is not None else None
                    else:
                        inner = None if " conditional(" in line else count
                    visit(called, inner)

    visit(entry, 1)
    return times


def _product(dims: str) -> int:
    size = 1
    for d in filter(None, dims.split(",")):
        size *= int(d)
    return size
