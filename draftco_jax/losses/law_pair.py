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

from draftco_jax.losses.head_walk import TeacherLaw, rows, teacher_law, tile_logits
from draftco_jax.losses.law_pair_tiles import (
    Chunk,
    ChunkTeacher,
    Found,
    LawPairTerms,
    Static,
    Weights,
    chunk_gradients,
    chunk_terms,
)
from draftco_jax.losses.parts import fold_parts, part_of, with_part
from draftco_jax.numerics.sampling import SamplingConfig, law


class Teacher(NamedTuple):
    """The policy's states, and which of them has the law of each label."""

    states: Array  # [E, D] after the final norm
    head: Array  # [D, V]
    at: Array  # i32[N] row of `states`, in 0..E - 1


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
    span: int | None = None,
) -> LawPairTerms:
    """Return the terms of N labels; gradients reach `draft_features` and `draft_kernel` only.

    Losses see the temperature only. With top-k, top-p or min-p `overlap` is that of the filtered laws, for which logits
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
        span: where neighbouring labels learn from the same states: a number of rows of `teacher.states` in a stretch
            that those of any `chunk_tokens` labels in a row lie within. Each is then met with the draft's columns once
            for all its labels in the chunk. A span that is too small makes terms NaN.
    """
    if sampling.greedy:
        raise ValueError("temperature=0 must be > 0 to train a draft: a one-hot law has no finite log; use 1.0")
    for name, value, usual in (("tile", tile, 8192), ("chunk_tokens", chunk_tokens, 4096)):
        if value < 1:
            raise ValueError(f"{name}={value} must be >= 1; {usual} is usual")
    if kept is None and teacher is not None and teacher.head.shape[1] != draft_kernel.shape[1]:
        rule = f"must equal the policy's {teacher.head.shape[1]} without a map; pass kept"
        raise ValueError(f"draft vocabulary={draft_kernel.shape[1]} {rule}")
    chunk = min(chunk_tokens, labels.shape[0])
    if teacher is not None and span is not None:
        span = min(span, teacher.states.shape[0])
    static = Static(tile, chunk, sampling.temperature, frozen_rows, span if span and span < chunk else None)
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
def _tempered_terms(static: Static, draft: _Draft, fixed: _Fixed) -> LawPairTerms:
    return _forward(static, draft, fixed)[0]


def _forward(static: Static, draft: _Draft, fixed: _Fixed) -> tuple[LawPairTerms, tuple[_Draft, _Fixed, Found]]:
    """The terms, and what the backward pass needs."""

    def step(carry: tuple[LawPairTerms, Found], start: Array | int, fresh: Array) -> tuple[LawPairTerms, Found]:
        chunk = _chunk_of(static, draft, fixed, start, fresh.shape[0])
        return with_part(carry, chunk_terms(static, chunk), start)

    zero = jnp.zeros(fixed.labels.shape[0], jnp.float32)
    init = LawPairTerms(*[zero] * 7), Found(zero, zero, zero)
    terms, found = fold_parts(fixed.labels.shape[0], static.chunk, init, step, read=(draft, fixed))
    return terms, (draft, fixed, found)


def _chunk_of(static: Static, draft: _Draft, fixed: _Fixed, start: Array | int, size: int) -> Chunk:
    features, labels = part_of((draft.features, fixed.labels), start, size)
    teacher = None
    if fixed.teacher is not None and fixed.law is not None:
        states, head, at = fixed.teacher
        at, of_labels = part_of((at, fixed.law), start, size)
        if static.span is None:
            hidden, at = rows(states, at), None
        else:
            first = jnp.minimum(jnp.min(at), states.shape[0] - static.span)
            hidden, at = part_of(states, first, static.span), at - first
        teacher = ChunkTeacher(hidden, at, head, of_labels)
    return Chunk(features, draft.kernel, labels, fixed.kept, teacher)


def _backward(static: Static, residuals: tuple, cotangents: LawPairTerms) -> tuple[_Draft, None]:
    """Gradients by the formulas of the module's docstring, a chunk of labels and a tile of dz at a time."""
    draft, fixed, found = cast(tuple[_Draft, _Fixed, Found], residuals)
    weights = Weights.of(static, cotangents)

    def step(carry: tuple[Array, Array], start: Array | int, fresh: Array) -> tuple[Array, Array]:
        d_features, d_kernel = carry
        chunk = _chunk_of(static, draft, fixed, start, fresh.shape[0])
        numbers, weight = part_of((found, weights), start, fresh.shape[0])
        weight = jax.tree.map(lambda w: jnp.where(fresh, w, 0.0), weight)  # labels that the chunk before had
        new, d_kernel = chunk_gradients(static, chunk, numbers, weight, d_kernel)
        new = jnp.where(fresh[:, None], new, part_of(d_features, start, fresh.shape[0]))
        return with_part(d_features, new, start), d_kernel

    init = jnp.zeros_like(draft.features), jnp.zeros_like(draft.kernel[static.frozen_rows :])
    count = fixed.labels.shape[0]
    d_features, d_kernel = fold_parts(count, static.chunk, init, step, read=(draft, fixed, cotangents))
    return _Draft(d_features, jnp.pad(d_kernel, ((static.frozen_rows, 0), (0, 0)))), None


_tempered_terms.defvjp(_forward, _backward)


def _filtered_overlap(static: Static, draft: _Draft, fixed: _Fixed, sampling: SamplingConfig) -> Float32[Array, " N"]:
    """sum_v min(p(v), q(v)) of the laws that the filters leave; dense over the vocabulary."""

    def step(overlap: Array, start: Array | int, fresh: Array) -> Array:
        chunk = _chunk_of(static, draft, fixed, start, fresh.shape[0])
        assert chunk.teacher is not None
        # `law` divides by the temperature.
        p = law(tile_logits(chunk.teacher.hidden, chunk.teacher.head, 1.0), sampling)
        p = chunk.teacher.of_labels(p if fixed.kept is None else p[:, fixed.kept])
        q = law(tile_logits(chunk.features, chunk.kernel, 1.0), sampling)
        return with_part(overlap, jnp.sum(jnp.minimum(p, q), axis=-1), start)

    count = fixed.labels.shape[0]
    return fold_parts(count, static.chunk, jnp.zeros(count, jnp.float32), step, read=(draft, fixed))
