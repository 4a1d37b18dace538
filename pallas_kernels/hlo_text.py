"""The text of a compiled program: computations, how often each runs, operations and the arrays of their types."""

from __future__ import annotations

import re
from dataclasses import dataclass

NUMBER_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(rf"\b({'|'.join(NUMBER_BYTES)})\[([\d,]*)\]")
_CALLERS = "body|condition|to_apply|calls|branch_computations|true_computation|false_computation"
_CALLED = re.compile(rf"(?:{_CALLERS})=\{{?([^}}\s,]+(?:, %[^}}\s,]+)*)")
_TRIPS = re.compile(r'known_trip_count[":{ ]+n[": ]+(\d+)')
_STATED_TRIPS = re.compile(r'op_name="[^"]*\bloop_of_(\d+)/while"')


@dataclass(frozen=True, kw_only=True)
class HloText:
    """A program cut into its computations."""

    bodies: dict[str, list[str]]
    """Lines of each computation; in a scheduled program they are in the order in which they are started."""
    entry: str

    @classmethod
    def of(cls, text: str) -> HloText:
        """Cut `compiled.as_text()`."""
        bodies: dict[str, list[str]] = {}
        entry = name = ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                name = match[2]
                bodies[name] = []
                entry = name if match[1] else entry
            elif name:
                bodies[name].append(line)
        if not entry:
            raise ValueError("hlo has no ENTRY computation; give compiled.as_text()")
        return cls(bodies=bodies, entry=entry)

    def times(self) -> dict[str, int | None]:
        """How often each computation runs.

        A loop body runs as often as XLA says (`known_trip_count`), or as the program says that hid it from XLA: a loop
        straight in a scope `loop_of_n` runs n times. None where that is not known: in a loop without a count, and under
        a conditional.
        """
        times: dict[str, int | None] = dict.fromkeys(self.bodies, 0)

        def visit(name: str, count: int | None) -> None:
            known = times.get(name)
            times[name] = None if known is None or count is None else known + count
            for line in self.bodies.get(name, []):
                trips = _TRIPS.search(line) or _STATED_TRIPS.search(line)
                for group in _CALLED.findall(line):
                    for called in group.replace("%", "").split(", "):
                        if " while(" in line:
                            inner = count * int(trips[1]) if trips and count is not None else None
                        else:
                            inner = None if " conditional(" in line else count
                        visit(called, inner)

        visit(self.entry, 1)
        return times


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One line of a computation: %name = type opcode(operands), attributes."""

    name: str
    opcode: str
    types: tuple[str, ...]
    """Its type; the parts of it where it is a tuple."""
    rest: str
    """Operands and attributes, as written."""

    @classmethod
    def of(cls, line: str) -> Operation | None:
        """Read a line; None where it is no operation."""
        named = _NAMED.match(line)
        if not named:
            return None
        text = line[named.end() :]
        end = _closing(text) + 1 if text.startswith("(") else text.find(" ")
        opcode, bracket, rest = text[end:].strip().partition("(")
        if end <= 0 or not bracket:
            return None
        types = _parts(text[1 : end - 1]) if text.startswith("(") else (text[:end],)
        return cls(name=named[1], opcode=opcode, types=types, rest=rest)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands."""
        inside = self.rest[: _closing("(" + self.rest) - 1]
        return tuple(part.split(" ")[-1].lstrip("%") for part in _parts(inside))


def arrays(type_text: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of all arrays in a type."""
    return [(dtype, NUMBER_BYTES[dtype] * _product(dims)) for dtype, dims in _ARRAY.findall(type_text)]


def _closing(text: str) -> int:
    """Where the bracket that `text` starts with is closed."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    return len(text) - 1


def _parts(text: str) -> tuple[str, ...]:
    """Split at the commas that are in no bracket of any kind."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return tuple(part for part in (*parts, text[start:].strip()) if part)


def _product(dims: str) -> int:
    size = 1
    for d in filter(None, dims.split(",")):
        size *= int(d)
    return size
