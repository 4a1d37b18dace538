"""Training forward of the block drafts on packed rows.

The block of anchor a reads the context s < a of its own document and its own rows, as it does in a rollout. Draft i of
it stands for x_{a+1+i}, in DFlash (row i + 1) as in DSpark (row i), and learns from that token and from the policy's
law at a + i. A label is live where its token is supervised and lies in the document of its anchor; in DSpark also only
if all labels of its block before it are live.

Letters: R rows, T tokens, C anchors of a row, d drafts of a block, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key, Shaped

from draftco_jax.drafts.base import DraftReport, LossFn, Target, TrainingContext
from draftco_jax.drafts.blocks.anchors import select_anchors
from draftco_jax.drafts.blocks.body import BlockDraft, head_logits
from draftco_jax.drafts.blocks.config import BlockDraftConfig
from draftco_jax.drafts.labels import Labels, weigh_labels
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.draft import label_probability
from draftco_jax.losses.law_pair import LawPairTerms, law_pair_terms
from draftco_jax.models.layers import rotary_angles
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import SamplingConfig, law
from draftco_jax.types import PackedBatch

Out = TypeVar("Out")


class BlockLabels(NamedTuple):
    """What the drafts of each block stand for."""

    index: jax.Array  # i32[R, C, d] index of the label's token in its row; inside the row also where not live
    live: jax.Array  # f32[R, C, d] 1 where the label is trained on
    documents: jax.Array  # i32[R, C] segment id of the anchor, 0 where there is none


class Forward(NamedTuple):
    """The training forward of blocks, up to what both laws say of each label."""

    states: jax.Array  # [R, C, d, D] after the final norm
    previous: jax.Array  # i32[R, C, d] the token before each label, from the data
    features: jax.Array  # [R, C, d, F] the logits are features @ kernel
    kernel: jax.Array  # [F, V]
    blocks: BlockLabels
    labels: Labels  # arrays [d, R, C]
    terms: LawPairTerms  # arrays [d, R, C]


def block_labels(
    batch: PackedBatch, anchors: Int[Array, "R C"], keep: Bool[Array, "R C"], cfg: BlockDraftConfig
) -> BlockLabels:
    """Labels of the blocks of these anchors."""
    drafts, tokens = cfg.max_draft_length, batch.tokens.shape[1]
    index = anchors[:, :, None] + jnp.arange(1, drafts + 1, dtype=anchors.dtype)[None, None, :]
    inside = index < tokens
    index = jnp.where(inside, index, tokens - 1)
    documents = jnp.where(keep, at_index(batch.segment_ids, anchors), 0)
    same = inside & (documents[:, :, None] > 0) & (at_index(batch.segment_ids, index) == documents[:, :, None])
    live = (same & (at_index(batch.label_mask, index) > 0)).astype(jnp.float32)
    return BlockLabels(index, jnp.cumprod(live, axis=-1) if cfg.cut_at_gap else live, documents)


def previous_tokens(batch: PackedBatch, blocks: BlockLabels) -> Int[Array, "R C d"]:
    """The token before each label, from the data; 0 past the end of the document, where no label is live."""
    before = blocks.index - 1
    own = at_index(batch.segment_ids, before) == blocks.documents[:, :, None]
    return jnp.where(own, at_index(batch.tokens, before), 0)


def at_index(values: Shaped[Array, "R T *rest"], index: Int[Array, "R *n"]) -> Shaped[Array, "R ..."]:
    """values[r, index[r, ...]]; every index lies in 0..T-1."""
    return jax.vmap(lambda v, i: v.at[i].get(mode="promise_in_bounds"))(values, index)


def weighed(batch: PackedBatch, blocks: BlockLabels, cfg: BlockDraftConfig) -> Labels:
    """Masks and weights of the labels, draft first: draft i weighs exp(-i / gamma)."""
    gamma = cfg.loss_decay_gamma
    decay = tuple(1.0 if gamma is None else math.exp(-i / gamma) for i in range(cfg.max_draft_length))
    of_label = lambda values: draft_first(at_index(values, blocks.index))  # noqa: E731
    return weigh_labels(
        draft_first(blocks.live),
        decay,
        blocks.documents,
        batch,
        cfg.loss,
        rewards=of_label(batch.label_rewards),
        advantages=of_label(batch.label_advantages),
    )


def denominator(batch: PackedBatch, cfg: BlockDraftConfig, key: Key[Array, ""]) -> Float32[Array, ""]:
    """What the loss of these rows is divided by. `key` is that of the optimizer step, as in the loss.

    With several shards or micro-batches the caller adds these up and passes the sum to each.
    """
    anchors, keep = select_anchors(key, batch, cfg)
    return weighed(batch, block_labels(batch, anchors, keep, cfg), cfg).denominator


def on_chosen_anchors(loss_at: LossFn) -> LossFn:
    """The loss of a family, made of its loss at given anchors: the key of the optimizer step chooses them.

    The result takes (draft, target, batch, *, denominator, key, context): the policy's forward on `batch`, the global
    sum of `denominator(batch, cfg, key)`, and what the update says of sampling, chunks and k.
    """

    def blocks_loss(
        draft: BlockDraft,
        target: Target,
        batch: PackedBatch,
        *,
        denominator: Array,
        key: Key[Array, ""],
        context: TrainingContext,
    ) -> tuple[Float32[Array, ""], DraftReport]:
        anchors, keep = select_anchors(key, batch, draft.cfg)
        return loss_at(draft, target, batch, anchors, keep, denominator=denominator, context=context)

    return blocks_loss


def forward(
    draft: BlockDraft,
    target: Target,
    batch: PackedBatch,
    anchors: Int[Array, "R C"],
    keep: Bool[Array, "R C"],
    context: TrainingContext,
    *,
    with_teacher: bool,
) -> Forward:
    """Run the blocks of these anchors and compare their laws with the policy's; `target` must be cut already.

    Without a teacher only the terms of the label's own token are there, the others are 0.
    """
    states = block_states(draft, target, batch, anchors, keep)
    blocks = block_labels(batch, anchors, keep, draft.cfg)
    previous = previous_tokens(batch, blocks)
    features, kernel = draft.label_features(states, previous, target.head)
    terms = label_terms(
        features, kernel, target if with_teacher else target._replace(hidden=None), batch, blocks, context
    )
    return Forward(states, previous, features, kernel, blocks, weighed(batch, blocks, draft.cfg), terms)


def block_states(
    draft: BlockDraft, target: Target, batch: PackedBatch, anchors: Int[Array, "R C"], keep: Bool[Array, "R C"]
) -> Float[Array, "R C d D"]:
    """States of the drafts of all blocks, after the final norm; finite, and meaningless, where there is no anchor."""
    cfg = draft.cfg
    trunk = draft.context(target.taps, rotary_angles(batch.positions, cfg.head_dim, cfg.rope_theta))
    positions = block_positions(batch.positions, anchors, cfg.rows)
    angles = rotary_angles(positions.reshape(positions.shape[0], -1), cfg.head_dim, cfg.rope_theta)
    documents = at_index(batch.segment_ids, anchors)
    allowed = keep[:, :, None] & (documents[:, :, None] == batch.segment_ids[:, None, :])
    newest = target.embedding[at_index(batch.tokens, anchors)]
    return draft.run(newest, target.embedding[cfg.mask_token_id], angles, trunk, anchors, allowed)


def block_positions(positions: Int[Array, "R T"], anchors: Int[Array, "R C"], rows: int) -> Int[Array, "R C n"]:
    """Position in the document of each row of a block: that of the anchor and those after it."""
    return at_index(positions, anchors)[:, :, None] + jnp.arange(rows, dtype=positions.dtype)[None, None, :]


def draft_first(values: Shaped[Array, "R C d"]) -> Shaped[Array, "d R C"]:
    """As the losses want it: steps before rows."""
    return jnp.moveaxis(values, -1, 0)


def label_terms(
    features: Float[Array, "R C d F"],
    kernel: Float[Array, "F V"],
    target: Target,
    batch: PackedBatch,
    blocks: BlockLabels,
    context: TrainingContext,
) -> LawPairTerms:
    """Both laws of every label, arrays [d, R, C]; the policy's law of a label is that of the index before it."""

    def terms(features: Array, labels: Array, at: Array) -> LawPairTerms:
        return law_pair_terms(
            features,
            kernel,
            teacher_states(target, at),
            None if target.hidden is None else target.head,
            labels,
            kept=None,
            sampling=context.sampling,
            tile=context.tile,
        )

    arrays = features, at_index(batch.tokens, blocks.index), _flat_index(blocks, batch.tokens.shape[1])
    return _map_labels(terms, arrays, context)


def draft_acceptance(
    run: Forward, target: Target, batch: PackedBatch, context: TrainingContext, *, proposes_mode: bool
) -> Float32[Array, "d R C"]:
    """Probability that a rollout accepts each draft, given the data before it; no gradient.

    Drawn drafts: sum_v min(p(v), q(v)). Drafts that are the likeliest token of q: p of that token. Where the policy's
    states are not there, unbiased estimates from the label, which was drawn from p: min(1, q(label) / p(label)) with
    the log-prob that the policy drew it with, or whether the label is the draft's token.
    """
    run = lax.stop_gradient(run)
    if target.hidden is None:
        if proposes_mode:
            return run.terms.label_is_mode
        drawn_with = jnp.exp(draft_first(at_index(batch.label_logprobs, run.blocks.index)))
        return jnp.minimum(label_probability(run.terms) / drawn_with, 1.0)
    if not proposes_mode:
        return run.terms.overlap

    def probability(features: Array, at: Array) -> Float32[Array, " N"]:
        mode = likeliest(features, run.kernel, context.tile)
        return policy_probability(target, at, mode, context)

    arrays = run.features, _flat_index(run.blocks, batch.tokens.shape[1])
    return _map_labels(probability, arrays, context)


def teacher_states(target: Target, at: Int[Array, " N"]) -> Float[Array, "N D"] | None:
    """The policy's states at these indices of the flattened rows."""
    if target.hidden is None:
        return None
    return target.hidden.reshape(-1, target.hidden.shape[-1]).at[at].get(mode="promise_in_bounds")


def policy_probability(
    target: Target, at: Int[Array, " N"], tokens: Int32[Array, " N"], context: TrainingContext
) -> Float32[Array, " N"]:
    """p(token) at these indices, under the filters of the rollouts too (which takes dense logits)."""
    states = teacher_states(target, at)
    assert states is not None
    if context.sampling.filtered:
        return pick(law(head_logits(states, target.head), context.sampling), tokens)
    # The policy's own head in the place of a draft's: its cross-entropy at the token, a tile at a time.
    tempered = SamplingConfig(temperature=context.sampling.temperature)
    terms = law_pair_terms(states, target.head, None, None, tokens, kept=None, sampling=tempered, tile=context.tile)
    return jnp.exp(-terms.hard_cross_entropy)


def likeliest(features: Float[Array, "N F"], kernel: Float[Array, "F V"], tile: int) -> Int32[Array, " N"]:
    """argmax of features @ kernel, `tile` columns at a time; the smallest of equals."""
    width = kernel.shape[1]
    if width <= tile:
        return jnp.argmax(head_logits(features, kernel), axis=-1).astype(jnp.int32)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        largest, best = carry
        start = jnp.minimum(i * tile, width - tile)  # the last tile overlaps the one before: it cannot win by equality
        logits = head_logits(features, lax.dynamic_slice_in_dim(kernel, start, tile, axis=1))
        top, at = jnp.max(logits, axis=-1), start + jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jnp.maximum(largest, top), jnp.where(top > largest, at, best)

    count = features.shape[0]
    init = jnp.full(count, -jnp.inf, jnp.float32), jnp.zeros(count, jnp.int32)
    return lax.fori_loop(0, -(-width // tile), body, init)[1]


def _map_labels(fn: Callable[..., Out], arrays: tuple[Array, ...], context: TrainingContext) -> Out:
    """fn over the leading [R, C, d] of every array, a chunk of labels at a time; results draft first, [d, R, C]."""
    rows, blocks, drafts = arrays[0].shape[:3]
    flat = tuple(a.reshape(rows, blocks * drafts, *a.shape[3:]) for a in arrays)
    out = map_tokens(fn, flat, chunk_tokens=context.chunk_tokens)
    return jax.tree.map(lambda a: draft_first(a.reshape(rows, blocks, drafts)), out)


def _flat_index(blocks: BlockLabels, tokens: int) -> Int[Array, "R C d"]:
    """Index, in the flattened rows, whose law of the policy is that of the label: the one before it."""
    row = jnp.arange(blocks.index.shape[0], dtype=blocks.index.dtype)
    return row[:, None, None] * tokens + blocks.index - 1
