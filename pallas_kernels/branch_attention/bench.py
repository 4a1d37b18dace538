"""Times branch attention as this machine can run it: `python -m pallas_kernels.branch_attention.bench`.

The op moves data and hardly computes, so beside the seconds stand the bytes: those that must move (every input read
once, every output written once) and those that each implementation moves. For a kernel they are counted from its
tiles, for "blockwise" they are what the compiler says its operations read and write. All that is compared takes turns
in every round, so that a busy machine slows all of them alike; seconds are medians.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_command import parse, write_rows
from pallas_kernels.block_attention.records import Partial
from pallas_kernels.branch_attention import Branch, branch_attention, branch_attention_backward
from pallas_kernels.branch_attention.pallas_block import chunks
from pallas_kernels.branch_attention.shapes import SHAPES, Shape
from pallas_kernels.branch_attention.tuning import Tuning, pick

WHATS = ("forward", "backward")
CPU_DEFAULT = ("small_pass4", "small_block8")
GPU_DEFAULT = tuple(name for name in SHAPES if not name.startswith("small"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result."""

    shape: str
    what: str
    implementation: str
    seconds: float
    over_blockwise: float
    """Seconds over those of "blockwise": the reference, whose operations are not one kernel."""
    bytes_moved: float
    bytes_over_minimum: float
    gigabytes_per_second: float
    """Of the bytes that must move, so that implementations compare; an H100 has 3350."""
    rounds: int
    device: str


def kernel_bytes(shape: Shape, what: str, sizes: Tuning) -> int:
    """Bytes that a kernel asks for: the minimum, and keys and values once more for every further chunk of rows."""
    d = shape.dims
    forward, backward = shape.minimum_bytes()
    if what == "backward":
        return backward
    again = chunks(d, sizes.forward) - 1 if d.route == "block" else 0
    return forward + again * 2 * shape.dtype.itemsize * d.branches * d.keys * d.kv_heads * d.width


def runnable() -> list[str]:
    """Implementations that run on this machine."""
    if jax.default_backend() != "gpu":
        return ["blockwise", "pallas_interpret"]
    return ["blockwise", "pallas"] + ["jax_triton"] * (importlib.util.find_spec("jax_triton") is not None)


def arrays(shape: Shape) -> dict[str, tuple[Any, ...]]:
    """Arguments of the forward and of the backward; all branches are live."""
    d = shape.dims
    keys = jax.random.split(jax.random.key(0), 6)
    wide, flat, short = (1, d.branches, d.queries, d.heads, d.width), (1, d.branches, d.queries, d.heads), d.keys
    q = jax.random.normal(keys[0], wide, shape.dtype)
    trunk = Partial(jax.random.normal(keys[1], wide), jax.random.normal(keys[2], flat))
    kv = [jax.random.normal(key, (1, d.branches, short, d.kv_heads, d.width), shape.dtype) for key in keys[3:5]]
    branch = Branch(kv[0], kv[1], jnp.ones((1, d.branches), bool))
    d_out = jax.random.normal(keys[5], wide, shape.dtype)
    # Any lse and delta cost the same; these are of the right size.
    return {"forward": (q, trunk, branch), "backward": (q, branch, trunk.lse + 5.0, trunk.lse, d_out)}


def program(shape: Shape, what: str, implementation: str) -> Callable[..., Any]:
    """One direction of one implementation, without sinks."""
    options: dict[str, Any] = {
        "scale": shape.dims.width**-0.5,
        "rule": shape.rule,
        "implementation": implementation,
    }
    if what == "forward":
        return lambda q, trunk, branch: branch_attention(q, trunk, branch, None, **options)
    return lambda q, branch, lse, delta, d_out: branch_attention_backward(q, branch, None, lse, delta, d_out, **options)


def measure(name: str, rounds: int) -> list[Row]:
    """Medians of one shape."""
    shape, given = SHAPES[name], arrays(SHAPES[name])
    compiled = {(w, i): jax.jit(program(shape, w, i)).lower(*given[w]).compile() for w in WHATS for i in runnable()}
    for (what, _), run in compiled.items():
        jax.block_until_ready(run(*given[what]))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in compiled}
    for _ in range(rounds):
        for key, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*given[key[0]]))
            seconds[key].append(time.perf_counter() - start)
    sizes = pick(shape.dims, shape.dtype)
    rows = []
    for what, implementation in compiled:
        median = statistics.median(seconds[what, implementation])
        least = shape.minimum_bytes()[WHATS.index(what)]
        moved = kernel_bytes(shape, what, sizes)
        if implementation == "blockwise":
            moved = (compiled[what, implementation].cost_analysis() or {})["bytes accessed"]
        rows.append(
            Row(
                shape=name,
                what=what,
                implementation=implementation,
                seconds=median,
                over_blockwise=median / statistics.median(seconds[what, "blockwise"]),
                bytes_moved=moved,
                bytes_over_minimum=moved / least,
                gigabytes_per_second=least / median / 1e9,
                rounds=rounds,
                device=jax.devices()[0].device_kind,
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    default = GPU_DEFAULT if jax.default_backend() == "gpu" else CPU_DEFAULT
    given = parse(arguments, op="branch_attention", about=__doc__, shapes=SHAPES, default=default, rounds=11)
    rows = [row for name in given.shapes for row in measure(name, given.rounds)]
    head = ("shape", "what", "implementation", "seconds", "/ blockwise", "MB", "/ minimum", "GB/s")
    sys.stdout.write("{:<24}{:<10}{:<18}{:>10}{:>13}{:>10}{:>11}{:>8}\n".format(*head))
    for row in rows:
        sys.stdout.write(
            f"{row.shape:<24}{row.what:<10}{row.implementation:<18}{row.seconds:>10.6f}{row.over_blockwise:>13.3f}"
            f"{row.bytes_moved / 1e6:>10.3f}{row.bytes_over_minimum:>11.2f}{row.gigabytes_per_second:>8.2f}\n"
        )
    write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
