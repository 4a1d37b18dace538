"""Contract of the block op: value, lse and gradients of one block, the merge, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import (
    IMPLEMENTATIONS,
    MAX_HEAD_DIM,
    KeyRange,
    Partial,
    block_attention,
    block_attention_backward,
    empty_partial,
    merge,
)
from pallas_kernels.block_attention.reference import NO_KEY, tile_bounds
from pallas_kernels.block_attention.tuning import Blocks, Tuning

# "pallas" needs a GPU; its kernels run here as "pallas_interpret".
NAMES = sorted(set(IMPLEMENTATIONS) - {"pallas"})
ROUNDING = 1e-6  # float32: sums of some tens of products, relative to the largest entry
BF16 = 1e-2  # bfloat16 inputs and gradients (a rounding is 4e-3), float32 statistics

# (queries, keys, tile): one, one under, at and over a tile, several tiles, and neither a multiple (B52).
SIZES = [(1, 1, 16), (15, 17, 16), (16, 16, 16), (17, 33, 16), (40, 72, 16)]


def cut(name, tile):
    """The option by which this implementation is told to work in tiles of `tile`."""
    if name == "blockwise":
        return {"tile": tile}
    blocks = Blocks(block_q=tile, block_k=tile, num_warps=4, num_stages=2)
    return {"tuning": Tuning(forward=blocks, dq=blocks, dkv=blocks)}


def make(seed, queries, keys, *, rows=1, heads=4, kv_heads=2, width=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = ((rows, queries, heads, width), (rows, keys, kv_heads, width), (rows, keys, kv_heads, width))
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    d_out = jnp.asarray(rng.normal(size=q.shape), dtype)
    return q, k, v, d_out


def ragged(queries, keys, rows=1):
    """Ranges of all kinds: whole, empty, one key, a window, beyond either end."""
    index = 3 + 2 * np.arange(keys)  # places need not be dense
    t = np.arange(queries)[None, :] + np.zeros((rows, 1), int)
    first = np.select([t % 5 == 0, t % 5 == 1, t % 5 == 2], [0, 1, index[0]], 3 + t)
    last = np.select([t % 5 == 0, t % 5 == 1, t % 5 == 2], [2**31 - 2, 0, index[0]], 5 + 3 * t)
    return KeyRange(jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)), jnp.asarray(index, jnp.int32)


@functools.partial(jax.jit, static_argnames=("name", "tile", "scale"))
def run(name, q, k, v, seen, index, d_out, *, tile, scale=0.4):
    options = {"scale": scale, "implementation": name, **cut(name, tile)}
    part = block_attention(q, k, v, seen, index, **options)
    delta = jnp.sum(d_out.astype(jnp.float32) * part.out, axis=-1)
    return part, block_attention_backward(q, k, v, seen, index, part.lse, delta, d_out, **options)


def mask_of(seen, index, row=0):
    i = np.asarray(index)[None, :]
    return (i >= np.asarray(seen.first)[row][:, None]) & (i <= np.asarray(seen.last)[row][:, None])


def worst(dense, got, q, k, v, mask, d_out, row=0, scale=0.4):
    part, grads = got
    f64 = lambda x: np.asarray(x[row], np.float64)  # noqa: E731
    ref = dense.dense_attention(f64(q), f64(k), f64(v), mask, scale=scale, d_out=f64(d_out))
    pairs = ((part.out, ref.out), (part.lse, ref.lse), (grads.q, ref.dq), (grads.k, ref.dk), (grads.v, ref.dv))
    return max(dense.relative(a[row], b) for a, b in pairs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("queries", "keys", "tile"), SIZES)
def test_bug_case_b52_any_length_and_any_range_equals_the_dense_reference(dense, name, queries, keys, tile):
    q, k, v, d_out = make(queries, queries, keys, rows=2)
    seen, index = ragged(queries, keys, rows=2)
    got = run(name, q, k, v, seen, index, d_out, tile=tile)
    for row in range(2):
        assert worst(dense, got, q, k, v, mask_of(seen, index, row), d_out, row) < ROUNDING


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 1, 8), (4, 4, 4), (2, 1, MAX_HEAD_DIM)])
def test_groups_of_heads_and_widths(dense, name, heads, kv_heads, width):
    q, k, v, d_out = make(1, 10, 12, heads=heads, kv_heads=kv_heads, width=width)
    seen, index = ragged(10, 12)
    scale = width**-0.5
    got = run(name, q, k, v, seen, index, d_out, tile=16, scale=scale)
    assert worst(dense, got, q, k, v, mask_of(seen, index), d_out, scale=scale) < ROUNDING


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_inputs_keep_float32_statistics(dense, name):
    q, k, v, d_out = make(2, 24, 40, dtype=jnp.bfloat16)
    seen, index = ragged(24, 40)
    part, grads = run(name, q, k, v, seen, index, d_out, tile=16)
    assert {x.dtype for x in (*part, *grads)} == {jnp.dtype(jnp.float32)}
    assert worst(dense, (part, grads), q, k, v, mask_of(seen, index), d_out) < BF16
    # The lse is not rounded to bfloat16 (4e-3): only products of rounded inputs are in it.
    ref = dense.dense_attention(q[0], k[0], v[0], mask_of(seen, index), scale=0.4, d_out=d_out[0])
    assert dense.relative(part.lse[0], ref.lse) < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [300.0, 1e4])
def test_scores_far_from_zero_neither_overflow_nor_vanish(dense, name, size):
    """A masked score may be any distance above the lse: exp of it must not be taken (pytorch 196678)."""
    q, k, v, d_out = make(3, 8, 8)
    index = jnp.arange(8, dtype=jnp.int32)
    seen = KeyRange(jnp.zeros((1, 8), jnp.int32), jnp.arange(8, dtype=jnp.int32)[None, :])
    k = k.at[:, :, :, 0].set(jnp.linspace(-size, size, 8)[None, :, None])  # later, unseen keys score far higher
    q = q.at[..., 0].set(1.0)
    got = run(name, q, k, v, seen, index, d_out, tile=16)
    # One key has nearly all the mass, so its d_out . v and delta cancel in the gradient of its score. Each is a sum of
    # 8 products in an order that the processor decides, 8 roundings of 6e-8; what is left is times a key of `size`.
    assert worst(dense, got, q, k, v, mask_of(seen, index), d_out) < size * 2 * 8 * 6e-8


@pytest.mark.parametrize("name", NAMES)
def test_nothing_visible_gives_zeros_and_minus_infinity(name):
    q, k, v, d_out = make(4, 5, 6)
    none = KeyRange(jnp.ones((1, 5), jnp.int32), jnp.zeros((1, 5), jnp.int32))
    part, grads = run(name, q, k, v, none, jnp.arange(6, dtype=jnp.int32), d_out, tile=16)
    assert np.all(np.isneginf(part.lse)) and not np.any(part.out)
    assert not any(np.any(g) for g in grads)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_seen_is_not_read(name):
    """NaN in tiles of keys that nobody sees, and in a tile of queries that sees nothing, reaches nothing."""
    q, k, v, d_out = make(5, 32, 48)
    index = jnp.arange(48, dtype=jnp.int32)
    live = jnp.arange(32)[None, :] >= 16  # the first tile of queries sees nothing
    seen = KeyRange(jnp.where(live, 16, 1), jnp.where(live, 31, 0))
    clean = run(name, q, k, v, seen, index, d_out, tile=16)
    poison = lambda x: x.at[:, :16].set(jnp.nan).at[:, 32:].set(jnp.nan)  # noqa: E731
    q = q.at[:, :16].set(jnp.nan)
    dirty = run(name, q, poison(k), poison(v), seen, index, d_out, tile=16)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_two_blocks_merged_are_one(dense, name):
    """Forward by merge; backward by handing the merged lse and delta to each block (tt-metal 53205: not its own)."""
    q, k, v, d_out = make(6, 20, 40)
    seen, index = ragged(20, 40)
    halves = [(k[:, :17], v[:, :17], index[:17]), (k[:, 17:], v[:, 17:], index[17:])]
    options = {"scale": 0.4, "implementation": name, **cut(name, 16)}

    @jax.jit
    def ring():
        parts = [block_attention(q, *kv, seen, i, **options) for *kv, i in halves]
        whole = merge(*parts)
        delta = jnp.sum(d_out * whole.out, axis=-1)
        grads = [block_attention_backward(q, *kv, seen, i, whole.lse, delta, d_out, **options) for *kv, i in halves]
        delta = jnp.sum(d_out * parts[0].out, axis=-1)
        own = block_attention_backward(q, *halves[0][:2], seen, halves[0][2], parts[0].lse, delta, d_out, **options)
        return whole, grads, own

    whole, grads, own = ring()
    ref = dense.dense_attention(q[0], k[0], v[0], mask_of(seen, index), scale=0.4, d_out=d_out[0])
    assert dense.relative(whole.out[0], ref.out) < ROUNDING
    assert dense.relative(whole.lse[0], ref.lse) < ROUNDING
    assert dense.relative((grads[0].q + grads[1].q)[0], ref.dq) < ROUNDING
    assert dense.relative(jnp.concatenate([g.k for g in grads], axis=1)[0], ref.dk) < ROUNDING
    assert dense.relative(jnp.concatenate([g.v for g in grads], axis=1)[0], ref.dv) < ROUNDING
    assert dense.relative(own.k[0], ref.dk[:17]) > 0.05, "this test could not tell the merged lse from a block's own"


def lse_of(values):
    lse = jnp.asarray(values, jnp.float32).reshape(1, 1, -1)
    rng = np.random.default_rng(len(values))
    return Partial(jnp.asarray(rng.normal(size=(*lse.shape, 4)), jnp.float32), lse)


@pytest.mark.parametrize("gap", [0.0, 1.0, 200.0, 1e4])
def test_merge_is_exact_at_any_gap_and_symmetric(gap):
    """log(1 + exp(d)) overflows at a gap of 89 (EasyContext 14); the larger lse is taken out first."""
    a, b = lse_of([3.0 + gap, -gap]), lse_of([3.0, 2.0])
    one, other = merge(a, b), merge(b, a)
    la, lb = np.float64(a.lse), np.float64(b.lse)
    top = np.maximum(la, lb)
    wa, wb = np.exp(la - top)[..., None], np.exp(lb - top)[..., None]
    wanted = (np.float64(a.out) * wa + np.float64(b.out) * wb) / (wa + wb)
    np.testing.assert_allclose(one.out, wanted, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(one.lse, np.logaddexp(la, lb), rtol=1e-6)
    np.testing.assert_array_equal(one.out, other.out)
    np.testing.assert_array_equal(one.lse, other.lse)


def test_merge_with_an_empty_side_changes_nothing():
    """The sigmoid form of the merge gives NaN where the RUNNING side is empty."""
    live, none = lse_of([3.0, -700.0]), empty_partial((1, 1, 2, 4), jnp.float32, frozenset())
    for merged in (merge(live, none), merge(none, live)):
        np.testing.assert_array_equal(merged.out, live.out)
        np.testing.assert_array_equal(merged.lse, live.lse)
    both = merge(none, none)
    assert np.all(np.isneginf(both.lse)) and not np.any(both.out)


def test_tiles_outside_the_ranges_are_skipped():
    """Work follows what is visible: the loop bounds of a tile are the first and last tile it sees."""
    index = jnp.asarray([*range(4), *range(100, 104), *range(200, 204), NO_KEY, NO_KEY, NO_KEY, NO_KEY], jnp.int32)
    first = jnp.asarray([[100, 101], [1, 1], [50, 60], [0, 1]], jnp.int32)  # a mask; nothing; between tiles; padding
    last = jnp.asarray([[102, 200], [0, 0], [60, 99], [NO_KEY - 1, 0]], jnp.int32)
    low, high = tile_bounds(first, last, index.reshape(4, 4))
    assert list(zip(low.tolist(), high.tolist(), strict=True))[0] == (1, 3)
    assert all(lo >= hi for lo, hi in zip(low.tolist()[1:3], high.tolist()[1:3], strict=True))
    assert (low[3], high[3]) == (0, 3)


def test_refusals_say_what_and_why():
    q, k, v, _ = make(7, 4, 4)
    seen, index = ragged(4, 4)
    good = {"scale": 1.0, "implementation": "blockwise"}
    with pytest.raises(ValueError, match="implementation='cudnn' must be one of"):
        block_attention(q, k, v, seen, index, scale=1.0, implementation="cudnn")
    with pytest.raises(ValueError, match="heads=3 must be a multiple of kv_heads=2"):
        block_attention(q[:, :, :3], k, v, seen, index, **good)
    with pytest.raises(ValueError, match=r"head_dim=257 must be in 1..256"):
        wide = jnp.zeros((1, 4, 2, 257))
        block_attention(wide, wide, wide, seen, index, **good)
    with pytest.raises(ValueError, match="dtypes="):
        block_attention(q.astype(jnp.bfloat16), k, v, seen, index, **good)
    with pytest.raises(ValueError, match="seen="):
        block_attention(q, k, v, KeyRange(seen.first[:, :3], seen.last), index, **good)
