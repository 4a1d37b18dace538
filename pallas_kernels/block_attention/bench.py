"""Times the implementations of block attention this machine can run: `python -m pallas_kernels.block_attention.bench`.

Causal attention of one row, forward alone and forward with backward. All that is compared takes turns in every round,
so that a busy machine slows all of them alike; medians are printed beside the ratio to the dense product of the same
round's median. "dense" keeps all scores in memory and is what one would write without kernels.
"""

from __future__ import annotations

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
from pallas_kernels.block_attention import KeyRange, block_attention, block_attention_backward
from pallas_kernels.block_attention.shapes import SHAPES, Shape

CPU_DEFAULT = ("small", "cpu_2048")
GPU_DEFAULT = ("long_context", "gpt_oss", "head_dim_256", "mqa")
INTERPRETED = ("small",)
"""Shapes at which interpreted kernels are timed: a step of theirs is a step of a loop on the host's processor."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result. Seconds are medians over rounds; cpu_seconds counts all threads of this process."""

    shape: str
    what: str  # "forward", or "both": forward and backward
    implementation: str
    seconds: float
    cpu_seconds: float
    over_dense: float  # cpu_seconds on a CPU, seconds on a GPU, over those of "dense"
    rounds: int
    device: str


def causal(shape: Shape) -> tuple[KeyRange, Array]:
    """What each query sees: keys up to its own place, at most `window` of them."""
    last = jnp.arange(shape.queries, dtype=jnp.int32)[None, :]
    first = jnp.maximum(last - (shape.window - 1), 0) if shape.window else jnp.zeros_like(last)
    return KeyRange(first, last), jnp.arange(shape.keys, dtype=jnp.int32)


def dense(q: Array, k: Array, v: Array, seen: KeyRange, index: Array, scale: float) -> Array:
    """Attention with all scores in memory. q [1, Tq, N, H], k and v [1, Tk, K, H] -> f32[1, Tq, N, H]."""
    rows, count, heads, width = q.shape
    q = q.reshape(rows, count, k.shape[2], heads // k.shape[2], width)
    scores = jnp.einsum("rqkgh,rjkh->rkgqj", q, k, preferred_element_type=jnp.float32) * scale
    place = index[None, None, :]
    visible = (place >= seen.first[..., None]) & (place <= seen.last[..., None])
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1).astype(v.dtype)
    out = jnp.einsum("rkgqj,rjkh->rqkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(rows, count, heads, width)


def programs(name: str, shape: Shape) -> dict[tuple[str, str], Callable[..., Any]]:
    """(what, implementation) -> compiled function of (q, k, v, d_out), for all that can run here."""
    seen, index = causal(shape)
    scale = shape.head_dim**-0.5

    def pair(implementation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        options: dict[str, Any] = {"scale": scale, "implementation": implementation}

        def forward(q: Array, k: Array, v: Array, d_out: Array) -> Any:
            return block_attention(q, k, v, seen, index, **options)

        def both(q: Array, k: Array, v: Array, d_out: Array) -> Any:
            part = block_attention(q, k, v, seen, index, **options)
            delta = jnp.sum(d_out.astype(jnp.float32) * part.out, axis=-1)
            return part, block_attention_backward(q, k, v, seen, index, part.lse, delta, d_out, **options)

        return forward, both

    def dense_forward(q: Array, k: Array, v: Array, d_out: Array) -> Any:
        return dense(q, k, v, seen, index, scale)

    def dense_both(q: Array, k: Array, v: Array, d_out: Array) -> Any:
        out, pull = jax.vjp(lambda q, k, v: dense(q, k, v, seen, index, scale), q, k, v)
        return out, pull(d_out.astype(jnp.float32))

    found = {"dense": (dense_forward, dense_both), "blockwise": pair("blockwise")}
    if jax.default_backend() == "gpu":
        found["pallas"] = pair("pallas")
    elif name in INTERPRETED:
        found["pallas_interpret"] = pair("pallas_interpret")
    return {
        (what, implementation): jax.jit(function)
        for implementation, functions in found.items()
        for what, function in zip(("forward", "both"), functions, strict=True)
    }


def measure(name: str, rounds: int) -> list[Row]:
    """Medians of one shape."""
    shape = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(shape.queries, shape.heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads)]
    sizes.append(sizes[0])
    arrays = [
        jax.random.normal(key, (1, *size, shape.head_dim), shape.dtype) for key, size in zip(keys, sizes, strict=True)
    ]
    compiled = programs(name, shape)
    for function in compiled.values():
        jax.block_until_ready(function(*arrays))
    wall: dict[tuple[str, str], list[float]] = {key: [] for key in compiled}
    busy: dict[tuple[str, str], list[float]] = {key: [] for key in compiled}
    for _ in range(rounds):
        for key, function in compiled.items():
            start, start_busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(function(*arrays))
            wall[key].append(time.perf_counter() - start)
            busy[key].append(time.process_time() - start_busy)
    counted = wall if jax.default_backend() == "gpu" else busy
    return [
        Row(
            shape=name,
            what=what,
            implementation=implementation,
            seconds=statistics.median(wall[what, implementation]),
            cpu_seconds=statistics.median(busy[what, implementation]),
            over_dense=statistics.median(counted[what, implementation]) / statistics.median(counted[what, "dense"]),
            rounds=rounds,
            device=jax.devices()[0].device_kind,
        )
        for what, implementation in compiled
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    default = GPU_DEFAULT if jax.default_backend() == "gpu" else CPU_DEFAULT
    given = parse(arguments, op="block_attention", about=__doc__, shapes=SHAPES, default=default, rounds=5)
    rows = [row for name in given.shapes for row in measure(name, given.rounds)]
    sys.stdout.write(f"{'shape':<18}{'what':<9}{'implementation':<18}{'seconds':>10}{'cpu s':>10}{'/ dense':>9}\n")
    for row in rows:
        sys.stdout.write(
            f"{row.shape:<18}{row.what:<9}{row.implementation:<18}"
            f"{row.seconds:>10.4f}{row.cpu_seconds:>10.4f}{row.over_dense:>9.3f}\n"
        )
    write_rows(given.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
