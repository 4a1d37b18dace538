"""The order of tokens over ranks, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import Contiguous, Striped, Zigzag, from_ranks, pad_row, padded_tokens, to_ranks

LAYOUTS = [
    Zigzag(ranks=1, tokens=8),
    Zigzag(ranks=2, tokens=8),
    Zigzag(ranks=8, tokens=64),
    Striped(ranks=2, tokens=24, stripe=3),
    Striped(ranks=4, tokens=64, stripe=4),
    Striped(ranks=1, tokens=8, stripe=2),
]


def test_bug_case_b49_ranks_hold_their_early_and_late_chunk():
    layout = Zigzag(ranks=2, tokens=8)
    assert layout.index(0).tolist() == [0, 1, 6, 7]
    assert layout.index(1).tolist() == [2, 3, 4, 5]
    assert layout.order().tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bug_case_b49_one_order_for_all_tensors_and_its_inverse(layout):
    ranks, tokens = layout.ranks, layout.tokens
    rng = np.random.default_rng(0)
    tensors = [
        jnp.asarray(rng.integers(0, 9, (2, tokens)), jnp.int32),
        jnp.asarray(rng.normal(size=(2, tokens)), jnp.float32),
        jnp.asarray(rng.normal(size=(2, tokens, 3, 2)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, 2, (2, tokens)), bool),
    ]
    places = np.concatenate([np.asarray(layout.index(r)) for r in range(ranks)])
    for x in tensors:
        moved = to_ranks(x, layout)
        np.testing.assert_array_equal(moved, np.asarray(x)[:, places])
        np.testing.assert_array_equal(from_ranks(moved, layout), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bug_case_b12_each_place_is_on_one_rank_once(layout):
    ranks, tokens = layout.ranks, layout.tokens
    held = [np.asarray(layout.index(r)) for r in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(tokens))
    for rank, places in enumerate(held):
        assert np.all(np.diff(places) > 0), "block skipping needs increasing places"
        np.testing.assert_array_equal(layout.owner(jnp.asarray(places)), np.full(places.size, rank))
        np.testing.assert_array_equal(layout.local(jnp.asarray(places)), np.arange(places.size))


def test_stripes_are_dealt_out_in_turn():
    layout = Striped(ranks=2, tokens=12, stripe=2)
    assert layout.index(0).tolist() == [0, 1, 4, 5, 8, 9]
    assert layout.index(1).tolist() == [2, 3, 6, 7, 10, 11]


def test_bug_case_b47_a_length_that_does_not_split_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"tokens=2999 .* multiple of 8 \(2 for each of ranks=4\); pad rows to 3000"):
        Zigzag(ranks=4, tokens=2999)
    with pytest.raises(ValueError, match=r"tokens=10 .* multiple of 4 .*; pad rows to 12"):
        Contiguous(ranks=4, tokens=10)
    with pytest.raises(ValueError, match=r"tokens=100 .* multiple of 32 .*; pad rows to 128"):
        Striped(ranks=4, tokens=100, stripe=8)
    with pytest.raises(ValueError, match="stripe=0"):
        Striped(ranks=4, tokens=8, stripe=0)
    with pytest.raises(ValueError, match="ranks=0"):
        Zigzag(ranks=0, tokens=8)
    with pytest.raises(ValueError, match="must have 16 tokens along axis 1"):
        to_ranks(jnp.zeros((1, 15)), Zigzag(ranks=2, tokens=16))


def test_bug_case_b48_rows_are_padded_once():
    assert [padded_tokens(n, 2) for n in (1, 4, 5, 13)] == [4, 4, 8, 16]
    assert padded_tokens(13, 2, 8) == 16
    row = pad_row(jnp.asarray([[1, 2, 2, 2, 2]], jnp.int32), 8)
    assert row.tolist() == [[1, 2, 2, 2, 2, 0, 0, 0]]
    with pytest.raises(ValueError, match="tokens=4 must be >= 5"):
        pad_row(row[:, :5], 4)


def test_contiguous_is_the_plain_order():
    layout = Contiguous(ranks=4, tokens=8)
    assert [layout.index(r).tolist() for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
