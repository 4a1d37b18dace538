"""Both laws over one chunk of labels, a tile of the vocabulary at a time: terms and gradients.

`losses/law_pair.py` says what is computed and folds over chunks; nothing here is larger than [chunk, tile].
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from draftco_jax.losses.head_walk import TeacherLaw, tile_ids, tile_logits, walk_head
from draftco_jax.losses.parts import columns, fold_parts, part_of


class LawPairTerms(NamedTuple):
    """Both laws at each token, float32 [N]; nats where it is an entropy. The first four are differentiable in q."""

    soft_cross_entropy: Array  # -sum_v p~(v) log q(v) over draft ids
    hard_cross_entropy: Array  # -log q(label); 0, without gradient, where the draft lacks the label
    l1: Array  # sum_v |p(v) - q(v)| over all target ids, in [0, 2]; q = 0 on ids the draft lacks
    overlap: Array  # sum_v min(p(v), q(v)): what a rollout accepts; of the FILTERED laws, no gradient, under a filter
    mode_kept: Array  # 1 where the policy's most likely token is a draft id; no gradient
    label_kept: Array  # 1 where the label is a draft id; no gradient
    label_is_mode: Array  # 1 where the draft's most likely token is the label; no gradient
    unfiltered_overlap: Array | None = None  # sum_v min(p, q) before the filters, differentiable; None: it is `overlap`


class Static(NamedTuple):
    """What is known when the program is compiled."""

    tile: int
    chunk: int
    temperature: float
    frozen_rows: int
    span: int | None  # rows of states that are slid along the chunks; None: each label's own is picked


class ChunkTeacher(NamedTuple):
    """The policy, as one chunk of labels sees it."""

    hidden: Array  # [s, D] states that the labels learn from
    at: Array | None  # i32[c] row of `hidden` of each label; None: its own place
    head: Array  # [D, V]
    law: TeacherLaw  # of each label, [c]

    def of_labels(self, values: Array) -> Array:
        """Values of the states as values of the labels; NaN where `at` names a state that is not here."""
        return values if self.at is None else values.at[self.at].get(mode="fill", fill_value=jnp.nan)


class Chunk(NamedTuple):
    """Labels that are looked at together."""

    features: Array  # [c, F]
    kernel: Array  # [F, W]
    labels: Array  # i32[c]
    kept: Array | None  # i32[W]
    teacher: ChunkTeacher | None


class Found(NamedTuple):
    """What the backward pass needs of the forward, float32 [N]."""

    log_sum: Array  # of the draft's logits
    sign_mean: Array  # sum_v q sign(q - p)
    label_kept: Array


class Weights(NamedTuple):
    """What each term's gradient is multiplied with, float32 [N]."""

    soft: Array
    hard: Array
    distance: Array

    @classmethod
    def of(cls, static: Static, cotangents: LawPairTerms) -> Weights:
        scale = jnp.float32(1.0 / static.temperature)
        distance = scale * (cotangents.l1 - 0.5 * cotangents.overlap)
        return cls(scale * cotangents.soft_cross_entropy, scale * cotangents.hard_cross_entropy, distance)


def chunk_terms(static: Static, chunk: Chunk) -> tuple[LawPairTerms, Found]:
    """Terms of one chunk: the draft's head alone, then both heads over draft ids."""
    sizes = {"temperature": static.temperature, "tile": static.tile}
    student = walk_head(chunk.features, chunk.kernel, chunk.kept, chunk.labels, **sizes)
    found = student.label_found.astype(jnp.float32)
    hard = jnp.where(student.label_found, student.log_sum - student.label_logit, 0.0)
    hit = (student.mode == chunk.labels).astype(jnp.float32)
    zero = jnp.zeros_like(hard)
    if chunk.teacher is None:
        return LawPairTerms(zero, hard, zero, zero, zero, found, hit), Found(student.log_sum, zero, found)

    def step(carry: tuple[Array, ...], start: Array | int, fresh: Array) -> tuple[Array, ...]:
        z, log_p, restricted = _pair_tile(static, chunk, start, fresh)
        soft, distance, overlap, sign_mean = carry
        q, p = jnp.exp(z - student.log_sum[:, None]), jnp.exp(log_p)
        soft += jnp.sum(jnp.where(restricted > 0, restricted * (student.log_sum[:, None] - z), 0.0), axis=-1)
        return (
            soft,
            distance + jnp.sum(jnp.abs(p - q), axis=-1),
            overlap + jnp.sum(jnp.minimum(p, q), axis=-1),
            sign_mean + jnp.sum(q * jnp.sign(q - p), axis=-1),
        )

    soft, distance, overlap, sign_mean = fold_parts(
        chunk.kernel.shape[1], static.tile, (zero, zero, zero, zero), step, read=chunk
    )
    law = chunk.teacher.law
    if chunk.kept is not None:  # the policy's mass on ids that the draft lacks
        distance += jnp.maximum(1.0 - jnp.exp(law.log_restricted - law.log_sum), 0.0)
    terms = LawPairTerms(soft, hard, distance, overlap, law.mode_kept, found, hit)
    return terms, Found(student.log_sum, sign_mean, found)


def chunk_gradients(
    static: Static, chunk: Chunk, found: Found, weights: Weights, d_kernel: Array
) -> tuple[Array, Array]:
    """Gradient of the features of one chunk, and `d_kernel` (without the frozen rows) with what this chunk adds."""
    dtype, trained = chunk.features.dtype, chunk.features[:, static.frozen_rows :]
    soft, hard, distance = (w[:, None] for w in weights)

    def step(carry: tuple[Array, Array], start: Array | int, fresh: Array) -> tuple[Array, Array]:
        d_features, d_kernel = carry
        size = fresh.shape[0]
        z, log_p, restricted = _pair_tile(static, chunk, start, fresh)
        q = jnp.exp(z - found.log_sum[:, None])
        is_label = (tile_ids(chunk.kept, start, size)[None, :] == chunk.labels[:, None]) & fresh[None, :]
        # No term where the draft lacks the label.
        dz = hard * (found.label_kept[:, None] * q - is_label.astype(jnp.float32))
        if chunk.teacher is not None:
            dz += soft * (q - restricted) + distance * q * (jnp.sign(q - jnp.exp(log_p)) - found.sign_mean[:, None])
        dz = dz.astype(dtype)
        part = columns(chunk.kernel, start, size).astype(dtype)
        d_features += jnp.matmul(dz, part.T, preferred_element_type=jnp.float32)
        new = jnp.matmul(trained.T, dz, preferred_element_type=jnp.float32).astype(d_kernel.dtype)
        # Columns that the tile before had are 0 in dz, so adding keeps what it wrote.
        new += columns(d_kernel, start, size)
        return d_features, lax.dynamic_update_slice_in_dim(d_kernel, new, start, axis=1)

    init = jnp.zeros(chunk.features.shape, jnp.float32), d_kernel
    d_features, d_kernel = fold_parts(chunk.kernel.shape[1], static.tile, init, step, read=(chunk, found, weights))
    return d_features.astype(dtype), d_kernel


def _pair_tile(static: Static, chunk: Chunk, start: Array | int, fresh: Array) -> tuple[Array, Array, Array]:
    """Draft logits z f32[c, tile], and log p (both -inf where not fresh) and p~ on the same ids."""
    size = fresh.shape[0]
    part = columns(chunk.kernel, start, size)
    z = jnp.where(fresh[None, :], tile_logits(chunk.features, part, static.temperature), -jnp.inf)
    teacher = chunk.teacher
    if teacher is None:
        return z, jnp.full_like(z, -jnp.inf), jnp.zeros_like(z)
    head, law = teacher.head, teacher.law
    head = columns(head, start, size) if chunk.kept is None else head[:, part_of(chunk.kept, start, size)]
    log_p = teacher.of_labels(tile_logits(teacher.hidden, head, static.temperature)) - law.log_sum[:, None]
    log_p = jnp.where(fresh[None, :], log_p, -jnp.inf)
    return z, log_p, jnp.exp(log_p + (law.log_sum - law.log_restricted)[:, None])
