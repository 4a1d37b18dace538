"""Anchors of a block draft on many ranks are those of one: none is dropped, none is served twice, labels are whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows, to_ranks
from draftco_jax.drafts.blocks.anchors import check_row_anchors, select_anchors
from draftco_jax.drafts.blocks.training import block_labels, look_ahead
from draftco_jax.drafts.dspark.config import DSparkConfig
from draftco_jax.errors import UserError
from draftco_jax.types import PackedBatch

TOKENS, SPEC, KEY = 96, PartitionSpec(None, "context"), jax.random.key(3)
CFG = DSparkConfig(
    tap_layers=(0,),
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    mask_token_id=7,
    block_size=4,
    num_anchors=5,
)


def rows_of(lengths):
    """One row of documents, the last token of each not supervised, the first two neither; padding at the end."""
    positions, segments, tokens = np.zeros((3, 1, TOKENS), np.int32)
    mask, start = np.zeros((1, TOKENS), np.float32), 0
    for segment, length in enumerate(lengths, 1):
        span = slice(start, start + length)
        positions[0, span], segments[0, span] = np.arange(length), segment
        mask[0, start + 2 : start + length - 1] = 1
        start += length
    tokens[0] = np.arange(TOKENS)
    zeros = np.zeros_like(mask)
    arrays = (tokens, positions, segments, mask, zeros, zeros, zeros, segments)
    return PackedBatch(*(jnp.asarray(a) for a in arrays))


def blocks_of(batch, packed):
    """Places of anchors in the whole row, and the tokens of their live labels (-1 where none)."""
    ahead = look_ahead(batch, CFG, packed)
    anchors, keep = select_anchors(KEY, ahead, CFG)
    labels = block_labels(ahead, anchors, keep, CFG)
    tokens = jnp.take_along_axis(ahead.flat("tokens"), labels.place.reshape(1, -1), axis=1).reshape(labels.place.shape)
    place = packed.index(batch.tokens.shape[1])[anchors]
    return jnp.where(keep, place, -1), jnp.where(labels.live > 0, tokens, -1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("stripe", [None, 6])
def test_no_anchor_is_dropped_and_no_label_of_one_is_lost(ranks, stripe):
    batch = rows_of((11, 3, 40, 7, 1, 25))
    packed = PackedRows(ranks=ranks, context_axis="context", stripe=stripe)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("context",))
    run = jax.shard_map(lambda b: blocks_of(b, packed), mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=True)
    layout = packed.layout(TOKENS // ranks)
    found = jax.jit(run)(jax.tree.map(lambda x: to_ranks(x, layout), batch))
    expected = jax.jit(lambda b: blocks_of(b, WHOLE_ROWS))(batch)

    def listed(anchors, labels):
        taken = np.asarray(anchors)[0] >= 0
        order = np.argsort(np.asarray(anchors)[0][taken])
        return np.asarray(anchors)[0][taken][order], np.asarray(labels)[0][taken][order]

    (anchors, labels), (wanted, of_wanted) = listed(*found), listed(*expected)
    assert len(wanted) == 5 + 5 + 4 + 5, "document 3 tokens long: no label; all others have more than they are given"
    np.testing.assert_array_equal(anchors, wanted)
    np.testing.assert_array_equal(labels, of_wanted)
    piece = layout.piece
    crossing = (labels[:, -1] >= 0) & (anchors // piece != labels[:, -1] // piece)
    assert crossing.any(), "no block reaches into another piece: nothing was exchanged"


def test_a_device_without_room_for_its_anchors_is_refused_on_the_host():
    batch, packed = rows_of((60, 30)), PackedRows(ranks=4, context_axis="context")
    tight = DSparkConfig(**{**CFG.__dict__, "row_anchors": 9, "num_anchors": 8})
    with pytest.raises(UserError, match=r"row_anchors=9 must be >= 16, .* a device may have of packed row 0"):
        check_row_anchors(batch, tight, packed)
    check_row_anchors(batch, DSparkConfig(**{**CFG.__dict__, "row_anchors": 16, "num_anchors": 8}), packed)
