"""Tests of which tokens become anchors."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.drafts.blocks.anchors import check_row_anchors, legal_anchors, select_anchors
from draftco_jax.drafts.blocks.training import block_labels, block_positions, look_ahead
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.errors import UserError
from draftco_jax.types import PackedBatch

SIZES = {
    "tap_layers": (0,),
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "mask_token_id": 7,
}
CFG = DFlashConfig(**SIZES, block_size=3)
KEY = jax.random.key(5)


def rows(*given):
    """Rows of documents given as (sample id, label mask)."""
    tokens = max(sum(len(mask) for _, mask in row) for row in given)
    positions, segments, ids = np.zeros((3, len(given), tokens), np.int32)
    labels = np.zeros((len(given), tokens), np.float32)
    for r, row in enumerate(given):
        start = 0
        for number, (sample, mask) in enumerate(row, 1):
            cells = slice(start, start := start + len(mask))
            positions[r, cells], segments[r, cells], ids[r, cells] = np.arange(len(mask)), number, sample
            labels[r, cells] = mask
    zeros = np.zeros_like(labels)
    arrays = (np.zeros_like(ids), positions, segments, labels, zeros, zeros, zeros, ids)
    return PackedBatch(*(jnp.asarray(a) for a in arrays))


def chosen(batch, cfg, key=KEY):
    """Anchors of each row as lists."""
    anchors, keep = select_anchors(key, look_ahead(batch, cfg), cfg)
    return [list(np.asarray(a)[np.asarray(k)]) for a, k in zip(anchors, keep, strict=True)]


def test_bug_case_b01_the_last_prompt_token_is_an_anchor_and_the_last_answer_token_is_not():
    batch = rows([(1, [0, 0, 1, 1, 1, 0])])
    assert list(np.flatnonzero(legal_anchors(look_ahead(batch, CFG), CFG)[0])) == [1, 2, 3]
    assert chosen(batch, CFG) == [[1, 2, 3]]


def test_the_official_rule_asks_for_the_anchors_own_label_too():
    official = replace(CFG, anchor_rule="official")
    assert chosen(rows([(1, [0, 0, 1, 1, 1, 0])]), official) == [[2, 3]]


def test_bug_case_b02_an_anchor_needs_its_first_label_in_its_own_document():
    batch = rows([(1, [0, 1, 1]), (2, [1, 1, 0])])
    assert chosen(batch, CFG) == [[0, 1, 3]]


def test_at_most_num_anchors_are_taken_of_each_document_and_the_key_decides_which():
    batch = rows([(1, [0] + [1] * 9), (2, [0, 1, 1])], [(3, [0] + [1] * 12)])
    cfg = replace(CFG, num_anchors=4)
    found = chosen(batch, cfg)
    assert [len(f) for f in found] == [4 + 2, 4]
    assert found[0] == sorted(found[0]) and found[0][-2:] == [10, 11] and set(found[0][:4]) <= set(range(9))
    assert chosen(batch, cfg) == found
    others = [chosen(batch, cfg, jax.random.key(seed)) for seed in range(6)]
    assert any(other[0] != found[0] for other in others) and any(other[1] != found[1] for other in others)


def test_every_legal_token_is_chosen_equally_often():
    batch, draws = rows([(1, [0] + [1] * 9)]), 600
    cfg = replace(CFG, num_anchors=3)
    keys = jax.random.split(jax.random.key(0), draws)
    anchors, keep = jax.jit(jax.vmap(lambda key: select_anchors(key, look_ahead(batch, cfg), cfg)))(keys)
    counts = np.bincount(np.asarray(anchors)[np.asarray(keep)], minlength=10)
    assert counts[9] == 0 and counts.sum() == 3 * draws
    # Each count is binomial(600, 1/3): mean 200, deviation 11.5; five of them away is one in a million.
    np.testing.assert_allclose(counts[:9], 200, atol=58)


def test_the_choice_is_a_function_of_key_sample_and_position_whatever_else_is_in_the_row():
    cfg = replace(CFG, num_anchors=3)
    answer = [0, 0] + [1] * 8
    alone = chosen(rows([(9, answer)]), cfg)[0]
    behind = chosen(rows([(4, [0, 1, 1, 1, 1, 1]), (9, answer)], [(8, answer)]), cfg)
    assert [a - 6 for a in behind[0] if a >= 6] == alone
    assert behind[1] != alone, "another sample has another choice"
    with jax.enable_x64(True):
        assert chosen(rows([(9, answer)]), cfg)[0] == alone


def test_row_anchors_is_the_compiled_size_and_too_many_anchors_are_refused_never_dropped():
    batch = rows([(1, [0] + [1] * 5), (2, [0] + [1] * 4)])
    cfg = replace(CFG, num_anchors=4, row_anchors=8)
    check_row_anchors(batch, cfg)
    anchors, keep = select_anchors(KEY, look_ahead(batch, cfg), cfg)
    assert anchors.shape == (1, 8) and int(keep.sum()) == 8
    with pytest.raises(
        UserError,
        match=r"row_anchors=7 must be >= 8, the anchors .* of packed row 0 .*; raise row_anchors",
    ):
        check_row_anchors(batch, replace(cfg, row_anchors=7))
    check_row_anchors(batch, replace(cfg, row_anchors=None))
    check_row_anchors(batch, replace(cfg, row_anchors=7, anchor_rule="official"))


def live(batch, cfg, anchors):
    """Index of each live label of the blocks at these anchors of row 0."""
    found = block_labels(
        look_ahead(batch, cfg), jnp.asarray([anchors], jnp.int32), jnp.ones((1, len(anchors)), bool), cfg
    )
    return [list(np.asarray(i)[np.asarray(m) > 0]) for i, m in zip(found.place[0], found.live[0], strict=True)]


def test_labels_of_dflash_skip_what_is_not_supervised_and_those_of_dspark_end_there():
    batch = rows([(1, [0, 1, 1, 0, 1, 1])])
    assert live(batch, replace(CFG, block_size=5), [0, 2, 4]) == [[1, 2, 4], [4, 5], [5]]
    spark = DSparkConfig(**SIZES, block_size=4)
    for layout in (True, False):
        assert live(batch, replace(spark, sample_from_anchor=layout), [0, 2, 4]) == [[1, 2], [], [5]]


def test_bug_case_b02_a_label_never_lies_in_another_document():
    batch = rows([(1, [0, 1, 1, 1, 1]), (2, [1, 1, 1, 1, 1, 1, 1])])
    assert live(batch, replace(CFG, block_size=4), [2, 3, 5]) == [[3, 4], [4], [6, 7, 8]]
    assert live(batch, DSparkConfig(**SIZES, block_size=3), [2, 3, 10]) == [[3, 4], [4], [11]]


def test_bug_case_b12_positions_of_a_block_go_on_from_its_anchor_in_its_document():
    batch = rows([(1, [0, 1, 1]), (2, [1, 1, 1, 1])])
    found = block_positions(batch.positions, jnp.asarray([[1, 3, 5]], jnp.int32), 3)
    assert found[0].tolist() == [[1, 2, 3], [0, 1, 2], [2, 3, 4]]
