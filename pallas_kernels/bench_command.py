"""What the bench commands of all ops have in common: their options, and rows as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple


class Given(NamedTuple):
    """Options of one call."""

    shapes: Sequence[str]
    rounds: int
    json: Path | None


def parse(
    arguments: Sequence[str] | None,
    *,
    op: str,
    about: str | None,
    shapes: Iterable[str],
    default: Sequence[str],
    rounds: int,
) -> Given:
    """Options of `python -m pallas_kernels.OP.bench`; bad ones end the process with one line and status 2."""
    parser = argparse.ArgumentParser(prog=f"python -m pallas_kernels.{op}.bench", description=about)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"times each program runs (default {rounds})")
    parser.add_argument("--shape", action="append", choices=sorted(shapes), help="may be given several times")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"rounds={given.rounds} must be >= 1; {rounds} is the default")
    return Given(given.shape or default, given.rounds, given.json)


def write_rows(path: Path | None, rows: Sequence[Any]) -> None:
    """The rows, dataclasses, as a JSON list; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
