"""Reported faults of packed rows: positions, labels that look into the next document, lengths that do not divide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS, check_documents, padded_tokens
from draftco_jax.data.packing import pack_supervised
from draftco_jax.drafts.labels import Ahead
from draftco_jax.types import PackedBatch

REACH = 3


def examples(*lengths, seed=0):
    """Documents of so many tokens, the first one the prompt; no token twice, so that a wrong one is seen."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, 1 + sum(lengths)))
    texts = np.split(ids, np.cumsum(lengths)[:-1])
    return [(tuple(x[:1].tolist()), tuple(x[1:].tolist())) for x in texts]


def on_device(batch) -> PackedBatch:
    return jax.tree.map(jnp.asarray, batch)


def labels_of(batch):
    """(step, token it is read at, label) of every label inside its document that the mask has."""
    ahead = Ahead(on_device(batch), REACH, WHOLE_ROWS)
    found = []
    for steps in range(1, REACH + 1):
        mask = (ahead.at("label_mask", steps) > 0) & ahead.same_document(steps)
        for row, t in np.argwhere(np.asarray(mask)):
            found.append((steps, int(batch.tokens[row, t]), int(ahead.tokens(steps)[row, t])))
    return sorted(found)


def test_bug_cases_b02_b15_documents_of_5_and_7_have_the_labels_they_have_alone():
    together = pack_supervised(examples(5, 7), 12, 1)
    alone = pack_supervised(examples(5, 7), 7, 2)
    assert together.segment_ids.shape == (1, 12) and (np.asarray(alone.segment_ids).max(axis=1) == 1).all()
    labels = labels_of(together)
    assert labels == labels_of(alone)
    # Steps 1, 2, 3 of a document of n tokens have n - 1, n - 2, n - 3 labels.
    assert len(labels) == (4 + 3 + 2) + (6 + 5 + 4)
    # One document id for both, as if nobody looked at it: the last tokens of the first read the second's.
    joined = together._replace(segment_ids=np.minimum(together.segment_ids, 1))
    assert len(labels_of(joined)) > len(labels)


def test_bug_case_b15_three_segments_0_3_7_12_are_shifted_inside_each():
    batch = pack_supervised(examples(3, 4, 5), 12, 1)
    ahead = Ahead(on_device(batch), 1, WHOLE_ROWS)
    tokens = np.asarray(batch.tokens)[0]
    wanted = [*tokens[1:3], 0, *tokens[4:7], 0, *tokens[8:12], 0]
    assert ahead.tokens(1)[0].tolist() == wanted
    assert np.roll(tokens, -1).tolist() != wanted, "a shift over the whole row must show"


def test_bug_case_b14_ids_positions_and_masks_are_shifted_together():
    """ids = [a, b, c, d], mask = [1, 1, 1, 0]: after k steps the mask still marks the rows whose token is real."""
    batch = pack_supervised([((), (11, 12, 13)), ((14,), ())], 4, 1)
    batch = batch._replace(segment_ids=np.ones((1, 4), np.int32), positions=np.arange(4, dtype=np.int32)[None])
    assert np.asarray(batch.label_mask).tolist() == [[1, 1, 1, 0]]
    ahead = Ahead(on_device(batch), REACH, WHOLE_ROWS)
    for steps in range(REACH + 1):
        marked = np.asarray(ahead.at("label_mask", steps))[0] > 0
        assert np.asarray(ahead.at("tokens", steps))[0][marked].tolist() == [11, 12, 13][steps:]
        assert np.asarray(ahead.at("positions", steps))[0][marked].tolist() == [0, 1, 2][steps:]


@pytest.mark.parametrize("seed", range(10))
def test_bug_cases_b02_b12_positions_of_packed_rows_restart_and_the_ring_takes_them(seed):
    """What packing makes passes the check of the ring; numbers that run on, or two documents of one id, do not."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, 12).tolist()
    batch = pack_supervised(examples(*lengths, seed=seed), 20, 12)
    segments, positions = np.asarray(batch.segment_ids), np.asarray(batch.positions)
    check_documents(segments, positions)
    assert sorted(positions[segments > 0].tolist()) == sorted(p for n in lengths for p in range(n))
    assert (segments.max(axis=1) > 1).any(), "no row has two documents"
    real = segments > 0
    for wrong in (
        (segments, np.where(real, np.arange(20)[None, :], 0).astype(np.int32)),
        (segments, np.where(real, positions + 1, 0)),
        (np.minimum(segments, 1), positions),
    ):
        with pytest.raises(ValueError, match=r"positions\[\d+, \d+\]="):
            check_documents(*wrong)


@pytest.mark.parametrize("lengths", [(13,), (3, 5), (3, 8), (1, 1, 11)])
def test_bug_cases_b47_b48_rows_made_longer_for_two_ranks_hold_the_same_documents_and_counts(lengths):
    """Padding is at the end of the row, once, and is no token of anybody."""
    exact, total = sum(lengths), padded_tokens(sum(lengths), 2)
    one, padded = (pack_supervised(examples(*lengths), n, 1) for n in (exact, total))
    assert total % 4 == 0 and total - exact < 4
    assert int((np.asarray(padded.segment_ids) > 0).sum()) == exact
    for name, value in one._asdict().items():
        if value is None:  # nothing recorded
            continue
        laid = np.asarray(getattr(padded, name))
        np.testing.assert_array_equal(laid[:, :exact], value, err_msg=name)
        assert not laid[:, exact:].any(), name
    assert labels_of(one) == labels_of(padded)
