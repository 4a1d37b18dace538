"""Which tokens of packed rows a block draft is trained to draft from.

An anchor is a token whose next tokens a block stands for. At most `num_anchors` legal ones of each document are taken:
those whose hash of (key, sample id, position in the document) is smallest. So the choice is uniform without
replacement, is made again by whoever has the key of the optimizer step, and does not depend on the row a document lies
in.

Letters: R rows, T tokens of this device, N of whole rows, C anchors a device has room for in a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt32

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.blocks.config import BlockDraftConfig
from draftco_jax.drafts.labels import Ahead
from draftco_jax.errors import UserError
from draftco_jax.types import PackedBatch
from pallas_kernels.manual_axes import cast, varying_axes


def legal_anchors(ahead: Ahead, cfg: BlockDraftConfig) -> Bool[Array, "R T"]:
    """Tokens whose next one is supervised and of the same document; "official": that are supervised themselves too."""
    legal = (ahead.at("label_mask", 1) > 0) & ahead.same_document(1)
    return legal & (ahead.batch.label_mask > 0) if cfg.anchor_rule == "official" else legal


def anchor_hashes(
    key: Key[Array, ""], sample_ids: Int[Array, "R T"], positions: Int[Array, "R T"]
) -> UInt32[Array, "R T"]:
    """Random bits of each token, a function of the key, the token's sequence and its place in it."""

    def one(sample: Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sample), position), dtype=jnp.uint32)

    return jax.vmap(jax.vmap(one))(sample_ids, positions)


def select_anchors(
    key: Key[Array, ""], ahead: Ahead, cfg: BlockDraftConfig
) -> tuple[Int[Array, "R C"], Bool[Array, "R C"]]:
    """Anchors among this device's tokens of each row in increasing order, and which of the C places are taken.

    Places that are not hold index 0. Which anchors a document gets is decided over all of it, on whatever devices it
    lies: every device sees the hashes of whole rows, and serves those anchors whose token it holds. None is dropped:
    `check_row_anchors` makes sure on the host that all of them fit.
    """
    batch, packed = ahead.batch, ahead.packed
    tokens = batch.tokens.shape[1]
    hashes = anchor_hashes(key, batch.sample_ids, batch.positions)
    group = jnp.where(legal_anchors(ahead, cfg), batch.segment_ids, 0)
    kept = packed.local(_smallest_of_each(packed.whole(group), packed.whole(hashes), cfg.num_anchors))
    index = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    anchors = jnp.sort(jnp.where(kept, index, tokens), axis=1)[:, : _capacity(cfg, tokens)]
    keep = anchors < tokens
    return jnp.where(keep, anchors, 0), keep


def check_row_anchors(batch: PackedBatch, cfg: Any, packed: PackedRows = WHOLE_ROWS) -> None:
    """Raise UserError, on the host, where a device may have more anchors of a row than the update is compiled for."""
    segments, labels = np.asarray(batch.segment_ids), np.asarray(batch.label_mask) > 0
    layout = packed.row_layout(segments.shape[1])
    capacity = _capacity(cfg, layout.local_tokens)
    legal = np.zeros(segments.shape, bool)
    legal[:, :-1] = (segments[:, :-1] > 0) & (segments[:, :-1] == segments[:, 1:]) & labels[:, 1:]
    if cfg.anchor_rule == "official":
        legal &= labels
    order = layout.order().reshape(packed.ranks, -1)
    for row, (documents, ok) in enumerate(zip(segments, legal, strict=True)):
        # Of a document at most num_anchors are taken, all of them perhaps from the tokens of one device.
        counts = (np.bincount(documents[own][ok[own]]) for own in order)
        needed = max(int(np.minimum(c, cfg.num_anchors).sum()) for c in counts)
        if needed > capacity:
            raise UserError(
                f"row_anchors={cfg.row_anchors} must be >= {needed}, the anchors that a device may have of packed row "
                f"{row} at num_anchors={cfg.num_anchors} a document; raise row_anchors or lower num_anchors"
            )


def _capacity(cfg: BlockDraftConfig, tokens: int) -> int:
    return tokens if cfg.row_anchors is None else min(cfg.row_anchors, tokens)


def _smallest_of_each(group: Int[Array, "R N"], hashes: UInt32[Array, "R N"], count: int) -> Bool[Array, "R N"]:
    """The `count` members of each group of smallest hash, of equal hashes the earlier token; group 0 is no group."""
    rows, tokens = group.shape
    index = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None, :], group.shape)
    # Cast: inside shard_map a sort gives each result the type of its own operand, and the places found differ.
    place = cast(index, varying_axes(group))
    group, _, place = jax.lax.sort((group, hashes, place), dimension=1, num_keys=3)  # group 0 comes first
    first = jnp.concatenate([jnp.ones((rows, 1), bool), group[:, 1:] != group[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    kept = (group > 0) & (index - start < count)
    return jax.vmap(lambda at, value: jnp.zeros_like(value).at[at].set(value, unique_indices=True))(place, kept)
