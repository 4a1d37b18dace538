"""Training-time test of EAGLE-3 on packed rows: losses and acceptance of K passes.

For index t and pass k: input token x_{t+1+k} (ground truth), hidden state fc(taps_t) or the own output of pass k - 1 at
t, label law = the policy's law at t + 1 + k, predicted token x_{t+2+k}. A pass is live where that token is supervised
and lies in the document of t (the LABEL's mask; the official code reads the mask of x_{t+k}).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.drafts.eagle3.module import Eagle3
from draftco_jax.losses.chunked import map_tokens
from draftco_jax.losses.draft import (
    DraftTerms,
    acceptance,
    expected_accepted_length,
    pass_weighted_mean,
    soft_cross_entropy,
)
from draftco_jax.models.attention import packed_causal_mask
from draftco_jax.numerics.masked import masked_mean
from draftco_jax.numerics.sampling import SamplingConfig, law, log_law
from draftco_jax.numerics.shift import look_ahead, same_document
from draftco_jax.types import PackedBatch


class Target(NamedTuple):
    """What the draft learns from: the policy's own forward on the batch."""

    taps: jax.Array  # [R, T, A]
    hidden: jax.Array  # [R, T, D] after the final norm
    head: jax.Array  # [D, V]
    embedding: jax.Array  # [V, D]


class DraftReport(NamedTuple):
    """Statistics of a training-time test, float32."""

    losses: jax.Array  # [n] mean cross-entropy of each pass, nats
    acceptances: jax.Array  # [n] mean 1 - TV of each pass
    tau_prob: jax.Array  # [] mean of 1 + sum_k prod_{j<=k} (1 - TV_j)


def pass_weights(cfg: Eagle3Config) -> tuple[float, ...]:
    """Weight of each pass: pass_decay^k."""
    return tuple(cfg.pass_decay**k for k in range(cfg.passes))


def pass_masks(batch: PackedBatch, passes: int) -> Float32[Array, "n R T"]:
    """1 where pass k at t is live: x_{t+2+k} is supervised and in the document of t."""
    masks = [
        look_ahead(batch.label_mask, k + 2) * same_document(batch.segment_ids, k + 2).astype(jnp.float32)
        for k in range(passes)
    ]
    return jnp.stack(masks)


def denominator(batch: PackedBatch, cfg: Eagle3Config) -> Float32[Array, ""]:
    """sum_k w_k * (number of live labels of pass k): what the loss of these rows is divided by.

    With several shards or micro-batches the caller adds these up and passes the sum to each. A label that the draft
    cannot say counts too: that it cannot is known only once the policy has run.
    """
    counts = jnp.sum(pass_masks(batch, cfg.passes), axis=(1, 2))
    return jnp.sum(counts * jnp.array(pass_weights(cfg), jnp.float32))


def passes_loss(
    draft: Eagle3,
    target: Target,
    batch: PackedBatch,
    *,
    sampling: SamplingConfig,
    denominator: Array,
    chunk_tokens: int,
    draft_length: int,
) -> tuple[Float32[Array, ""], DraftReport]:
    """Soft cross-entropy over all passes, and what each pass would have been accepted with.

    loss = sum_k w_k sum_t live_k(t) ce_k(t) / denominator, teacher and student at the sampling temperature, teacher
    restricted to the draft vocabulary and renormalised. Gradients reach the draft's parameters only: taps, hidden
    states, head and embedding are cut here, whatever the caller passes.

    Args:
        draft: the draft model.
        target: the policy's forward on `batch`.
        batch: packed rows.
        sampling: temperature and filters of the rollouts. The loss uses the temperature, acceptance the filters too.
        denominator: global sum of `denominator(batch, cfg)`.
        chunk_tokens: tokens whose logits exist at one time.
        draft_length: k of the rollouts; tau_prob counts no pass beyond it.
    """
    if sampling.greedy:
        raise ValueError("temperature=0 must be > 0 to train a draft: a one-hot law has no finite log; use 1.0")
    target = jax.lax.stop_gradient(target)
    cfg = draft.cfg
    embeds = [target.embedding[_next_tokens(batch, k + 1)] for k in range(cfg.passes)]
    states = draft.passes(embeds, target.taps, batch.positions, packed_causal_mask(batch.segment_ids))
    masks = pass_masks(batch, cfg.passes)

    def terms(state: Float[Array, "n D"], teacher: Float[Array, "n D"]) -> tuple[DraftTerms, Array]:
        return _token_terms(draft, target.head, state, teacher, sampling)

    rows = []
    for k, state in enumerate(states):
        teacher = look_ahead(target.hidden, k + 1)
        token_terms, kept = map_tokens(terms, (state, teacher), chunk_tokens=chunk_tokens)
        rows.append((token_terms, masks[k] * kept))
    losses = jnp.stack([t.cross_entropy for t, _ in rows])
    accepted = jax.lax.stop_gradient(jnp.stack([t.acceptance for t, _ in rows]))
    loss = pass_weighted_mean(losses, jnp.stack([m for _, m in rows]), pass_weights(cfg), denominator)
    return loss, _report(losses, accepted, masks, draft_length)


def _next_tokens(batch: PackedBatch, steps: int) -> Int[Array, "R T"]:
    """x_{t+steps} inside the document, token 0 past its end (no live pass reads that)."""
    inside = same_document(batch.segment_ids, steps)
    return jnp.where(inside, look_ahead(batch.tokens, steps), 0)


def _token_terms(
    draft: Eagle3,
    head: Float[Array, "D V"],
    state: Float[Array, "n D"],
    teacher: Float[Array, "n D"],
    sampling: SamplingConfig,
) -> tuple[DraftTerms, Float32[Array, " n"]]:
    """Terms of each token, and 1 where its label can be learnt at all: the policy's mode is a draft id."""
    tempered = SamplingConfig(temperature=sampling.temperature)
    draft_logits = draft.logits(state)
    teacher_logits = jnp.matmul(teacher, head.astype(teacher.dtype), preferred_element_type=jnp.float32)
    if draft.cfg.draft_vocab_size < draft.cfg.vocab_size:
        ids = draft.draft_to_target[...]
        restricted = teacher_logits[:, ids]
        kept = (jnp.max(restricted, axis=-1) == jnp.max(teacher_logits, axis=-1)).astype(jnp.float32)
    else:
        restricted, kept = teacher_logits, jnp.ones(state.shape[:1], jnp.float32)
    entropy = soft_cross_entropy(log_law(restricted, tempered), log_law(draft_logits, tempered))
    q = draft.to_target_vocabulary(law(draft_logits, sampling))
    return DraftTerms(entropy, acceptance(law(teacher_logits, sampling), q)), kept


def _report(
    losses: Float[Array, "n R T"], acceptances: Float[Array, "n R T"], masks: Float[Array, "n R T"], draft_length: int
) -> DraftReport:
    """Means of each pass over its live labels, labels outside the draft vocabulary counted (they can be rejected)."""
    counts = jnp.sum(masks, axis=(1, 2))
    mean = jax.vmap(lambda v, m, c: masked_mean(v, m, count=c))
    total, anchors = expected_accepted_length(acceptances[:draft_length], masks[:draft_length])
    return jax.lax.stop_gradient(
        DraftReport(mean(losses, masks, counts), mean(acceptances, masks, counts), total / jnp.maximum(anchors, 1.0))
    )
