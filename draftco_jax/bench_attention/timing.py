"""What is measured: milliseconds that the local kernels keep this machine's CPU busy, taken in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from draftco_jax.profiling import median_ratio, summarise
from pallas_kernels.block_attention import Partial, block_attention
from pallas_kernels.block_attention.bench import causal, dense
from pallas_kernels.block_attention.shapes import Shape
from pallas_kernels.branch_attention import Branch, branch_attention

HEADS, KV_HEADS, WIDTH, BRANCH_KEYS = 2, 1, 64, 3
"""Small, so that all scores of 8,192 tokens, which the dense product keeps, fit a laptop."""


class Times(NamedTuple):
    """Seconds of one call, turn by turn."""

    wall: list[float]
    busy: list[float]  # of all threads of this process: what a busy machine disturbs least


def timed(tokens: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Medians and quartiles of the forward in float32; ratios are of the processor's time in the same turn.

    block, blockwise: causal attention of one document by the block op; block, dense: two products with all scores in
    memory; branch, blockwise: the branch op, 3 keys a token, merged with the trunk's result.
    """
    rows, over_dense, branch_over_block = [], {}, {}
    with jax.default_device(jax.devices("cpu")[0]):
        for count in tokens:
            times = in_turn(_calls(count), repetitions)
            for name, (wall, busy) in times.items():
                op, implementation = name.split("/")
                median, low, high = summarise([1e3 * seconds for seconds in busy])
                row = {"op": op, "implementation": implementation, "tokens": count, "median": median}
                wall_median = 1e3 * summarise(wall).median
                rows.append(row | {"lower_quartile": low, "upper_quartile": high, "wall_median": wall_median})
            over_dense[str(count)] = median_ratio(times["block/blockwise"].busy, times["block/dense"].busy)
            branch_over_block[str(count)] = median_ratio(times["branch/blockwise"].busy, times["block/blockwise"].busy)
    return {
        "cpu_milliseconds": rows,
        "cpu_blockwise_over_dense": over_dense,
        "cpu_branch_over_block": branch_over_block,
    }


def in_turn(calls: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, Times]:
    """Times of the calls taken in turn A B C A B C ..., after one call of each that compiles."""
    for call in calls.values():
        jax.block_until_ready(call())
    times = {name: Times([], []) for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            wall, busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            times[name].wall.append(time.perf_counter() - wall)
            times[name].busy.append(time.process_time() - busy)
    return times


def _calls(tokens: int) -> dict[str, Callable[[], Any]]:
    keys = jax.random.split(jax.random.key(0), 6)
    draw = lambda key, *dims: jax.random.normal(key, (1, tokens, *dims), jnp.float32)  # noqa: E731
    q, k, v = draw(keys[0], HEADS, WIDTH), draw(keys[1], KV_HEADS, WIDTH), draw(keys[2], KV_HEADS, WIDTH)
    branch_shape = (BRANCH_KEYS, KV_HEADS, WIDTH)
    branch = Branch(draw(keys[3], *branch_shape), draw(keys[4], *branch_shape), jnp.ones((1, tokens), bool))
    trunk = Partial(draw(keys[5], 1, HEADS, WIDTH), jnp.zeros((1, tokens, 1, HEADS), jnp.float32))
    shape = Shape(queries=tokens, keys=tokens, heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, dtype="float32")
    (seen, index), scale = causal(shape), WIDTH**-0.5
    block = jax.jit(lambda q, k, v: block_attention(q, k, v, seen, index, scale=scale, implementation="blockwise"))
    whole = jax.jit(lambda q, k, v: dense(q, k, v, seen, index, scale))
    own = jax.jit(
        lambda q, trunk, branch: branch_attention(
            q, trunk, branch, None, scale=scale, rule="all", implementation="blockwise"
        )
    )
    return {
        "block/blockwise": lambda: block(q, k, v),
        "block/dense": lambda: whole(q, k, v),
        "branch/blockwise": lambda: own(q[:, :, None], trunk, branch),
    }
