"""What a generate call keeps of a policy's routing: the experts each token was read with, and how many were touched.

A token is read by the forward that gets it as input: a prompt's by the prefill, a response's by the step after the one
that drew it, so the last token of a text is read by none. In a verify block row i reads position anchor + i; what a
rejected draft left there is overwritten when the token that took its place is read.

Letters: B requests, T new tokens, W positions of the cache, S positions of the result, M layers with experts, k experts
a token, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int16, Int32

from draftco_jax.models.moe import MoEConfig
from draftco_jax.models.moe_routing import distinct_experts
from draftco_jax.numerics.rows import update_rows


class ExpertLog(NamedTuple):
    """What is carried through the loop."""

    ids: jax.Array | None  # i16[B, W, M, k] by the position of the token that was read; None: not recorded
    touched: jax.Array  # f32[] sum over decoding forwards of the different experts in use, mean over layers
    forwards: jax.Array  # i32[]


def open_log(
    prompt: Int32[Array, "B L M k"] | None, mixture: MoEConfig | None, capacity: int, *, record: bool
) -> ExpertLog | None:
    """The log after the prefill, whose ids are `prompt`; None for a policy without experts."""
    if prompt is None or mixture is None:
        if record:
            raise ValueError("record_experts=True must be used with a policy that has experts; set it to False")
        return None
    ids = None
    if record:
        if mixture.router.num_experts > jnp.iinfo(jnp.int16).max:
            raise ValueError(f"num_experts={mixture.router.num_experts} must fit in int16; record_experts=False does")
        room = ((0, 0), (0, capacity - prompt.shape[1]), (0, 0), (0, 0))
        ids = jnp.pad(prompt.astype(jnp.int16), room, constant_values=-1)
    return ExpertLog(ids, jnp.float32(0.0), jnp.int32(0))


def log_step(
    log: ExpertLog | None,
    ids: Int32[Array, "B T M k"] | None,
    start: Int[Array, " B"],
    counted: Bool[Array, "B T"],
    mixture: MoEConfig | None,
    rows: Int[Array, "B e"] | None = None,
) -> ExpertLog | None:
    """The log after a forward over tokens at start, start + 1, ...; `counted` are those whose output is read.

    `rows`: of a token tree, whose nodes are counted all, those that stand at start, start + 1, ...
    """
    if log is None or ids is None or mixture is None:
        return None
    layers = jnp.moveaxis(ids, 2, 0)
    layers = layers.reshape(layers.shape[0], -1, layers.shape[-1])
    everywhere = jnp.broadcast_to(counted.reshape(1, -1), layers.shape[:2])
    touched = distinct_experts(layers, everywhere, mixture.router.num_experts)
    if rows is not None:
        ids = jnp.take_along_axis(ids, rows[:, :, None, None], axis=1)
    return ExpertLog(
        ids=None if log.ids is None else update_rows(log.ids, ids.astype(jnp.int16), start),
        touched=log.touched + jnp.mean(touched.astype(jnp.float32)),
        forwards=log.forwards + 1,
    )


def recorded(log: ExpertLog | None, lengths: Int[Array, " B"], width: int) -> Int16[Array, "B S M k"] | None:
    """The ids of texts of these lengths, S = `width`; -1 from the last token on."""
    if log is None or log.ids is None:
        return None
    read = jnp.arange(width)[None, :] < lengths[:, None] - 1
    return jnp.where(read[..., None, None], log.ids[:, :width], jnp.int16(-1))


def touched_per_forward(log: ExpertLog | None, batch: int) -> Float32[Array, " B"] | None:
    """Mean number of different experts in use in a decoding forward, for each request the same; 0 without a forward."""
    if log is None:
        return None
    return jnp.broadcast_to(log.touched / jnp.maximum(log.forwards, 1).astype(jnp.float32), (batch,))
