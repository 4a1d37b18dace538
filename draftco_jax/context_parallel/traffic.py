"""Collectives of a compiled program, read from its HLO text: what is sent, how often, how many bytes.

An operation inside a loop counts as often as the loop runs, which XLA writes down (`known_trip_count`). A pair of
`-start` and `-done` counts once. An operation in a loop without a known count, or under a conditional, is refused: its
number would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pallas_kernels.hlo_text import HloText, Operation, arrays

KINDS = ("collective-permute", "all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-broadcast")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_NAME = re.compile(r'op_name="([^"]*)"')


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
    pairs: int = 0
    """Senders of a permute, of all devices."""
    name: str = ""
    """Where it stands in the source: names of scopes and transformations."""

    @property
    def total_bytes(self) -> int:
        """Over the whole program."""
        return self.result_bytes * self.times


def collectives(hlo: str) -> list[Collective]:
    """All collectives of a compiled program, `compiled.as_text()`."""
    program = HloText.of(hlo)
    times = program.times()
    found: list[Collective] = []
    for name, lines in program.bodies.items():
        for operation in filter(None, map(Operation.of, lines)):
            kind = operation.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            count = times[name]
            if count is None:
                raise ValueError(f"{kind} in {name} runs an unknown number of times; use loops of fixed length")
            results = operation.types
            if operation.opcode.endswith("-start") and kind in ("collective-permute", "all-gather"):
                results = results[1:2]  # (operands, results, ...)
            sent = [array for result in results for array in arrays(result)]
            size = sum(size for _, size in sent)
            pairs, said = _PAIRS.search(operation.rest), _NAME.search(operation.rest)
            found.append(
                Collective(
                    kind=kind,
                    dtype=sent[0][0],
                    result_bytes=size,
                    times=count,
                    pairs=pairs[1].count("{") if pairs else 0,
                    name=said[1] if said else "",
                )
            )
    return found


def permuted_bytes(found: Iterable[Collective], dtypes: Iterable[str] | None = None) -> int:
    """Bytes that one device sends in permutes, of these types only if given."""
    wanted = None if dtypes is None else set(dtypes)
    return sum(c.total_bytes for c in found if c.kind == "collective-permute" and (wanted is None or c.dtype in wanted))
