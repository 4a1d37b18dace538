"""What the policy's law p and the draft's law q say about each other at single tokens, without [tokens, vocab] arrays.

Every family's draft logits are features @ kernel (a Markov bias is more feature columns), so one function serves all.
Both heads are walked in tiles of `tile` columns: once for the normalisers, once for the sums, and once more in the
backward pass, which is written out here (z draft logits over the temperature, q = softmax(z), p~ = p restricted to
draft ids and renormalised):

    d soft_cross_entropy / dz = q - p~            d l1 / dz      = q * (sign(q - p) - sum_v q sign(q - p))
    d hard_cross_entropy / dz = q - 1[v = label]  d overlap / dz = - (d l1 / dz) / 2

The last line holds because sum_v min(p, q) = (P + 1 - sum_v |p - q|) / 2 over draft ids, P = sum_v p a constant.
Residuals are the arguments and a few numbers per token. Logits, laws and sums are float32; the products with the head
in the backward pass take dz rounded to the dtype of the features, as a bfloat16 head does everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from draftco_jax.numerics.sampling import SamplingConfig, law
from pallas_kernels.manual_axes import cast as as_varying
from pallas_kernels.manual_axes import varying_axes

Carry = TypeVar("Carry")


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


class _Static(NamedTuple):
    """What is known when the program is compiled."""

    tile: int
    temperature: float


class _Draft(NamedTuple):
    """What gets a gradient."""

    features: Array  # [N, F]
    kernel: Array  # [F, W]


class _Fixed(NamedTuple):
    """What gets none."""

    hidden: Array | None  # [N, D]
    head: Array | None  # [D, V]
    labels: Array  # i32[N]
    kept: Array | None  # i32[W]


class _Normalisers(NamedTuple):
    """Log of the sum of exp(logits) of each token, float32 [N], and the policy's mode, i32[N]."""

    draft: Array
    policy: Array
    restricted: Array
    mode: Array


class _Head(NamedTuple):
    """One walk through a head."""

    log_sum: Array  # f32[N]
    mode: Array  # i32[N] target id of the largest logit; the first one of equals
    label_logit: Array  # f32[N] 0 where the head lacks the label
    label_found: Array  # bool[N]


def law_pair_terms(
    draft_features: Float[Array, "N F"],
    draft_kernel: Float[Array, "F W"],
    teacher_hidden: Float[Array, "N D"] | None,
    teacher_kernel: Float[Array, "D V"] | None,
    labels: Int32[Array, " N"],
    *,
    kept: Int[Array, " W"] | None,
    sampling: SamplingConfig,
    tile: int,
) -> LawPairTerms:
    """Return the terms of N tokens; gradients reach `draft_features` and `draft_kernel` only.

    Losses see the temperature only. With top-k or top-p `overlap` is that of the filtered laws, for which dense [N, V]
    logits of both heads are made, without residuals; otherwise nothing here is larger than [N, tile]. Callers keep N
    small with `chunked.map_tokens`. Every row must be finite, also rows whose terms are masked afterwards.

    Args:
        draft_features: the draft's state at each token.
        draft_kernel: the draft's head; cast to the dtype of the features a tile at a time.
        teacher_hidden: the policy's state after its final norm. None: only the label's terms are computed, the others
            are 0.
        teacher_kernel: the policy's head; None where `teacher_hidden` is.
        labels: target ids. An id that no head has (such as -1) is one the draft lacks.
        kept: target id of each draft id, in any order; None where the draft has the whole vocabulary.
        sampling: of the rollouts. Temperature 0 is refused: a one-hot law has no finite log.
        tile: columns of a head whose logits exist at one time, >= 1.
    """
    if sampling.greedy:
        raise ValueError("temperature=0 must be > 0 to train a draft: a one-hot law has no finite log; use 1.0")
    if tile < 1:
        raise ValueError(f"tile={tile} must be >= 1; 8192 is usual")
    if (teacher_hidden is None) != (teacher_kernel is None):
        raise ValueError("teacher_hidden and teacher_kernel must be given together; pass None for both or neither")
    if kept is None and teacher_kernel is not None and teacher_kernel.shape[1] != draft_kernel.shape[1]:
        rule = f"must equal the policy's {teacher_kernel.shape[1]} without a map; pass kept"
        raise ValueError(f"draft vocabulary={draft_kernel.shape[1]} {rule}")
    draft = _Draft(draft_features, draft_kernel)
    kept = None if kept is None else kept.astype(jnp.int32)
    fixed = lax.stop_gradient(_Fixed(teacher_hidden, teacher_kernel, labels, kept))
    terms = cast(LawPairTerms, _tempered_terms(_Static(tile, sampling.temperature), draft, fixed))
    if teacher_hidden is None or not sampling.filtered:
        return terms
    filtered = _filtered_overlap(lax.stop_gradient(draft), fixed, sampling)
    return terms._replace(overlap=filtered, unfiltered_overlap=terms.overlap)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tempered_terms(static: _Static, draft: _Draft, fixed: _Fixed) -> LawPairTerms:
    return _forward(static, draft, fixed)[0]


def _forward(static: _Static, draft: _Draft, fixed: _Fixed) -> tuple[LawPairTerms, tuple]:
    """The terms, and what the backward pass needs of them."""
    student = _walk(static, draft.features, draft.kernel, fixed.kept, fixed.labels, columns=None)
    found = student.label_found.astype(jnp.float32)
    hard = jnp.where(student.label_found, student.log_sum - student.label_logit, 0.0)
    hit = (student.mode == fixed.labels).astype(jnp.float32)
    zero = jnp.zeros_like(hard)
    if fixed.hidden is None or fixed.head is None:
        terms = LawPairTerms(zero, hard, zero, zero, zero, found, hit)
        return terms, (draft, fixed, _Normalisers(student.log_sum, zero, zero, student.mode), zero, found)

    teacher = _walk(static, fixed.hidden, fixed.head, None, fixed.labels, columns=None)
    log_restricted = teacher.log_sum
    if fixed.kept is not None:
        log_restricted = _walk(static, fixed.hidden, fixed.head, fixed.kept, fixed.labels, columns=fixed.kept).log_sum
    logs = _Normalisers(student.log_sum, teacher.log_sum, log_restricted, teacher.mode)

    def step(carry: tuple[Array, ...], start: Array | int, fresh: Array) -> tuple[Array, ...]:
        z, log_p, ids = _pair_tile(static, draft, fixed, logs, start, fresh)
        soft, distance, overlap, sign_mean, mode_kept = carry
        q, p = jnp.exp(z - logs.draft[:, None]), jnp.exp(log_p)
        restricted = jnp.exp(log_p + (logs.policy - logs.restricted)[:, None])
        soft += jnp.sum(jnp.where(restricted > 0, restricted * (logs.draft[:, None] - z), 0.0), axis=-1)
        return (
            soft,
            distance + jnp.sum(jnp.abs(p - q), axis=-1),
            overlap + jnp.sum(jnp.minimum(p, q), axis=-1),
            sign_mean + jnp.sum(q * jnp.sign(q - p), axis=-1),
            mode_kept | jnp.any(ids[None, :] == logs.mode[:, None], axis=-1),
        )

    init = (zero, zero, zero, zero, jnp.zeros_like(student.label_found))
    soft, distance, overlap, sign_mean, mode_kept = _over_tiles(
        static.tile, draft.kernel.shape[1], init, step, (draft, fixed)
    )
    if fixed.kept is not None:  # the policy's mass on ids that the draft lacks
        distance += jnp.maximum(1.0 - jnp.exp(logs.restricted - logs.policy), 0.0)
    terms = LawPairTerms(soft, hard, distance, overlap, mode_kept.astype(jnp.float32), found, hit)
    return terms, (draft, fixed, logs, sign_mean, found)


def _backward(static: _Static, residuals: tuple, cotangents: LawPairTerms) -> tuple[_Draft, None]:
    """Gradients by the formulas of the module's docstring, a tile of dz at a time."""
    draft, fixed, logs, sign_mean, found = residuals
    scale = jnp.float32(1.0 / static.temperature)
    soft, hard = (scale * g[:, None] for g in (cotangents.soft_cross_entropy, cotangents.hard_cross_entropy))
    distance = scale * (cotangents.l1 - 0.5 * cotangents.overlap)[:, None]

    def step(carry: tuple[Array, Array], start: Array | int, fresh: Array) -> tuple[Array, Array]:
        d_features, d_kernel = carry
        z, log_p, ids = _pair_tile(static, draft, fixed, logs, start, fresh)
        q = jnp.exp(z - logs.draft[:, None])
        is_label = (ids[None, :] == fixed.labels[:, None]) & fresh[None, :]
        dz = hard * (found[:, None] * q - is_label.astype(jnp.float32))  # no term where the draft lacks the label
        if fixed.hidden is not None:
            restricted = jnp.exp(log_p + (logs.policy - logs.restricted)[:, None])
            dz += soft * (q - restricted) + distance * q * (jnp.sign(q - jnp.exp(log_p)) - sign_mean[:, None])
        dz = dz.astype(draft.features.dtype)
        kernel = _columns(draft.kernel, start, fresh.shape[0]).astype(draft.features.dtype)
        d_features += jnp.matmul(dz, kernel.T, preferred_element_type=jnp.float32)
        new = jnp.matmul(draft.features.T, dz, preferred_element_type=jnp.float32).astype(d_kernel.dtype)
        # Columns that the tile before had are 0 in dz, so adding keeps what it wrote.
        new += _columns(d_kernel, start, fresh.shape[0])
        return d_features, lax.dynamic_update_slice_in_dim(d_kernel, new, start, axis=1)

    width = draft.kernel.shape[1]
    init = (jnp.zeros(draft.features.shape, jnp.float32), jnp.zeros_like(draft.kernel))
    d_features, d_kernel = _over_tiles(static.tile, width, init, step, (draft, fixed, cotangents))
    return _Draft(d_features.astype(draft.features.dtype), d_kernel), None


_tempered_terms.defvjp(_forward, _backward)


def _walk(
    static: _Static, hidden: Array, kernel: Array, ids: Array | None, labels: Array, *, columns: Array | None
) -> _Head:
    """Normaliser, mode and label of a head whose column c stands for target id ids[c] (None: c itself).

    `columns` names the columns of `kernel` to walk through; None walks through all.
    """
    count = labels.shape[0]
    width = kernel.shape[1] if columns is None else columns.shape[0]

    def step(carry: tuple[Array, ...], start: Array | int, fresh: Array) -> tuple[Array, ...]:
        largest, total, mode, label_logit, found = carry
        size = fresh.shape[0]
        part = _columns(kernel, start, size) if columns is None else kernel[:, _entries(columns, start, size)]
        z = jnp.where(fresh[None, :], _logits(static, hidden, part), -jnp.inf)
        tile_ids = _entries(ids, start, size)
        top = jnp.max(z, axis=-1)
        bigger = jnp.maximum(largest, top)
        total = total * jnp.exp(largest - bigger) + jnp.sum(jnp.exp(z - bigger[:, None]), axis=-1)
        mode = jnp.where(top > largest, tile_ids[jnp.argmax(z, axis=-1)], mode)
        is_label = (tile_ids[None, :] == labels[:, None]) & fresh[None, :]
        label_logit += jnp.sum(jnp.where(is_label, z, 0.0), axis=-1)
        return bigger, total, mode, label_logit, found | jnp.any(is_label, axis=-1)

    zero = jnp.zeros(count, jnp.float32)
    init = (jnp.full(count, -jnp.inf, jnp.float32), zero, jnp.zeros(count, jnp.int32), zero, jnp.zeros(count, bool))
    largest, total, mode, label_logit, found = _over_tiles(
        static.tile, width, init, step, (hidden, kernel, ids, labels, columns)
    )
    return _Head(largest + jnp.log(total), mode, label_logit, found)


def _pair_tile(
    static: _Static, draft: _Draft, fixed: _Fixed, logs: _Normalisers, start: Array | int, fresh: Array
) -> tuple[Array, Array, Array]:
    """Draft logits z f32[N, tile], log p on the same ids (-inf where not fresh) and the ids i32[tile]."""
    size = fresh.shape[0]
    z = jnp.where(fresh[None, :], _logits(static, draft.features, _columns(draft.kernel, start, size)), -jnp.inf)
    ids = _entries(fixed.kept, start, size)
    if fixed.hidden is None or fixed.head is None:
        return z, jnp.full_like(z, -jnp.inf), ids
    head = _columns(fixed.head, start, size) if fixed.kept is None else fixed.head[:, ids]
    log_p = _logits(static, fixed.hidden, head) - logs.policy[:, None]
    return z, jnp.where(fresh[None, :], log_p, -jnp.inf), ids


def _over_tiles(
    tile: int, width: int, init: Carry, step: Callable[[Carry, Array | int, Bool[Array, " t"]], Carry], read: Any
) -> Carry:
    """Fold step(carry, start, fresh) over tiles of equal size that cover 0..width - 1.

    The last tile begins earlier if it would run over the end, so that no head is padded; `fresh` is False on columns
    that the tile before already had. A single tile is no loop: the compiler then makes its logits once for all passes.
    `read`: all that the steps read; inside shard_map the carry differs over devices where any of it does.
    """
    if width <= tile:
        return step(init, 0, jnp.ones(width, bool))

    def body(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        i, carry = state
        start = jnp.minimum(i * tile, width - tile)
        return i + 1, step(carry, start, start + jnp.arange(tile, dtype=jnp.int32) >= i * tile)

    # A while loop and not a scan: inside the scan over chunks, partial evaluation would pull what depends on the tile
    # alone out of both, the slices of the head and masks of [tokens, vocabulary], and keep them all.
    tiles = jnp.int32(-(-width // tile))
    axes = varying_axes(*jax.tree.leaves(read))
    init = jax.tree.map(lambda x: as_varying(x, axes), init)
    return lax.while_loop(lambda state: state[0] < tiles, body, (jnp.int32(0), init))[1]


def _columns(kernel: Array, start: Array | int, size: int) -> Array:
    return lax.dynamic_slice_in_dim(kernel, start, size, axis=1)


def _entries(ids: Array | None, start: Array | int, size: int) -> Array:
    """Entries start..start + size - 1 of ids; None is the identity."""
    if ids is None:
        return start + jnp.arange(size, dtype=jnp.int32)
    return lax.dynamic_slice_in_dim(ids, start, size)


def _logits(static: _Static, hidden: Array, kernel: Array) -> Float32[Array, "N t"]:
    """hidden @ kernel over the temperature, float32."""
    logits = jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return logits if static.temperature == 1.0 else logits / static.temperature


def _filtered_overlap(draft: _Draft, fixed: _Fixed, sampling: SamplingConfig) -> Float32[Array, " N"]:
    """sum_v min(p(v), q(v)) of the laws that top-k and top-p leave; dense."""
    assert fixed.hidden is not None and fixed.head is not None
    plain = _Static(tile=1, temperature=1.0)  # `law` divides by the temperature
    p = law(_logits(plain, fixed.hidden, fixed.head), sampling)
    q = law(_logits(plain, draft.features, draft.kernel), sampling)
    return jnp.sum(jnp.minimum(p if fixed.kept is None else p[:, fixed.kept], q), axis=-1)
