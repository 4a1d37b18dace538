"""Reports of other rings, replayed on this one: 32 tokens on 4 ranks, dense float64 answers, one program for most.

Ids: `report_NN` are numbers of the list of 17 reports about context parallelism, `bug_case_bNN` those of the cases.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from draftco_jax.context_parallel import (
    KeyRange,
    RingSpec,
    Zigzag,
    causal_range,
    from_ranks,
    local_index,
    ring,
    ring_attention,
    sharded_ring_attention,
    to_ranks,
)

AXIS, RANKS, ROWS, TOKENS, HEADS, KV_HEADS, WIDTH = "context", 4, 2, 32, 4, 2, 4
SCALE = WIDTH**-0.5  # a power of two: scores that are chosen are exact
SHARDED = PartitionSpec(None, AXIS)
CLOSE = 1e-6  # float32, sums of up to 32 terms; over the largest entry of each tensor
NAMES = ("out", "lse", "dq", "dk", "dv")


def build(cases, ranks, tokens=TOKENS):
    """A jitted function of arrays in natural order: out, lse, dq, dk, dv of one attention on a ring of `ranks`.

    `ends` widens what a token sees: up to the larger of itself and `ends`. 0 is plain causal attention.
    """
    layout = Zigzag(ranks=ranks, tokens=tokens)
    spec = RingSpec(layout=layout, axis=AXIS, scale=SCALE, tile=4)

    def local(q, k, v, segments, positions, ends):
        seen = causal_range(segments, positions, local_index(layout, AXIS))
        seen = KeyRange(seen.first, jnp.where(segments > 0, jnp.maximum(seen.last, ends), seen.last))
        return ring_attention(q, k, v, seen, spec=spec)

    mapped = jax.shard_map(local, mesh=cases.mesh_of(ranks), in_specs=(SHARDED,) * 6, out_specs=SHARDED)

    def attend(q, k, v, *ids):
        zig = (to_ranks(x, layout) for x in (q, k, v, *ids))
        return tuple(from_ranks(x, layout) for x in mapped(*zig))

    @jax.jit
    def solve(q, k, v, segments, positions, ends, d_out, d_lse):
        found, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segments, positions, ends), q, k, v)
        return *found, *pull((d_out, d_lse))

    return solve


@pytest.fixture(scope="module")
def solve(cases):
    return build(cases, RANKS)


def tensors(tokens=TOKENS, dtype=jnp.float32, seed=0):
    """q, k, v and cotangents of out and lse."""
    rng = np.random.default_rng(seed)
    wide, narrow = (ROWS, tokens, HEADS, WIDTH), (ROWS, tokens, KV_HEADS, WIDTH)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=s), dtype) for s in (wide, narrow, narrow, wide))
    return q, k, v, d_out, jnp.asarray(rng.normal(size=wide[:-1]), jnp.float32)


def run(solve, arrays, segments, positions, ends=None):
    q, k, v, d_out, d_lse = arrays
    ends = np.zeros_like(segments) if ends is None else ends
    ids = (jnp.asarray(x) for x in (segments, positions, ends))
    return dict(zip(NAMES, solve(q, k, v, *ids, d_out, d_lse), strict=True))


def answer(cases, arrays, segments, ends=None):
    """The same in float64, from a mask."""
    place = np.arange(segments.shape[1])
    last = np.broadcast_to(place, segments.shape)
    last = last if ends is None else np.maximum(last, ends)
    found = []
    for row, ids in enumerate(segments):
        mask = (ids[:, None] == ids[None, :]) & (ids > 0)[:, None] & (place[None, :] <= last[row][:, None])
        q, k, v, d_out, d_lse = (np.asarray(x[row], np.float64) for x in arrays)
        d_lse = np.where(mask.any(axis=1)[:, None], d_lse, 0.0)
        found.append(cases.DENSE.dense_attention(q, k, v, mask, scale=SCALE, d_out=d_out, d_lse=d_lse))
    return {name: np.stack([getattr(row, name) for row in found]) for name in NAMES}


def errors(cases, got, wanted):
    return {name: cases.DENSE.relative(got[name], wanted[name]) for name in NAMES}


def without_tails(segments, unit):
    """What is left where the length of each document is rounded down to a multiple of `unit`."""
    left = np.zeros_like(segments)
    for row, ids in enumerate(segments):
        for document in range(1, ids.max() + 1):
            places = np.flatnonzero(ids == document)
            left[row, places[: places.size // unit * unit]] = document
    return left


def test_report_01_a_tail_that_does_not_divide_keeps_its_keys_and_runs_repeat(cases, solve):
    """All documents are multiples of 2 C = 8 but the last of each row; lengths by division would drop its keys."""
    segments, positions = cases.packed_rows(((8, 16, 5), (24, 7)), TOKENS)
    arrays = tensors()
    got, again = run(solve, arrays, segments, positions), run(solve, arrays, segments, positions)
    found = errors(cases, got, answer(cases, arrays, segments))
    assert max(found.values()) < CLOSE, found
    for name in NAMES:
        np.testing.assert_array_equal(got[name], again[name])
    dropped = answer(cases, arrays, without_tails(segments, 8))
    assert min(cases.DENSE.relative(got[name], dropped[name]) for name in ("out", "dq", "dk", "dv")) > 0.05


def test_report_02_the_seventh_token_of_seven_counts(cases, solve):
    """A length of 7 is not 6: the last token attends and is attended to, by itself alone."""
    segments, positions = cases.packed_rows(((7,), (7, 9, 7)), TOKENS)
    arrays = tensors()
    got = run(solve, arrays, segments, positions)
    found = errors(cases, got, answer(cases, arrays, segments))
    assert max(found.values()) < CLOSE, found
    q, k, v, *cotangents = arrays
    moved = run(solve, (q, k, v.at[0, 6].add(1.0), *cotangents), segments, positions)
    changed = np.argwhere(np.any(np.asarray(got["out"] != moved["out"]), axis=(2, 3)))
    assert changed.tolist() == [[0, 6]]
    assert all(np.any(got[name][0, 6]) for name in ("out", "dq", "dk", "dv"))


def test_report_03_a_rank_whose_late_half_is_padding_has_finite_gradients(cases, solve):
    """Documents of 3 and 9 tokens: whole chunks of padding, which holds huge numbers, its cotangents too."""
    segments, positions = cases.packed_rows(((3,), (9,)), TOKENS)
    padding = segments == 0
    arrays = tensors()
    # 1e18: products of two of them are still finite in float32.
    dirty = tuple(jnp.where(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), 1e18, x) for x in arrays)
    got = run(solve, dirty, segments, positions)
    found = errors(cases, got, answer(cases, arrays, segments))
    assert max(found.values()) < CLOSE, found
    for name in ("out", "dq", "dk", "dv"):
        assert not np.any(np.asarray(got[name])[padding]), name


def test_report_05_ids_may_be_sharded_in_another_way_than_the_tokens(cases):
    """Under jit the ring gets its own sharding whatever that of segment ids and positions is: bit for bit the same."""
    layout = Zigzag(ranks=2, tokens=TOKENS)
    mesh = cases.mesh_of(2, data=2)
    attend = jax.jit(
        sharded_ring_attention(mesh, RingSpec(layout=layout, axis=AXIS, scale=SCALE, tile=8), batch_axis="data")
    )
    q, k, v, *_ = tensors()
    ids = [jnp.asarray(x) for x in cases.packed_rows(((5, 20), (31,)), TOKENS)]
    as_tokens = PartitionSpec("data", AXIS)

    def placed(*specs):
        values = (to_ranks(x, layout) for x in (q, k, v, *ids))
        return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(values, specs, strict=True)]

    alike = attend(*placed(*(as_tokens,) * 5))
    assert np.any(alike)
    mixed = attend(*placed(as_tokens, as_tokens, as_tokens, PartitionSpec(None, AXIS), PartitionSpec("data")))
    np.testing.assert_array_equal(alike, mixed)
    wanted = answer(cases, tensors(), np.asarray(ids[0]))["out"]
    assert cases.DENSE.relative(from_ranks(mixed, layout), wanted) < CLOSE


def test_report_06_bug_case_b45_bfloat16_gradients_are_as_good_on_eight_ranks_as_on_one(cases):
    """64 tokens, bfloat16 inputs: partial results and travelling gradients in bfloat16 would add up with the ring."""
    segments, positions = cases.packed_rows(((64,), (61,)), 64)
    arrays = tensors(64, jnp.bfloat16)
    wanted = answer(cases, arrays, segments)
    one, eight = (errors(cases, run(build(cases, c, 64), arrays, segments, positions), wanted) for c in (1, 8))
    for name in NAMES:
        # lse: float32 all the way, so its error is at the level of rounding and may double.
        assert eight[name] <= max(2 * one[name], 2e-7), (name, one, eight)
        assert one[name] < 1e-2


@pytest.mark.parametrize("rising", [True, False])
def test_report_07_block_results_200_apart_are_merged_exactly(cases, solve, rising):
    """Each chunk's scores lie 200 or more from the next one's: exp of that overflows float32, in either direction."""
    segments, positions = cases.packed_rows(((TOKENS,), (TOKENS,)), TOKENS)
    q, k, v, *cotangents = tensors(seed=1)
    chunk = np.arange(TOKENS) // 4
    level = np.where(rising, chunk, 7 - chunk) * 200.0 - 700.0 + (np.arange(TOKENS) % 4) / 8
    q = jnp.zeros_like(q).at[..., 0].set(1 / SCALE)
    k = k.at[..., 0].set(jnp.asarray(level, jnp.float32)[None, :, None])
    arrays = (q, k, v, *cotangents)
    found = errors(cases, run(solve, arrays, segments, positions), answer(cases, arrays, segments))
    assert max(found["out"], found["lse"]) < CLOSE, found
    # The lse that the backward is given, up to 700, is rounded to half of 6e-5, and p = exp(s - lse) is off by as much.
    assert max(found.values()) < 4e-5, found


@pytest.mark.parametrize("stale", [False, True])
def test_report_11_the_backward_works_on_the_keys_of_each_step(cases, monkeypatch, stale):
    """With the keys of step 0 at every step of the backward the forward is right and only gradients tell."""
    kept = []
    original = ring.block_attention_backward

    def with_first_keys(q, k, v, *rest, **options):
        kept.append((k, v))
        return original(q, *kept[0], *rest, **options)

    if stale:
        monkeypatch.setattr(ring, "block_attention_backward", with_first_keys)
    segments, positions = cases.packed_rows(((TOKENS,), (29,)), TOKENS)
    arrays = tensors()
    found = errors(cases, run(build(cases, 2), arrays, segments, positions), answer(cases, arrays, segments))
    assert len(kept) == (2 if stale else 0)
    assert max(found["out"], found["lse"]) < CLOSE, found
    for name in ("dq", "dk", "dv"):
        assert (found[name] > 0.05) if stale else (found[name] < CLOSE), found


def test_report_14_attention_in_both_directions_on_the_balanced_layout(cases, solve):
    """Every token sees all of its document: no step of the ring may lean on causality."""
    segments, positions = cases.packed_rows(((5, 1, 20), (32,)), TOKENS)
    ends = np.zeros_like(segments)
    for row, ids in enumerate(segments):
        for document in range(1, ids.max() + 1):
            places = np.flatnonzero(ids == document)
            ends[row, places] = places[-1]
    arrays = tensors()
    got = run(solve, arrays, segments, positions, ends)
    found = errors(cases, got, answer(cases, arrays, segments, ends))
    assert max(found.values()) < CLOSE, found
    assert cases.DENSE.relative(got["out"], answer(cases, arrays, segments)["out"]) > 0.05


def test_one_rank_asks_for_no_collective_in_forward_and_backward(cases):
    """In the jaxpr: lowering and XLA take collectives of one device out by themselves."""
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct((ROWS, TOKENS, *dims), dtype)  # noqa: E731
    ids, q, k = shape(dtype=jnp.int32), shape(HEADS, WIDTH), shape(KV_HEADS, WIDTH)
    args = (q, k, k, ids, ids, ids, q, shape(HEADS))

    def asked(ranks):
        text = str(jax.make_jaxpr(build(cases, ranks))(*args))
        return set(re.findall(r"\b(psum\w*|pmax|pmin|ppermute|all_gather\w*|all_to_all|reduce_scatter)\[", text))

    assert asked(1) == set()
    assert asked(2) == {"ppermute"}, "the names are others now"
