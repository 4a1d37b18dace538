"""The order of tokens over ranks, and what is refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import Contiguous, Zigzag, from_zigzag, pad_row, padded_tokens, to_zigzag

LAYOUTS = [(1, 8, 1), (2, 8, 1), (4, 32, 1), (8, 64, 1), (2, 24, 3), (4, 64, 4)]


def test_bug_case_b49_ranks_hold_their_early_and_late_chunk():
    layout = Zigzag(ranks=2, tokens=8)
    assert layout.index(0).tolist() == [0, 1, 6, 7]
    assert layout.index(1).tolist() == [2, 3, 4, 5]
    assert layout.order().tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize(("ranks", "tokens", "periods"), LAYOUTS)
def test_bug_case_b49_one_order_for_all_tensors_and_its_inverse(ranks, tokens, periods):
    layout = Zigzag(ranks=ranks, tokens=tokens, periods=periods)
    rng = np.random.default_rng(0)
    tensors = [
        jnp.asarray(rng.integers(0, 9, (2, tokens)), jnp.int32),
        jnp.asarray(rng.normal(size=(2, tokens)), jnp.float32),
        jnp.asarray(rng.normal(size=(2, tokens, 3, 2)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, 2, (2, tokens)), bool),
    ]
    places = np.concatenate([np.asarray(layout.index(r)) for r in range(ranks)])
    for x in tensors:
        moved = to_zigzag(x, layout)
        np.testing.assert_array_equal(moved, np.asarray(x)[:, places])
        np.testing.assert_array_equal(from_zigzag(moved, layout), x)


@pytest.mark.parametrize(("ranks", "tokens", "periods"), LAYOUTS)
def test_bug_case_b12_each_place_is_on_one_rank_once(ranks, tokens, periods):
    layout = Zigzag(ranks=ranks, tokens=tokens, periods=periods)
    held = [np.asarray(layout.index(r)) for r in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(tokens))
    for rank, places in enumerate(held):
        assert np.all(np.diff(places) > 0), "block skipping needs increasing places"
        np.testing.assert_array_equal(layout.owner(jnp.asarray(places)), np.full(places.size, rank))
        np.testing.assert_array_equal(layout.local(jnp.asarray(places)), np.arange(places.size))


def test_bug_case_b47_a_length_that_does_not_split_is_refused_with_the_numbers():
    with pytest.raises(
        ValueError, match=r"tokens=2999 .* multiple of 8 \(2 \* ranks=4 \* periods=1\); pad rows to 3000"
    ):
        Zigzag(ranks=4, tokens=2999)
    with pytest.raises(ValueError, match=r"tokens=10 .* multiple of ranks=4; pad rows to 12"):
        Contiguous(ranks=4, tokens=10)
    with pytest.raises(ValueError, match="ranks=0"):
        Zigzag(ranks=0, tokens=8)
    with pytest.raises(ValueError, match="must have 16 tokens along axis 1"):
        to_zigzag(jnp.zeros((1, 15)), Zigzag(ranks=2, tokens=16))


def test_bug_case_b48_rows_are_padded_once():
    assert [padded_tokens(n, 2) for n in (1, 4, 5, 13)] == [4, 4, 8, 16]
    assert padded_tokens(13, 2, 3) == 24
    row = pad_row(jnp.asarray([[1, 2, 2, 2, 2]], jnp.int32), 8)
    assert row.tolist() == [[1, 2, 2, 2, 2, 0, 0, 0]]
    with pytest.raises(ValueError, match="tokens=4 must be >= 5"):
        pad_row(row[:, :5], 4)


def test_contiguous_is_the_plain_order():
    layout = Contiguous(ranks=4, tokens=8)
    assert [layout.index(r).tolist() for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
