"""Values from later in the sequence, across ranks: what labels, masks and teacher features of a draft need."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import (
    PackedRows,
    Striped,
    Zigzag,
    from_ranks,
    local_index,
    to_ranks,
    with_halo,
)
from draftco_jax.numerics.shift import look_ahead, same_document

AXIS = "context"
TOKENS = PartitionSpec(None, AXIS)


def on_ranks(cases, layout, function, *specs):
    mesh = cases.mesh_of(layout.ranks)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=TOKENS, check_vma=True))


def shift_ahead(x, steps, layout, axis):
    """y[t] = x[t + steps] in the order of the whole sequence, read from the halo; 0 at its end."""
    return with_halo(x, steps, layout, axis)[:, :, steps:].reshape(x.shape)


LAYOUTS = [
    Zigzag(ranks=2, tokens=128),
    Zigzag(ranks=8, tokens=128),
    Striped(ranks=4, tokens=128, stripe=8),
    Striped(ranks=8, tokens=128, stripe=16),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bug_case_b49_shift_is_that_of_the_whole_row(cases, layout):
    """Ids, float features and masks, for 1 step and for as many as a piece has; what runs off the end is filled."""
    rng = np.random.default_rng(0)
    arrays = (
        jnp.asarray(rng.integers(1, 99, (2, 128)), jnp.int32),
        jnp.asarray(rng.normal(size=(2, 128, 3)), jnp.float32),
        jnp.asarray(rng.integers(0, 2, (2, 128)), bool),
    )
    steps = (1, layout.piece)

    def local(*xs):
        return tuple(shift_ahead(x, s, layout, AXIS) for s in steps for x in xs)

    got = on_ranks(cases, layout, local, *(TOKENS,) * 3)(*(to_ranks(x, layout) for x in arrays))
    for y, (s, x) in zip(got, [(s, x) for s in steps for x in arrays], strict=True):
        np.testing.assert_array_equal(from_ranks(y, layout), look_ahead(x, s))


def test_bug_case_b49_a_roll_inside_the_rank_is_another_thing(cases):
    """The wrong shift agrees on all but the ends of chunks, so a loss would hardly show it: it must differ there."""
    layout = Zigzag(ranks=4, tokens=64)
    x = to_ranks(jnp.arange(1, 65, dtype=jnp.int32)[None], layout)
    right = on_ranks(cases, layout, lambda x: shift_ahead(x, 1, layout, AXIS), TOKENS)(x)
    wrong = on_ranks(cases, layout, lambda x: jnp.roll(x, -1, axis=1), TOKENS)(x)
    # The chunk of 31 is followed by that of 32 on the same rank: the only border where a roll is right.
    ends = [7, 15, 23, 39, 47, 55, 63]
    places = np.flatnonzero(np.asarray(from_ranks(right, layout) != from_ranks(wrong, layout))[0])
    assert places.tolist() == ends


def test_shift_of_segment_ids_tells_documents_apart_as_on_one_rank(cases):
    layout = Zigzag(ranks=8, tokens=128)

    def local(segments):
        return (segments > 0) & (shift_ahead(segments, 2, layout, AXIS) == segments)

    got = on_ranks(cases, layout, local, TOKENS)(to_ranks(jnp.asarray(cases.SEGMENTS), layout))
    np.testing.assert_array_equal(from_ranks(got, layout), same_document(jnp.asarray(cases.SEGMENTS), 2))


@pytest.mark.parametrize("layout", LAYOUTS[1:3])
def test_labels_of_every_block_are_at_hand(cases, layout):
    """x[a + 1 .. a + 5] for every token a of the row, also where they lie on another rank."""
    x = jnp.arange(256, dtype=jnp.int32).reshape(2, 128)

    packed = PackedRows(ranks=layout.ranks, context_axis=AXIS, stripe=getattr(layout, "stripe", None))
    index = jnp.arange(layout.local_tokens, dtype=jnp.int32)

    def local(x):
        flat = packed.extend(x, 5).reshape(x.shape[0], -1)
        places = packed.places(index, 5, layout.local_tokens)
        return flat[:, places[:, None] + jnp.arange(1, 6, dtype=jnp.int32)[None, :]]

    got = from_ranks(on_ranks(cases, layout, local, TOKENS)(to_ranks(x, layout)), layout)
    wanted = np.pad(np.asarray(x), ((0, 0), (0, 5)))
    for j in range(5):
        np.testing.assert_array_equal(got[:, :, j], wanted[:, 1 + j : 129 + j])


def test_gradient_of_a_shift_goes_back_to_where_the_value_came_from(cases):
    layout = Zigzag(ranks=4, tokens=64)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, 64)), jnp.float32)
    shift = on_ranks(cases, layout, lambda x: shift_ahead(x, 3, layout, AXIS), TOKENS)
    loss = lambda x: jnp.sum(from_ranks(shift(to_ranks(x, layout)), layout) * weights)  # noqa: E731
    got = jax.grad(loss)(jnp.zeros((1, 64)))
    np.testing.assert_array_equal(got, jnp.pad(weights, ((0, 0), (3, 0)))[:, :64])


def test_bug_case_b12_positions_of_all_ranks_are_the_sequence(cases):
    layout = Zigzag(ranks=8, tokens=128)
    places = on_ranks(cases, layout, lambda x: x * 0 + local_index(layout, AXIS)[None], TOKENS)
    assert sorted(np.asarray(places(jnp.zeros((1, 128), jnp.int32)))[0].tolist()) == list(range(128))
