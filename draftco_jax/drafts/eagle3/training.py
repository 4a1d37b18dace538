"""Training-time test of EAGLE-3 on packed rows: losses and acceptance of K passes.

For index t and pass k: input token x_{t+1+k} (ground truth), hidden state fc(taps_t) or the own output of pass k - 1 at
t, label law = the policy's law at t + 1 + k, predicted token x_{t+2+k}. A pass is live where that token is supervised
and lies in the document of t (`label_mask="label"`). The official code reads the mask of x_{t+k} instead, which leaves
the first two tokens of a response out of pass 0 and trains the law after the last one (`label_mask="official"`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.drafts.base import DraftReport, Target, TrainingContext
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.module import Eagle3
from draftco_jax.drafts.labels import Ahead, Labels, draft_loss, report, step_terms, weigh_labels
from draftco_jax.models.functional import Params
from draftco_jax.types import PackedBatch


def from_policy(draft: Params, policy: Params) -> Params:
    """A fresh draft whose head and final norm are copies of the policy's (full draft vocabulary, equal widths)."""
    head = policy["lm_head"]["kernel"] if "lm_head" in policy else policy["embed_tokens"].T
    own = draft["lm_head"]["kernel"].shape
    if own != head.shape:
        raise ValueError(
            f"draft head {own} must have the shape {head.shape} of the policy's; "
            "start a draft of a reduced vocabulary or another width from a checkpoint"
        )
    return draft | {"lm_head": {"kernel": jnp.array(head)}, "norm": jax.tree.map(jnp.array, policy["norm"])}


def look_ahead(batch: PackedBatch, cfg: Eagle3Config, packed: PackedRows = WHOLE_ROWS) -> Ahead:
    """The batch with as much of what follows as the passes ask for."""
    return Ahead(batch, cfg.label_reach, packed)


def pass_masks(ahead: Ahead, cfg: Eagle3Config) -> Float32[Array, "n R T"]:
    """1 where pass k at t is live."""
    label = cfg.label_mask == "label"
    masks = []
    for k in range(cfg.passes):
        # The token whose mask is asked, and how far ahead the document must reach: the policy's law at t + 1 + k.
        asked, reach = (k + 2, k + 2) if label else (k, k + 1)
        masks.append(ahead.at("label_mask", asked) * ahead.same_document(reach).astype(jnp.float32))
    return jnp.stack(masks)


def labels(ahead: Ahead, cfg: Eagle3Config) -> Labels:
    """Every index of a row is an anchor; pass k weighs pass_decay^k."""
    of_label = lambda name: jnp.stack([ahead.at(name, k + 2) for k in range(cfg.passes)])  # noqa: E731
    return weigh_labels(
        pass_masks(ahead, cfg),
        tuple(cfg.pass_decay**k for k in range(cfg.passes)),
        ahead.batch.segment_ids,
        ahead.batch,
        cfg.loss,
        rewards=of_label("label_rewards"),
        advantages=of_label("label_advantages"),
        packed=ahead.packed,
    )


def denominator(
    batch: PackedBatch, cfg: Eagle3Config, key: Key[Array, ""], packed: PackedRows = WHOLE_ROWS
) -> Float32[Array, ""]:
    """What the loss of these rows is divided by: for valid labels sum_k w_k * (number of live labels of pass k).

    With several devices or micro-batches the caller adds these up and passes the sum to each. A label that the draft
    cannot say counts too: that it cannot is known only once the policy has run.
    """
    return labels(look_ahead(batch, cfg, packed), cfg).denominator


def passes_loss(
    draft: Eagle3,
    target: Target,
    batch: PackedBatch,
    *,
    denominator: Array,
    key: Key[Array, ""],
    context: TrainingContext,
) -> tuple[Float32[Array, ""], DraftReport]:
    """Loss over all passes, and what each pass would have been accepted with.

    loss = sum_k w_k sum_t live_k(t) loss_k(t) / denominator, teacher and student at the sampling temperature; soft
    cross-entropy takes the teacher restricted to the draft vocabulary and renormalised. A label counts only where the
    policy's mode is a draft id. Gradients reach the draft's parameters only: taps, hidden states, head and embedding
    are cut here, whatever the caller passes.

    Args:
        draft: the draft model.
        target: the policy's forward on `batch`.
        batch: packed rows.
        denominator: global sum of `denominator(batch, cfg, key)`.
        key: not used, this family draws nothing.
        context: sampling of the rollouts (losses use the temperature, acceptance the filters too), chunk of tokens,
            k of the rollouts, how the batch is spread over devices.
    """
    target = jax.lax.stop_gradient(target)
    cfg, packed = draft.cfg, context.packed
    ahead = look_ahead(batch, cfg, packed)
    embeds = [target.embedding[ahead.tokens(k + 1)] for k in range(cfg.passes)]
    states = draft.passes(embeds, target.taps, batch.positions, batch.segment_ids, packed)

    features = draft.features(jnp.stack(states, axis=2))
    kernel = draft.lm_head.kernel[...]
    terms = step_terms(features, kernel, target.hidden, target.head, ahead, context, kept=draft.kept)
    of_batch = labels(ahead, cfg)
    loss, per_label = draft_loss(terms, of_batch, cfg.loss, denominator)
    return loss, report(per_label, terms.overlap, of_batch.masks, context)
