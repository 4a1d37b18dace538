"""Times the implementations of the product of few rows: `python -m pallas_kernels.skinny_matmul.bench`.

Each program goes through all weights of a shape, one after the other, as a decoding step does. All of a shape take
turns in every round, so that a busy machine slows all of them alike. What is looked for is the ratio to one row of the
same implementation: what a verify block costs in plain steps.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.bench_command import parse, write_rows
from pallas_kernels.skinny_matmul import PackedWeight, available, pack, skinny_matmul
from pallas_kernels.skinny_matmul.shapes import SHAPES, Shape

DEFAULT = ("256x1536", "768x4096")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result. Seconds are medians over rounds, of one product."""

    shape: str
    implementation: str  # "xla": of the matrix as it is; "native": of packed weights
    rows: int
    seconds: float
    over_one_row: float
    rounds: int
    load: float  # mean number of running processes over the last minute, at the end


def through(weights: Sequence[Any], x: Array, product: Callable[[Array, Any], Array]) -> Array:
    """All products; each waits for the one before it."""
    for weight in weights:
        x = x + 1e-6 * product(x, weight)[:, :1]
    return x


def programs(shape: Shape) -> dict[str, Callable[[Array], Array]]:
    """Implementation -> compiled function of x[M, K], for all that can run here."""
    keys = jax.random.split(jax.random.key(0), shape.weights)
    weights = [jax.random.normal(key, (shape.inputs, shape.outputs), jnp.float32) for key in keys]

    def native(x: Array, weight: PackedWeight) -> Array:
        return skinny_matmul(x, weight, implementation="native")

    dense = jax.jit(lambda weights, x: through(weights, x, jnp.matmul))
    found: dict[str, Callable[[Array], Array]] = {"xla": lambda x: dense(weights, x)}
    if available():
        packed = [pack(weight) for weight in weights]
        few = jax.jit(lambda packed, x: through(packed, x, native))
        found["native"] = lambda x: few(packed, x)
    return found


def measure(name: str, rounds: int, counts: Sequence[int] = ROWS) -> list[Row]:
    """Medians of one shape."""
    shape = SHAPES[name]
    functions = programs(shape)
    inputs = {rows: jax.random.normal(jax.random.key(rows), (rows, shape.inputs), jnp.float32) for rows in counts}
    taken: dict[tuple[str, int], list[float]] = {(kind, rows): [] for kind in functions for rows in counts}
    for kind, rows in taken:
        jax.block_until_ready(functions[kind](inputs[rows]))
    for _ in range(rounds):
        for kind, rows in taken:
            start = time.perf_counter()
            jax.block_until_ready(functions[kind](inputs[rows]))
            taken[kind, rows].append((time.perf_counter() - start) / shape.weights)
    median = {key: statistics.median(times) for key, times in taken.items()}
    return [
        Row(
            shape=name,
            implementation=kind,
            rows=rows,
            seconds=median[kind, rows],
            over_one_row=median[kind, rows] / median[kind, counts[0]],
            rounds=rounds,
            load=os.getloadavg()[0],
        )
        for kind, rows in taken
    ]


def table(rows: Sequence[Row]) -> str:
    """One line for each shape and implementation: microseconds, and below them the ratios to one row."""
    lines = [f"{'shape':<10}{'':<9}{'M':>8}" + "".join(f"{count:>8}" for count in ROWS)]
    for shape, kind in dict.fromkeys((row.shape, row.implementation) for row in rows):
        of = [row for row in rows if (row.shape, row.implementation) == (shape, kind)]
        lines.append(f"{shape:<10}{kind:<9}{'us':>8}" + "".join(f"{row.seconds * 1e6:>8.1f}" for row in of))
        lines.append(f"{'':<10}{'':<9}{'/ M=1':>8}" + "".join(f"{row.over_one_row:>8.2f}" for row in of))
    lines.append(f"load {rows[-1].load:.2f}, {rows[-1].rounds} rounds")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    given = parse(arguments, op="skinny_matmul", about=__doc__, shapes=SHAPES, default=DEFAULT, rounds=21)
    rows = [row for name in given.shapes for row in measure(name, given.rounds)]
    sys.stdout.write(table(rows))
    if not available():
        sys.stdout.write("native is not built: python -m pallas_kernels.skinny_matmul.build\n")
    write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
