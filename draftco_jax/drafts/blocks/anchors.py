"""Which tokens of packed rows a block draft is trained to draft from.

An anchor is a token whose next tokens a block stands for. At most `num_anchors` legal ones of each document are taken:
those whose hash of (key, sample id, position in the document) is smallest. So the choice is uniform without
replacement, is made again by whoever has the key of the optimizer step, and does not depend on the row a document lies
in.

Letters: R rows, T tokens, C anchors a row has room for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, UInt32

from draftco_jax.drafts.blocks.config import BlockDraftConfig
from draftco_jax.errors import UserError
from draftco_jax.numerics.shift import look_ahead, same_document
from draftco_jax.types import PackedBatch


def legal_anchors(batch: PackedBatch, cfg: BlockDraftConfig) -> Bool[Array, "R T"]:
    """Tokens whose next one is supervised and of the same document; "official": that are supervised themselves too."""
    legal = (look_ahead(batch.label_mask, 1) > 0) & same_document(batch.segment_ids, 1)
    return legal & (batch.label_mask > 0) if cfg.anchor_rule == "official" else legal


def anchor_hashes(
    key: Key[Array, ""], sample_ids: Int[Array, "R T"], positions: Int[Array, "R T"]
) -> UInt32[Array, "R T"]:
    """Random bits of each token, a function of the key, the token's sequence and its place in it."""

    def one(sample: Array, position: Array) -> Array:
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, sample), position), dtype=jnp.uint32)

    return jax.vmap(jax.vmap(one))(sample_ids, positions)


def select_anchors(
    key: Key[Array, ""], batch: PackedBatch, cfg: BlockDraftConfig
) -> tuple[Int[Array, "R C"], Bool[Array, "R C"]]:
    """Anchors of each row in increasing order, and which of the C places are taken; the others hold index 0.

    `check_row_anchors` makes sure on the host that all of them fit.
    """
    tokens = batch.tokens.shape[1]
    legal = legal_anchors(batch, cfg)
    hashes = anchor_hashes(key, batch.sample_ids, batch.positions)
    kept = jax.vmap(lambda d, h, ok: _smallest_of_each(d, h, ok, cfg.num_anchors))(batch.segment_ids, hashes, legal)
    index = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    anchors = jnp.sort(jnp.where(kept, index, tokens), axis=1)[:, : _capacity(cfg, tokens)]
    keep = anchors < tokens
    return jnp.where(keep, anchors, 0), keep


def check_row_anchors(batch: PackedBatch, cfg: Any) -> None:
    """Raise UserError, on the host, where a row has more anchors than the update is compiled for."""
    segments, labels = np.asarray(batch.segment_ids), np.asarray(batch.label_mask) > 0
    capacity = _capacity(cfg, segments.shape[1])
    legal = (segments[:, :-1] > 0) & (segments[:, :-1] == segments[:, 1:]) & labels[:, 1:]
    if cfg.anchor_rule == "official":
        legal &= labels[:, :-1]
    for row, (documents, ok) in enumerate(zip(segments[:, :-1], legal, strict=True)):
        needed = int(np.minimum(np.bincount(documents[ok]), cfg.num_anchors).sum())
        if needed > capacity:
            raise UserError(
                f"row_anchors={cfg.row_anchors} must be >= {needed}, the anchors of packed row {row} at "
                f"num_anchors={cfg.num_anchors} a document; raise row_anchors or lower num_anchors"
            )


def _capacity(cfg: BlockDraftConfig, tokens: int) -> int:
    return tokens if cfg.row_anchors is None else min(cfg.row_anchors, tokens)


def _smallest_of_each(
    documents: Int[Array, " T"], hashes: UInt32[Array, " T"], legal: Bool[Array, " T"], count: int
) -> Bool[Array, " T"]:
    """The `count` legal tokens of smallest hash of each document; of equal hashes the earlier token."""
    tokens = documents.shape[0]
    index = jnp.arange(tokens, dtype=jnp.int32)
    group = jnp.where(legal, documents, 0)  # 0: not legal; sorted to the front and never kept
    group, _, place = jax.lax.sort((group, hashes, index), num_keys=3)
    first = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
    start = jax.lax.cummax(jnp.where(first, index, 0))
    return jnp.zeros(tokens, bool).at[place].set((group > 0) & (index - start < count), unique_indices=True)
