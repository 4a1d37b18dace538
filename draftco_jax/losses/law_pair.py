"""What the policy's law p and the draft's law q say about each other at single tokens, without [tokens, vocab] arrays.

Every family's draft logits are features @ kernel (a Markov bias is more feature columns), so one function serves all.
What p says alone is found once for each of the policy's states (`head_walk.teacher_law`). Both heads are then walked in
chunks of labels and tiles of columns: the draft's for its normalisers, both for the sums, and both once more in the
backward pass, which is written out here (z draft logits over the temperature, q = softmax(z), p~ = p restricted to
draft ids and renormalised):

    d soft_cross_entropy / dz = q - p~            d l1 / dz      = q * (sign(q - p) - sum_v q sign(q - p))
    d hard_cross_entropy / dz = q - 1[v = label]  d overlap / dz = - (d l1 / dz) / 2

The last line holds because sum_v min(p, q) = (P + 1 - sum_v |p - q|) / 2 over draft ids, P = sum_v p a constant.
Residuals are the arguments and a few numbers per label. Logits, laws and sums are float32; the products with the head
in the backward pass take dz rounded to the dtype of the features, as a bfloat16 head does everywhere else.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from draftco_jax.losses.head_walk import TeacherLaw, rows, teacher_law, tile_ids, tile_logits, walk_head
from draftco_jax.losses.parts import columns, fold_parts, part_of, with_part
from draftco_jax.numerics.sampling import SamplingConfig, law


class LawPairTerms(NamedTuple):
    """Both laws at each token, float32 [N]; nats where it is an entropy. The first four are differentiable in q."""

    soft_cross_entropy: Array  # -sum_v p~(v) log q(v) over draft ids
    hard_cross_entropy: Array  # -log q(label); 0, without gradient, where the draft lacks the label
    l1: Array  # sum_v |p(v) - q(v)| over all target ids, in [0, 2]; q = 0 on ids the draft lacks
    overlap: (
        Array  # sum_v min(p(v), q(v)): what a rollout accepts; of the FILTERED laws, no gradient, under top-k/top-p
    )
    mode_kept: Array  # 1 where the policy's most likely token is a draft id; no gradient
    label_kept: Array  # 1 where the label is a draft id; no gradient
    label_is_mode: Array  # 1 where the draft's most likely token is the label; no gradient
    unfiltered_overlap: Array | None = None  # sum_v min(p, q) before top-k/top-p, differentiable; None: it is `overlap`


class Teacher(NamedTuple):
    """The policy's states, and which of them has the law of each label."""

    states: Array  # [E, D] after the final norm
    head: Array  # [D, V]
    at: Array  # i32[N] row of `states`, in 0..E - 1


class _Static(NamedTuple):
    """What is known when the program is compiled."""

    tile: int
    chunk: int
    temperature: float
    frozen_rows: int


class _Draft(NamedTuple):
    """What gets a gradient."""

    features: Array  # [N, F]
    kernel: Array  # [F, W]


class _Fixed(NamedTuple):
    """What gets none."""

    teacher: Teacher | None
    law: TeacherLaw | None  # of each label, [N]
    labels: Array  # i32[N]
    kept: Array | None  # i32[W]


class _Chunk(NamedTuple):
    """Labels that are looked at together."""

    features: Array  # [c, F]
    hidden: Array | None  # [c, D]
    law: TeacherLaw | None  # [c]
    labels: Array  # i32[c]


class _Found(NamedTuple):
    """What the backward pass needs of the forward, float32 [N]."""

    log_sum: Array  # of the draft's logits
    sign_mean: Array  # sum_v q sign(q - p)
    label_kept: Array


def law_pair_terms(
    draft_features: Float[Array, "N F"],
    draft_kernel: Float[Array, "F W"],
    teacher: Teacher | None,
    labels: Int32[Array, " N"],
    *,
    kept: Int[Array, " W"] | None,
    sampling: SamplingConfig,
    tile: int,
    chunk_tokens: int,
    frozen_rows: int = 0,
) -> LawPairTerms:
    """Return the terms of N labels; gradients reach `draft_features` and `draft_kernel` only.

    Losses see the temperature only. With top-k or top-p `overlap` is that of the filtered laws, for which logits
    [chunk, V] of both heads are made; otherwise nothing through the vocabulary is larger than [chunk, tile]. Every row
    must be finite, also rows whose terms are masked afterwards.

    Args:
        draft_features: the draft's state at each label.
        draft_kernel: the draft's head; cast to the dtype of the features a tile at a time.
        teacher: the policy. None: only the label's terms are computed, the others are 0.
        labels: target ids. An id that no head has (such as -1) is one the draft lacks.
        kept: target id of each draft id, all different, in any order; None where the draft has the whole vocabulary.
        sampling: of the rollouts. Temperature 0 is refused: a one-hot law has no finite log.
        tile: columns of a head whose logits exist at one time, >= 1.
        chunk_tokens: labels whose logits exist at one time, >= 1.
        frozen_rows: leading rows of `draft_kernel` that are not the draft's own, such as the policy's head: their
            gradient is not computed and is 0.
    """
    if sampling.greedy:
        raise ValueError("temperature=0 must be > 0 to train a draft: a one-hot law has no finite log; use 1.0")
    for name, value, usual in (("tile", tile, 8192), ("chunk_tokens", chunk_tokens, 4096)):
        if value < 1:
            raise ValueError(f"{name}={value} must be >= 1; {usual} is usual")
    if kept is None and teacher is not None and teacher.head.shape[1] != draft_kernel.shape[1]:
        rule = f"must equal the policy's {teacher.head.shape[1]} without a map; pass kept"
        raise ValueError(f"draft vocabulary={draft_kernel.shape[1]} {rule}")
    static = _Static(tile, chunk_tokens, sampling.temperature, frozen_rows)
    draft = _Draft(draft_features, draft_kernel)
    kept = None if kept is None else kept.astype(jnp.int32)
    teacher = lax.stop_gradient(teacher)
    of_teacher = None
    if teacher is not None:
        sizes = {"temperature": sampling.temperature, "tile": tile, "chunk_tokens": chunk_tokens}
        of_teacher = teacher_law(*teacher, kept=kept, **sizes)
    fixed = _Fixed(teacher, of_teacher, labels, kept)
    terms = cast(LawPairTerms, _tempered_terms(static, draft, fixed))
    if teacher is None or not sampling.filtered:
        return terms
    filtered = _filtered_overlap(static, lax.stop_gradient(draft), fixed, sampling)
    return terms._replace(overlap=filtered, unfiltered_overlap=terms.overlap)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tempered_terms(static: _Static, draft: _Draft, fixed: _Fixed) -> LawPairTerms:
    return _forward(static, draft, fixed)[0]


def _forward(static: _Static, draft: _Draft, fixed: _Fixed) -> tuple[LawPairTerms, tuple[_Draft, _Fixed, _Found]]:
    """The terms, and what the backward pass needs."""

    def step(carry: tuple[LawPairTerms, _Found], start: Array | int, fresh: Array) -> tuple[LawPairTerms, _Found]:
        chunk = _chunk_of(draft, fixed, start, fresh.shape[0])
        return with_part(carry, _chunk_terms(static, draft.kernel, chunk, fixed), start)

    zero = jnp.zeros(fixed.labels.shape[0], jnp.float32)
    init = LawPairTerms(*[zero] * 7), _Found(zero, zero, zero)
    terms, found = fold_parts(fixed.labels.shape[0], static.chunk, init, step, read=(draft, fixed))
    return terms, (draft, fixed, found)


def _chunk_of(draft: _Draft, fixed: _Fixed, start: Array | int, size: int) -> _Chunk:
    features, of_teacher, labels = part_of((draft.features, fixed.law, fixed.labels), start, size)
    teacher = fixed.teacher
    hidden = None if teacher is None else rows(teacher.states, part_of(teacher.at, start, size))
    return _Chunk(features, hidden, of_teacher, labels)


def _chunk_terms(static: _Static, kernel: Array, chunk: _Chunk, fixed: _Fixed) -> tuple[LawPairTerms, _Found]:
    """Terms of one chunk: the draft's head alone, then both heads over draft ids."""
    sizes = {"temperature": static.temperature, "tile": static.tile}
    student = walk_head(chunk.features, kernel, fixed.kept, chunk.labels, **sizes)
    found = student.label_found.astype(jnp.float32)
    hard = jnp.where(student.label_found, student.log_sum - student.label_logit, 0.0)
    hit = (student.mode == chunk.labels).astype(jnp.float32)
    zero = jnp.zeros_like(hard)
    if chunk.law is None:
        return LawPairTerms(zero, hard, zero, zero, zero, found, hit), _Found(student.log_sum, zero, found)

    def step(carry: tuple[Array, ...], start: Array | int, fresh: Array) -> tuple[Array, ...]:
        z, log_p, restricted = _pair_tile(static, kernel, chunk, fixed, start, fresh)
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
        kernel.shape[1], static.tile, (zero, zero, zero, zero), step, read=(kernel, chunk, fixed)
    )
    if fixed.kept is not None:  # the policy's mass on ids that the draft lacks
        distance += jnp.maximum(1.0 - jnp.exp(chunk.law.log_restricted - chunk.law.log_sum), 0.0)
    terms = LawPairTerms(soft, hard, distance, overlap, chunk.law.mode_kept, found, hit)
    return terms, _Found(student.log_sum, sign_mean, found)


def _backward(static: _Static, residuals: tuple, cotangents: LawPairTerms) -> tuple[_Draft, None]:
    """Gradients by the formulas of the module's docstring, a chunk of labels and a tile of dz at a time."""
    draft, fixed, found = cast(tuple[_Draft, _Fixed, _Found], residuals)
    weights = _Weights.of(static, cotangents)

    def step(carry: tuple[Array, Array], start: Array | int, fresh: Array) -> tuple[Array, Array]:
        d_features, d_kernel = carry
        chunk = _chunk_of(draft, fixed, start, fresh.shape[0])
        numbers, weight = part_of((found, weights), start, fresh.shape[0])
        weight = jax.tree.map(lambda w: jnp.where(fresh, w, 0.0), weight)  # labels that the chunk before had
        new, d_kernel = _chunk_gradients(static, draft.kernel, chunk, fixed, numbers, weight, d_kernel)
        new = jnp.where(fresh[:, None], new, part_of(d_features, start, fresh.shape[0]))
        return with_part(d_features, new, start), d_kernel

    init = jnp.zeros_like(draft.features), jnp.zeros_like(draft.kernel[static.frozen_rows :])
    count = fixed.labels.shape[0]
    d_features, d_kernel = fold_parts(count, static.chunk, init, step, read=(draft, fixed, cotangents))
    return _Draft(d_features, jnp.pad(d_kernel, ((static.frozen_rows, 0), (0, 0)))), None


class _Weights(NamedTuple):
    """What each term's gradient is multiplied with, float32 [N]."""

    soft: Array
    hard: Array
    distance: Array

    @classmethod
    def of(cls, static: _Static, cotangents: LawPairTerms) -> _Weights:
        scale = jnp.float32(1.0 / static.temperature)
        distance = scale * (cotangents.l1 - 0.5 * cotangents.overlap)
        return cls(scale * cotangents.soft_cross_entropy, scale * cotangents.hard_cross_entropy, distance)


def _chunk_gradients(
    static: _Static, kernel: Array, chunk: _Chunk, fixed: _Fixed, found: _Found, weights: _Weights, d_kernel: Array
) -> tuple[Array, Array]:
    """Gradient of the features of one chunk, and `d_kernel` with what this chunk adds."""
    dtype, trained = chunk.features.dtype, chunk.features[:, static.frozen_rows :]
    soft, hard, distance = (w[:, None] for w in weights)

    def step(carry: tuple[Array, Array], start: Array | int, fresh: Array) -> tuple[Array, Array]:
        d_features, d_kernel = carry
        size = fresh.shape[0]
        z, log_p, restricted = _pair_tile(static, kernel, chunk, fixed, start, fresh)
        q = jnp.exp(z - found.log_sum[:, None])
        is_label = (tile_ids(fixed.kept, start, size)[None, :] == chunk.labels[:, None]) & fresh[None, :]
        # No term where the draft lacks the label.
        dz = hard * (found.label_kept[:, None] * q - is_label.astype(jnp.float32))
        if chunk.law is not None:
            dz += soft * (q - restricted) + distance * q * (jnp.sign(q - jnp.exp(log_p)) - found.sign_mean[:, None])
        dz = dz.astype(dtype)
        part = columns(kernel, start, size).astype(dtype)
        d_features += jnp.matmul(dz, part.T, preferred_element_type=jnp.float32)
        new = jnp.matmul(trained.T, dz, preferred_element_type=jnp.float32).astype(d_kernel.dtype)
        # Columns that the tile before had are 0 in dz, so adding keeps what it wrote.
        new += columns(d_kernel, start, size)
        return d_features, lax.dynamic_update_slice_in_dim(d_kernel, new, start, axis=1)

    init = jnp.zeros(chunk.features.shape, jnp.float32), d_kernel
    d_features, d_kernel = fold_parts(
        kernel.shape[1], static.tile, init, step, read=(kernel, chunk, fixed, found, weights)
    )
    return d_features.astype(dtype), d_kernel


_tempered_terms.defvjp(_forward, _backward)


def _pair_tile(
    static: _Static, kernel: Array, chunk: _Chunk, fixed: _Fixed, start: Array | int, fresh: Array
) -> tuple[Array, Array, Array]:
    """Draft logits z f32[c, tile], and log p (both -inf where not fresh) and p~ on the same ids."""
    size = fresh.shape[0]
    part = columns(kernel, start, size)
    z = jnp.where(fresh[None, :], tile_logits(chunk.features, part, static.temperature), -jnp.inf)
    if fixed.teacher is None or chunk.hidden is None or chunk.law is None:
        return z, jnp.full_like(z, -jnp.inf), jnp.zeros_like(z)
    head = fixed.teacher.head
    head = columns(head, start, size) if fixed.kept is None else head[:, part_of(fixed.kept, start, size)]
    log_p = tile_logits(chunk.hidden, head, static.temperature) - chunk.law.log_sum[:, None]
    log_p = jnp.where(fresh[None, :], log_p, -jnp.inf)
    return z, log_p, jnp.exp(log_p + (chunk.law.log_sum - chunk.law.log_restricted)[:, None])


def _filtered_overlap(static: _Static, draft: _Draft, fixed: _Fixed, sampling: SamplingConfig) -> Float32[Array, " N"]:
    """sum_v min(p(v), q(v)) of the laws that top-k and top-p leave; dense over the vocabulary."""
    assert fixed.teacher is not None
    head = fixed.teacher.head

    def step(overlap: Array, start: Array | int, fresh: Array) -> Array:
        chunk = _chunk_of(draft, fixed, start, fresh.shape[0])
        assert chunk.hidden is not None
        # `law` divides by the temperature.
        p = law(tile_logits(chunk.hidden, head, 1.0), sampling)
        q = law(tile_logits(chunk.features, draft.kernel, 1.0), sampling)
        both = jnp.minimum(p if fixed.kept is None else p[:, fixed.kept], q)
        return with_part(overlap, jnp.sum(both, axis=-1), start)

    count = fixed.labels.shape[0]
    return fold_parts(count, static.chunk, jnp.zeros(count, jnp.float32), step, read=(draft, fixed))
