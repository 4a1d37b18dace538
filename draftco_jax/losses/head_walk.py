"""One walk through a head, a tile of its columns at a time: what a law says of a token before it meets another one.

Everything is float32 and without gradient; nothing larger than [tokens, tile] exists at one time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from draftco_jax.losses.parts import columns, fold_parts, part_of, with_part

# Below every logit, and finite: a sum over no column stays 0 where -inf would make it NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


class HeadTerms(NamedTuple):
    """A head at each token."""

    log_sum: Array  # f32[N] log of the sum of exp(logits)
    mode: Array  # i32[N] target id of the largest logit; the first one of equals
    label_logit: Array  # f32[N] 0 where the head lacks the label
    label_found: Array  # bool[N]


class TeacherLaw(NamedTuple):
    """The policy's law at each token, as far as no draft has a part in it."""

    log_sum: Array  # f32[N] log of the sum of exp(logits) over all ids
    log_restricted: Array  # f32[N] over draft ids alone
    mode_kept: Array  # f32[N] 1 where the most likely token (the first one of equals) is a draft id


def tile_logits(hidden: Float[Array, "N D"], kernel: Float[Array, "D t"], temperature: float) -> Float32[Array, "N t"]:
    """hidden @ kernel over the temperature; the kernel takes the dtype of the states."""
    logits = jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return logits if temperature == 1.0 else logits / temperature


def tile_ids(ids: Int32[Array, " W"] | None, start: Array | int, size: int) -> Int32[Array, " t"]:
    """Target ids of columns start..start + size - 1; None is the identity."""
    return start + jnp.arange(size, dtype=jnp.int32) if ids is None else part_of(ids, start, size)


def walk_head(
    hidden: Float[Array, "N D"],
    kernel: Float[Array, "D W"],
    ids: Int32[Array, " W"] | None,
    labels: Int32[Array, " N"],
    *,
    temperature: float,
    tile: int,
) -> HeadTerms:
    """Normaliser, mode and label of a head whose column c stands for target id ids[c] (None: c itself)."""

    def step(carry: tuple[Array, ...], start: Array | int, fresh: Array) -> tuple[Array, ...]:
        largest, total, mode, label_logit, found = carry
        size = fresh.shape[0]
        z = jnp.where(fresh[None, :], tile_logits(hidden, columns(kernel, start, size), temperature), -jnp.inf)
        here = tile_ids(ids, start, size)
        mode = jnp.where(jnp.max(z, axis=-1) > largest, here[jnp.argmax(z, axis=-1)], mode)
        is_label = (here[None, :] == labels[:, None]) & fresh[None, :]
        label_logit += jnp.sum(jnp.where(is_label, z, 0.0), axis=-1)
        return *_add(largest, total, z), mode, label_logit, found | jnp.any(is_label, axis=-1)

    count = labels.shape[0]
    init = (*_nothing(count), jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.float32), jnp.zeros(count, bool))
    largest, total, mode, label_logit, found = fold_parts(
        kernel.shape[1], tile, init, step, read=(hidden, kernel, ids, labels)
    )
    return HeadTerms(largest + jnp.log(total), mode, label_logit, found)


def teacher_law(
    states: Float[Array, "E D"],
    head: Float[Array, "D V"],
    at: Int32[Array, " N"],
    *,
    kept: Int32[Array, " W"] | None,
    temperature: float,
    tile: int,
    chunk_tokens: int,
) -> TeacherLaw:
    """The policy's law at states[at], each entry [N].

    The head is walked once for each state or once for each label, whichever are fewer: the passes of a draft ask for
    the same states again and again, the blocks of a few anchors for a small part of them.

    Args:
        states: the policy's states after its final norm.
        head: its output head.
        at: row of `states` of each label, in 0..E - 1.
        kept: draft ids, all different; None: all ids.
        temperature: > 0.
        tile: columns of the head whose logits exist at one time.
        chunk_tokens: rows of `states` that are walked at one time.
    """
    is_kept = None if kept is None else jnp.zeros(head.shape[1], bool).at[kept].set(True)
    by_label = at.shape[0] <= states.shape[0]
    count = at.shape[0] if by_label else states.shape[0]

    def step(law: TeacherLaw, start: Array | int, fresh: Array) -> TeacherLaw:
        size = fresh.shape[0]
        hidden = rows(states, part_of(at, start, size)) if by_label else part_of(states, start, size)
        return with_part(law, _walk_teacher(hidden, head, is_kept, temperature, tile), start)

    zero = jnp.zeros(count, jnp.float32)
    law = fold_parts(count, chunk_tokens, TeacherLaw(zero, zero, zero), step, read=(states, head, at, is_kept))
    return law if by_label else TeacherLaw(*(rows(x, at) for x in law))


def rows(values: Array, at: Int32[Array, " N"]) -> Array:
    """values[at]; every index lies inside."""
    return values.at[at].get(mode="promise_in_bounds")


def _walk_teacher(
    hidden: Float[Array, "n D"],
    head: Float[Array, "D V"],
    is_kept: Bool[Array, " V"] | None,
    temperature: float,
    tile: int,
) -> TeacherLaw:
    """Both sums in one walk over all columns; that of the draft ids has its own maximum, however unlikely they are."""

    def step(carry: tuple[Array, ...], start: Array | int, fresh: Array) -> tuple[Array, ...]:
        largest, total, kept_largest, kept_total, mode_kept = carry
        size = fresh.shape[0]
        z = jnp.where(fresh[None, :], tile_logits(hidden, columns(head, start, size), temperature), -jnp.inf)
        if is_kept is not None:
            here = part_of(is_kept, start, size)
            kept_largest, kept_total = _add(kept_largest, kept_total, jnp.where(here[None, :], z, -jnp.inf))
            is_mode_kept = here[jnp.argmax(z, axis=-1)].astype(jnp.float32)
            mode_kept = jnp.where(jnp.max(z, axis=-1) > largest, is_mode_kept, mode_kept)
        return *_add(largest, total, z), kept_largest, kept_total, mode_kept

    nothing, one = _nothing(hidden.shape[0]), jnp.ones(hidden.shape[0], jnp.float32)
    largest, total, kept_largest, kept_total, mode_kept = fold_parts(
        head.shape[1], tile, (*nothing, *nothing, one), step, read=(hidden, head, is_kept)
    )
    log_sum = largest + jnp.log(total)
    return TeacherLaw(log_sum, log_sum if is_kept is None else kept_largest + jnp.log(kept_total), mode_kept)


def _nothing(count: int) -> tuple[Float32[Array, " n"], Float32[Array, " n"]]:
    """Maximum and sum over no column."""
    return jnp.full(count, _LOWEST, jnp.float32), jnp.zeros(count, jnp.float32)


def _add(largest: Array, total: Array, z: Float32[Array, "n t"]) -> tuple[Array, Array]:
    """Maximum and sum of exp(z - maximum) with the columns of one more tile; -inf adds nothing."""
    bigger = jnp.maximum(largest, jnp.max(z, axis=-1))
    return bigger, total * jnp.exp(largest - bigger) + jnp.sum(jnp.exp(z - bigger[:, None]), axis=-1)
