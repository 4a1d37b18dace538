"""Training forward of the block drafts on packed rows.

The block of anchor a reads the context s < a of its own document and its own rows, as it does in a rollout. Draft i of
it stands for x_{a+1+i}, in DFlash (row i + 1) as in DSpark (row i), and learns from that token and from the policy's
law at a + i. A label is live where its token is supervised and lies in the document of its anchor; in DSpark also only
if all labels of its block before it are live.

Letters: R rows and T tokens of this device, E = tokens of a row with its halos, C anchors of a row, d drafts of a
block, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key, Shaped

from draftco_jax.context_parallel import WHOLE_ROWS, Branch, PackedRows
from draftco_jax.drafts.base import DraftReport, LossFn, Target, TrainingContext
from draftco_jax.drafts.blocks.anchors import select_anchors
from draftco_jax.drafts.blocks.body import BlockDraft, BranchAttention, head_logits
from draftco_jax.drafts.blocks.config import BlockDraftConfig, LayerType
from draftco_jax.drafts.labels import Ahead, Labels, weigh_labels
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.draft import label_probability
from draftco_jax.losses.head_walk import rows, walk_head
from draftco_jax.losses.law_pair import LawPairTerms, Teacher, law_pair_terms
from draftco_jax.models.layers import rotary_angles
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import law
from draftco_jax.types import PackedBatch
from pallas_kernels.manual_axes import fresh, varying_axes


class BlockLabels(NamedTuple):
    """What the drafts of each block stand for."""

    place: jax.Array  # i32[R, C, d] of the label's token in the extended row (`Ahead.flat`), also where not live
    live: jax.Array  # f32[R, C, d] 1 where the label is trained on
    documents: jax.Array  # i32[R, C] segment id of the anchor, 0 where there is none


class Forward(NamedTuple):
    """The training forward of blocks, up to what both laws say of each label."""

    states: jax.Array  # [R, C, d, D] after the final norm
    previous: jax.Array  # i32[R, C, d] the token before each label, from the data
    features: jax.Array  # [R, C, d, F] the logits are features @ kernel
    kernel: jax.Array  # [F, V]
    ahead: Ahead
    blocks: BlockLabels
    labels: Labels  # arrays [d, R, C]
    terms: LawPairTerms  # arrays [d, R, C]


def look_ahead(batch: PackedBatch, cfg: BlockDraftConfig, packed: PackedRows = WHOLE_ROWS) -> Ahead:
    """The batch with as much of what follows as a block reaches."""
    return Ahead(batch, cfg.label_reach, packed)


def block_labels(
    ahead: Ahead, anchors: Int[Array, "R C"], keep: Bool[Array, "R C"], cfg: BlockDraftConfig
) -> BlockLabels:
    """Labels of the blocks of these anchors; those of a block that goes on on another device are at hand too."""
    place = ahead.places(anchors)[:, :, None] + jnp.arange(1, cfg.max_draft_length + 1, dtype=jnp.int32)[None, None, :]
    documents = jnp.where(keep, at_index(ahead.batch.segment_ids, anchors), 0)
    same = (documents[:, :, None] > 0) & (at_index(ahead.flat("segment_ids"), place) == documents[:, :, None])
    live = (same & (at_index(ahead.flat("label_mask"), place) > 0)).astype(jnp.float32)
    return BlockLabels(place, jnp.cumprod(live, axis=-1) if cfg.cut_at_gap else live, documents)


def previous_tokens(ahead: Ahead, blocks: BlockLabels) -> Int[Array, "R C d"]:
    """The token before each label, from the data; 0 past the end of the document, where no label is live."""
    before = blocks.place - 1
    own = at_index(ahead.flat("segment_ids"), before) == blocks.documents[:, :, None]
    return jnp.where(own, at_index(ahead.flat("tokens"), before), 0)


def at_index(values: Shaped[Array, "R T *rest"], index: Int[Array, "R *n"]) -> Shaped[Array, "R ..."]:
    """values[r, index[r, ...]]; every index lies in 0..T-1."""
    return jax.vmap(lambda v, i: v.at[i].get(mode="promise_in_bounds"))(values, index)


def weighed(ahead: Ahead, blocks: BlockLabels, cfg: BlockDraftConfig) -> Labels:
    """Masks and weights of the labels, draft first: draft i weighs exp(-i / gamma)."""
    gamma = cfg.loss_decay_gamma
    decay = tuple(1.0 if gamma is None else math.exp(-i / gamma) for i in range(cfg.max_draft_length))
    of_label = lambda name: draft_first(at_index(ahead.flat(name), blocks.place))  # noqa: E731
    return weigh_labels(
        draft_first(blocks.live),
        decay,
        blocks.documents,
        ahead.batch,
        cfg.loss,
        rewards=of_label("label_rewards"),
        advantages=of_label("label_advantages"),
        packed=ahead.packed,
    )


def denominator(
    batch: PackedBatch, cfg: BlockDraftConfig, key: Key[Array, ""], packed: PackedRows = WHOLE_ROWS
) -> Float32[Array, ""]:
    """What the loss of these rows is divided by. `key` is that of the optimizer step, as in the loss.

    With several devices or micro-batches the caller adds these up and passes the sum to each.
    """
    ahead = look_ahead(batch, cfg, packed)
    anchors, keep = select_anchors(key, ahead, cfg)
    return weighed(ahead, block_labels(ahead, anchors, keep, cfg), cfg).denominator


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
        anchors, keep = select_anchors(key, look_ahead(batch, draft.cfg, context.packed), draft.cfg)
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
    states = block_states(draft, target, batch, anchors, keep, context.packed)
    ahead = look_ahead(batch, draft.cfg, context.packed)
    blocks = block_labels(ahead, anchors, keep, draft.cfg)
    previous = previous_tokens(ahead, blocks)
    features, kernel = draft.label_features(states, previous, target.head)
    teacher = teacher_of(target, ahead, blocks) if with_teacher else None
    # The policy's head comes first in every kernel, and what is trained after it.
    terms = label_terms(features, kernel, teacher, ahead, blocks, context, frozen_rows=target.head.shape[0])
    return Forward(states, previous, features, kernel, ahead, blocks, weighed(ahead, blocks, draft.cfg), terms)


def block_states(
    draft: BlockDraft,
    target: Target,
    batch: PackedBatch,
    anchors: Int[Array, "R C"],
    keep: Bool[Array, "R C"],
    packed: PackedRows = WHOLE_ROWS,
) -> Float[Array, "R C d D"]:
    """States of the drafts of all blocks, after the final norm; finite, and meaningless, where there is no anchor.

    The context of a layer is the trunk, which may lie on other devices; the rows of a block are a branch.
    """
    cfg = draft.cfg
    context = draft.context(target.taps, rotary_angles(batch.positions, cfg.head_dim, cfg.rope_theta))
    positions = block_positions(batch.positions, anchors, cfg.rows)
    angles = rotary_angles(positions.reshape(positions.shape[0], -1), cfg.head_dim, cfg.rope_theta)
    newest = target.embedding[at_index(batch.tokens, anchors)]
    attention = [
        layer_attention(cfg, kind, packed, k, v, batch, anchors, keep)
        for kind, (k, v) in zip(cfg.layer_types, context, strict=True)
    ]
    return draft.run(newest, target.embedding[cfg.mask_token_id], angles, attention)


def layer_attention(
    cfg: BlockDraftConfig,
    kind: LayerType,
    packed: PackedRows,
    k: Float[Array, "R T K H"],
    v: Float[Array, "R T K H"],
    batch: PackedBatch,
    anchors: Int[Array, "R C"],
    keep: Bool[Array, "R C"],
) -> BranchAttention:
    """Attention of one layer over the context of each block, before its anchor, and the block itself."""
    seen = packed.before_anchors(batch.positions, anchors, keep, rows=cfg.rows, window=cfg.window_of(kind))

    def attend(q: Array, keys: Array, values: Array) -> Array:
        branch = Branch(keys.astype(q.dtype), values.astype(q.dtype), keep)
        trunk = packed.trunk(k.astype(q.dtype), v.astype(q.dtype))
        return packed.branch_attention(q, trunk, seen, branch, rule=cfg.rule_of(kind))

    return attend


def block_positions(positions: Int[Array, "R T"], anchors: Int[Array, "R C"], rows: int) -> Int[Array, "R C n"]:
    """Position in the document of each row of a block: that of the anchor and those after it."""
    return at_index(positions, anchors)[:, :, None] + jnp.arange(rows, dtype=positions.dtype)[None, None, :]


def draft_first(values: Shaped[Array, "R C d"]) -> Shaped[Array, "d R C"]:
    """As the losses want it: steps before rows."""
    return jnp.moveaxis(values, -1, 0)


def teacher_of(target: Target, ahead: Ahead, blocks: BlockLabels) -> Teacher:
    """States of this device's tokens and of those that its blocks reach; a label's law is that of the index before it,
    labels in the order [R, C, d]."""
    assert target.hidden is not None
    states = ahead.flatten(ahead.packed.extend(target.hidden, ahead.reach))
    row = states.shape[1] * jnp.arange(states.shape[0], dtype=blocks.place.dtype)
    at = row[:, None, None] + blocks.place - 1
    return Teacher(states.reshape(-1, states.shape[-1]), target.head, at.reshape(-1))


def label_terms(
    features: Float[Array, "R C d F"],
    kernel: Float[Array, "F V"],
    teacher: Teacher | None,
    ahead: Ahead,
    blocks: BlockLabels,
    context: TrainingContext,
    *,
    frozen_rows: int,
) -> LawPairTerms:
    """Both laws of every label, arrays [d, R, C]; `frozen_rows` of the kernel get no gradient."""
    terms = law_pair_terms(
        features.reshape(-1, features.shape[-1]),
        kernel,
        teacher,
        at_index(ahead.flat("tokens"), blocks.place).reshape(-1),
        kept=None,
        sampling=context.sampling,
        tile=context.tile,
        chunk_tokens=context.chunk_tokens,
        frozen_rows=frozen_rows,
    )
    return jax.tree.map(lambda a: draft_first(a.reshape(blocks.place.shape)), terms)


def draft_acceptance(
    run: Forward, target: Target, context: TrainingContext, *, proposes_mode: bool
) -> Float32[Array, "d R C"]:
    """Probability that a rollout accepts each draft, given the data before it; no gradient.

    Drawn drafts: sum_v min(p(v), q(v)). Drafts that are the likeliest token of q: p of that token. Where the policy's
    states are not there, unbiased estimates from the label, which was drawn from p: min(1, q(label) / p(label)) with
    the log-prob that the policy drew it with, or whether the label is the draft's token.
    """
    terms, features, kernel = lax.stop_gradient((run.terms, run.features, run.kernel))
    if target.hidden is None:
        if proposes_mode:
            return terms.label_is_mode
        drawn_with = jnp.exp(draft_first(at_index(run.ahead.flat("label_logprobs"), run.blocks.place)))
        return jnp.minimum(label_probability(terms) / drawn_with, 1.0)
    if not proposes_mode:
        return terms.overlap
    teacher = teacher_of(target, run.ahead, run.blocks)

    def probability(features: Array, at: Array) -> Float32[Array, " N"]:
        mode = likeliest(features, kernel, context.tile)
        return policy_probability(rows(teacher.states, at), teacher.head, mode, context)

    flat = features.reshape(1, -1, features.shape[-1]), teacher.at[None]
    accepted = map_tokens(probability, flat, chunk_tokens=context.chunk_tokens)
    return draft_first(accepted.reshape(run.blocks.place.shape))


def policy_probability(
    states: Float[Array, "N D"], head: Float[Array, "D V"], tokens: Int32[Array, " N"], context: TrainingContext
) -> Float32[Array, " N"]:
    """p(token) at these states, under the filters of the rollouts too (which takes dense logits)."""
    if context.sampling.filtered:
        return pick(law(head_logits(states, head), context.sampling), tokens)
    found = walk_head(states, head, None, tokens, temperature=context.sampling.temperature, tile=context.tile)
    return jnp.exp(found.label_logit - found.log_sum)


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
    axes = varying_axes(features, kernel)
    init = fresh((count,), -jnp.inf, jnp.float32, axes), fresh((count,), 0, jnp.int32, axes)
    return lax.fori_loop(0, -(-width // tile), body, init)[1]
