"""What only the Pallas kernels of the block op promise: block sizes, bounds of the key kernel, what they refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import KeyRange, block_attention, block_attention_backward
from pallas_kernels.block_attention.pallas_common import Tiles
from pallas_kernels.block_attention.shapes import SHAPES, Shape
from pallas_kernels.block_attention.tuning import SM90, Blocks, Tuning, pick

SMALL = Blocks(block_q=16, block_k=16, num_warps=4, num_stages=2)


def inputs(dtype=jnp.float32, tokens=40):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, tokens, heads, 8)), dtype) for heads in (4, 2, 2))
    index = jnp.arange(tokens, dtype=jnp.int32)
    return q, k, v, KeyRange(jnp.zeros((1, tokens), jnp.int32), index[None, :]), index


def test_pallas_refuses_to_run_without_a_gpu_and_says_what_does():
    q, k, v, seen, index = inputs()
    wanted = r"implementation='pallas' must run on a GPU, not on platform='cpu'; use 'blockwise', or 'pallas_interpret'"
    with pytest.raises(ValueError, match=wanted):
        block_attention(q, k, v, seen, index, scale=1.0, implementation="pallas")
    stat = jnp.zeros((1, 40, 4))
    with pytest.raises(ValueError, match=wanted):
        block_attention_backward(q, k, v, seen, index, stat, stat, q, scale=1.0, implementation="pallas")


def test_pallas_refuses_float64_and_mixed_types():
    q, k, v, seen, index = inputs()
    options = {"scale": 1.0, "implementation": "pallas_interpret"}
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"dtype=float64 must be one of .*; use implementation='blockwise'"),
    ):
        block_attention(*(x.astype(jnp.float64) for x in (q, k, v)), seen, index, **options)
    stat = jnp.zeros((1, 40, 4))
    with pytest.raises(ValueError, match="of d_out and q must be equal"):
        block_attention_backward(q, k, v, seen, index, stat, stat, q.astype(jnp.bfloat16), **options)


def test_a_tuning_for_blockwise_is_refused():
    q, k, v, seen, index = inputs()
    tuning = Tuning(forward=SMALL, dq=SMALL, dkv=SMALL)
    with pytest.raises(ValueError, match="must be None for implementation='blockwise'; give tile instead"):
        block_attention(q, k, v, seen, index, scale=1.0, implementation="blockwise", tuning=tuning)


@pytest.mark.parametrize(
    ("field", "value"), [("block_q", 48), ("block_k", 8), ("block_k", 512), ("num_warps", 3), ("num_stages", 0)]
)
def test_block_sizes_that_cannot_be_compiled_are_refused(field, value):
    good = {"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 2}
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        Blocks(**(good | {field: value}))


def test_the_table_serves_every_width_and_type():
    for width in range(1, 257):
        up = 64 if width <= 64 else 128 if width <= 128 else 256
        assert pick(width, jnp.bfloat16) is pick(width, jnp.float16) is SM90[up, "half"]
        assert pick(width, jnp.float32) is SM90[up, "single"]
    with pytest.raises(ValueError, match="head_dim=257 must be <= 256"):
        pick(257, jnp.bfloat16)


def test_shapes_are_ones_the_op_takes():
    for shape in SHAPES.values():
        assert 1 <= shape.head_dim <= 256 and jnp.dtype(shape.dtype).itemsize in (2, 4)
    with pytest.raises(ValueError, match="heads=3 must be a multiple of kv_heads=2"):
        Shape(queries=1, keys=1, heads=3, kv_heads=2, head_dim=8)


def test_tiles_of_queries_that_see_a_tile_of_keys():
    """Over random ranges, bounds are the ends of the query tiles whose loop comes by, and hold all visible pairs."""
    rng = np.random.default_rng(1)
    queries, keys, t = 70, 90, 16
    place = np.sort(rng.choice(200, size=keys, replace=False)).astype(np.int32)
    centre = rng.integers(0, 180, size=(2, 1)) + np.arange(queries)[None, :] // 2
    first, last = centre, centre + rng.integers(-6, 12, size=centre.shape)
    seen = KeyRange(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))
    cut = Tiles(jnp.zeros((2, queries, 2, 8)), jnp.zeros((2, keys, 1, 8)), seen, jnp.asarray(place), SMALL)
    low, high, starts, ends = (np.asarray(x) for x in (cut.low, cut.high, *cut.query_tiles_of_keys()))
    unseen = visible = 0
    for row, b in np.ndindex(2, 6):
        tiles = [a for a in range(5) if low[row, a] <= b < high[row, a]]
        assert (starts[row, b], ends[row, b]) == ((tiles[0], tiles[-1] + 1) if tiles else (0, 0))
        unseen += not tiles
        index = place[b * t : (b + 1) * t]
        pairs = (index[None, :] >= first[row][:, None]) & (index[None, :] <= last[row][:, None])
        visible += pairs.sum()
        who = np.flatnonzero(pairs.any(axis=1)) // t
        assert all(starts[row, b] <= a < ends[row, b] for a in who)
    assert unseen and visible, "this test needs tiles of both kinds"


def test_interpreted_kernels_run_inside_shard_map_without_its_type_check():
    q, k, v, seen, index = inputs(tokens=16)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(q, k, v, first, last, index):
        seen = KeyRange(first, last)
        return block_attention(q, k, v, seen, index, scale=0.5, implementation="pallas_interpret").out

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    got = jax.jit(mapped)(q, k, v, *seen, index)
    want = block_attention(q, k, v, seen, index, scale=0.5, implementation="blockwise").out
    np.testing.assert_allclose(got, want, atol=2e-6)  # float32: 16 terms of order one
