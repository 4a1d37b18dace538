"""What queries see, values from later in the row, and which anchors a rank serves, on one rank."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import (
    Striped,
    Zigzag,
    anchor_range,
    causal_range,
    check_documents,
    with_halo,
)
from draftco_jax.context_parallel.zigzag import ring_hops
from draftco_jax.numerics.shift import look_ahead

SEGMENTS = np.array([[1] * 5 + [2] * 2 + [3] * 6 + [0] * 3, [1] * 16], np.int32)
POSITIONS = np.array([[*range(5), *range(2), *range(6), 0, 0, 0], [*range(16)]], np.int32)
INDEX = jnp.arange(16, dtype=jnp.int32)


def as_mask(seen):
    first, last = (np.asarray(x)[..., None] for x in seen)
    index = np.arange(16)
    return (index >= first) & (index <= last)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_causal_range_is_the_packed_causal_mask(window):
    seen = causal_range(jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), INDEX, window=window)
    t, s = np.arange(16)[None, :, None], np.arange(16)[None, None, :]
    mask = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS[:, :, None] > 0) & (s <= t)
    if window is not None:
        mask &= t - s < window
    np.testing.assert_array_equal(as_mask(seen), mask)


@pytest.mark.parametrize("window", [None, 2, 4])
def test_anchor_range_is_strictly_before_the_anchor_and_in_its_document(window):
    anchors, starts = jnp.asarray([[0, 4, 9]], jnp.int32), jnp.asarray([[0, 0, 7]], jnp.int32)
    live = jnp.asarray([[True, True, False]])
    mask = as_mask(anchor_range(anchors, starts, live, rows=3, window=window))
    assert mask.shape == (1, 3, 3, 16)
    assert not mask[0, 0].any(), "the first token of a document has no context"
    assert not mask[0, 2].any(), "a place that is not taken sees nothing"
    for row in range(3):
        low = 0 if window is None else max(0, 4 + row - window + 1)
        assert np.flatnonzero(mask[0, 1, row]).tolist() == list(range(low, 4))


@pytest.mark.parametrize("layout", [Zigzag(ranks=1, tokens=16), Striped(ranks=1, tokens=16, stripe=4)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_shift_on_one_rank_is_look_ahead(layout, steps):
    for x in (jnp.asarray(SEGMENTS), jnp.arange(96, dtype=jnp.float32).reshape(2, 16, 3)):
        ahead = with_halo(x, steps, layout, None)[:, :, steps:].reshape(x.shape)
        np.testing.assert_array_equal(ahead, look_ahead(x, steps))


def test_halo_and_window_refusals():
    layout = Zigzag(ranks=1, tokens=16)
    with pytest.raises(ValueError, match=r"steps=9 must be in 0\.\.8"):
        with_halo(jnp.asarray(SEGMENTS), 9, layout, None)
    with pytest.raises(ValueError, match="window=0 must be >= 1"):
        causal_range(jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), INDEX, window=0)


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_bug_case_b55_a_ring_permutation_is_complete(ranks, step):
    hops = ring_hops(ranks, step)
    assert isinstance(hops, tuple) and all(isinstance(hop, tuple) for hop in hops)
    for end in zip(*hops, strict=True):
        assert sorted(end) == list(range(ranks))


def test_documents_are_checked_on_the_host():
    check_documents(SEGMENTS, POSITIONS)
    late = POSITIONS.copy()
    late[0, 5:7] = [3, 4]
    with pytest.raises(ValueError, match=r"positions\[0, 5\]=3 must be 0, its place in document 2"):
        check_documents(SEGMENTS, late)
    joined = SEGMENTS.copy()
    joined[0, 5:7] = 1  # two documents under one id
    with pytest.raises(ValueError, match=r"positions\[0, 5\]=0 must be 5"):
        check_documents(joined, POSITIONS)
    for ids in ([1, 1, 2, 1, 1], [1, 1, 0, 1, 1]):  # one document to whoever compares ids, two by its positions
        rows = np.array([[1, 1, 1, 1, 1], ids], np.int32), np.array([range(5), [0, 1, 0, 0, 1]], np.int32)
        with pytest.raises(ValueError, match=r"segment_ids\[1, 3\]=1 must be an id that this row has not used before"):
            check_documents(*rows)
    with pytest.raises(ValueError, match=r"segment_ids\[0, 2\]=-1 must be >= 0; 0 is padding"):
        check_documents(np.array([[1, 1, -1]], np.int32), np.array([[0, 1, 0]], np.int32))
    # Padding may come back, and another row may use the same ids.
    check_documents(
        np.array([[0, 2, 0, 1, 0], [1, 1, 2, 0, 0]], np.int32), np.array([[0] * 5, [0, 1, 0, 0, 0]], np.int32)
    )
