"""Tests of which labels are live, of the denominator, and of what the loss refuses."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.labels import Ahead
from draftco_jax.drafts.mtp.training import denominator, step_masks, steps_loss
from draftco_jax.losses.draft import DraftLossConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import PackedBatch

KEY = jax.random.key(0)


def row(labels, segments=None):
    """One row of a batch with these labels."""
    segments = [1] * len(labels) if segments is None else segments
    padding = [0] * (8 - len(labels))
    ids, labels, segments = np.zeros((1, 8), np.int32), np.float32([labels + padding]), np.int32([segments + padding])
    named = {"tokens": ids, "positions": ids, "sample_ids": ids, "segment_ids": segments, "label_mask": labels}
    others = {name: 0 * labels for name in PackedBatch._fields if name not in (*named, "experts")}
    return PackedBatch(**{name: jnp.asarray(value) for name, value in (named | others).items()})


masks_of_four_steps = jax.jit(lambda batch: step_masks(Ahead(batch, 5, WHOLE_ROWS), 4))


def live(batch, steps):
    return [np.flatnonzero(mask[0]).tolist() for mask in masks_of_four_steps(batch)[:steps]]


def test_bug_case_b01_the_label_decides_so_the_first_answer_token_is_learnt():
    # Step 0 at t learns x_{t+2}: the token before the last prompt token is live, the last two of the answer are not.
    assert live(row([0, 0, 1, 1, 1, 0]), 2) == [[0, 1, 2], [0, 1]]


def test_bug_case_b14_after_k_steps_the_mask_marks_the_rows_whose_label_is_real():
    assert live(row([1, 1, 1, 0]), 3) == [[0], [], []]
    assert live(row([1] * 7), 4) == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2], [0, 1]]


def test_bug_case_b02_no_label_comes_from_another_document_or_from_padding():
    batch = row([0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 2, 0])
    assert live(batch, 3) == [[0, 3, 4], [3], []]


def test_denominator_is_the_count_of_live_labels_under_normalised_weights(make):
    cfg = make().cfg
    np.testing.assert_allclose(cfg.step_weights, np.array([1, 0.6, 0.36]) / 1.96)
    expected = (3 + 0.6 * 2 + 0.36 * 1) / 1.96
    np.testing.assert_allclose(denominator(row([0, 0, 1, 1, 1, 0]), cfg, KEY), expected, rtol=1e-6)
    positions = replace(cfg, loss=DraftLossConfig(hard_cross_entropy=1.0, normaliser="all_positions"))
    assert float(denominator(row([0, 0, 1, 1, 1, 0]), positions, KEY)) > expected


@pytest.mark.parametrize("broken", ["hidden", "greedy"])
def test_what_the_loss_cannot_use_is_refused(make, lay_out, broken):
    batch, target = lay_out("packed")
    sampling = SamplingConfig(temperature=0.0 if broken == "greedy" else 1.0)
    target = target._replace(hidden=None) if broken == "hidden" else target
    context = TrainingContext(sampling=sampling, chunk_tokens=32, draft_length=9)
    head = make()

    def loss(params):
        return steps_loss(head.merge(params), target, batch, denominator=jnp.float32(1.0), key=KEY, context=context)

    with pytest.raises(ValueError, match="temperature=0" if broken == "greedy" else r"target\.hidden=None"):
        jax.eval_shape(loss, head.params)
