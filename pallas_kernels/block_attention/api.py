"""The block step of ring attention: forward, backward, and the exact merge of two partial results.

    s[t, j] = scale * q_t . k_j             for first_t <= index_j <= last_t
    lse_t   = log sum_j exp(s[t, j])
    out_t   = sum_j exp(s[t, j] - lse_t) v_j

The backward takes the lse of ALL blocks together (merged) and delta_t = dout_t . out_t of the merged output, minus the
cotangent of the lse if there is one:

    p = exp(s - lse)    dv = p^T dout    ds = p * (dout v^T - delta) * scale    dq = ds k    dk = ds^T q

so that the sum over blocks is the gradient of the whole. With the lse of one block alone dv would be right and dq and
dk wrong. Statistics, partial outputs and gradients are float32 whatever comes in. Query head n reads key-value head
n // (N / K).

Not here: scores capped by a tanh (Gemma 2's softcap), a bias of the scores, values of another width than keys, dropout.
All inputs must be finite, those of padding too: what a query does not see has weight exactly 0, but within a tile it is
multiplied by it, and 0 times NaN or infinity is NaN. Any finite number there changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_attention import pallas_backward, pallas_forward, reference
from pallas_kernels.block_attention.records import KeyGrads, KeyRange, Partial
from pallas_kernels.block_attention.tuning import Tuning
from pallas_kernels.manual_axes import cast, fresh, varying_axes

MAX_HEAD_DIM = 256


class _Implementation(NamedTuple):
    forward: Callable[..., Partial]
    backward: Callable[..., KeyGrads]
    tuned: bool
    """Cut by a `Tuning`, not by `tile`."""


def _pallas(interpret: bool) -> _Implementation:
    return _Implementation(
        functools.partial(pallas_forward.forward, interpret=interpret),
        functools.partial(pallas_backward.backward, interpret=interpret),
        tuned=True,
    )


IMPLEMENTATIONS: dict[str, _Implementation] = {
    "blockwise": _Implementation(reference.forward, reference.backward, tuned=False),
    "pallas": _pallas(interpret=False),
    "pallas_interpret": _pallas(interpret=True),
}


def block_attention(
    q: Float[Array, "R Tq N H"],
    k: Float[Array, "R Tk K H"],
    v: Float[Array, "R Tk K H"],
    seen: KeyRange,
    key_index: Int32[Array, " Tk"],
    *,
    scale: float,
    implementation: str,
    tile: int = 256,
    tuning: Tuning | None = None,
) -> Partial:
    """Attention of these queries over these keys.

    Args:
        q: queries, positions already rotated in.
        k: keys.
        v: values.
        seen: keys each query sees.
        key_index: place of each key in the whole sequence, increasing.
        scale: factor of the scores.
        implementation: "blockwise" (plain JAX, for any device), "pallas" (kernels for a GPU, compiled by Triton) or
            "pallas_interpret" (the same kernels run step by step, for tests; refused under check_vma=True). All skip
            tiles of keys that no query of a tile sees.
        tile: queries and keys that "blockwise" handles at a time; the kernels go by `tuning`.
        tuning: block sizes of the kernels; None takes those of `tuning.SM90`.
    """
    _check(q, k, v, seen, tile)
    axes = varying_axes(q, k, v, *seen, key_index)
    q, k, v, first, last, key_index = (cast(x, axes) for x in (q, k, v, *seen, key_index))
    forward, _, cut = _pick(implementation, tile, tuning)
    return forward(q, k, v, KeyRange(first, last), key_index, scale=scale, **cut)


def block_attention_backward(
    q: Float[Array, "R Tq N H"],
    k: Float[Array, "R Tk K H"],
    v: Float[Array, "R Tk K H"],
    seen: KeyRange,
    key_index: Int32[Array, " Tk"],
    lse: Float[Array, "R Tq N"],
    delta: Float[Array, "R Tq N"],
    d_out: Float[Array, "R Tq N H"],
    *,
    scale: float,
    implementation: str,
    tile: int = 256,
    tuning: Tuning | None = None,
) -> KeyGrads:
    """What this block adds to the gradients, given the merged lse and delta."""
    _check(q, k, v, seen, tile)
    axes = varying_axes(q, k, v, *seen, key_index, lse, delta, d_out)
    q, k, v, first, last, key_index = (cast(x, axes) for x in (q, k, v, *seen, key_index))
    lse, delta, d_out = (cast(x, axes) for x in (lse, delta, d_out))
    _, backward, cut = _pick(implementation, tile, tuning)
    return backward(q, k, v, KeyRange(first, last), key_index, lse, delta, d_out, scale=scale, **cut)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both. Either may be empty, also both; gaps of any size between the lse are exact.

    The larger lse is taken out before exp, so nothing overflows; -inf - -inf never occurs.
    """
    top = jnp.maximum(a.lse, b.lse)
    safe = jnp.where(jnp.isneginf(top), 0.0, top)
    wa, wb = jnp.exp(a.lse - safe), jnp.exp(b.lse - safe)
    total = wa + wb
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = a.out * (wa / total)[..., None] + b.out * (wb / total)[..., None]
    return Partial(out, jnp.where(some, safe + jnp.log(total), -jnp.inf))


def empty_partial(shape: tuple[int, ...], dtype: DTypeLike, axes: frozenset[str]) -> Partial:
    """Attention over no keys, for queries of `shape` [R, Tq, N, H]; the neutral element of `merge`."""
    return Partial(fresh(shape, 0.0, dtype, axes), fresh(shape[:-1], -jnp.inf, dtype, axes))


def _pick(
    name: str, tile: int, tuning: Tuning | None
) -> tuple[Callable[..., Partial], Callable[..., KeyGrads], dict[str, Any]]:
    """Forward and backward of an implementation, and the option that says how it cuts its inputs."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} must be one of {sorted(IMPLEMENTATIONS)}; use 'blockwise' on a CPU")
    found = IMPLEMENTATIONS[name]
    if tuning is not None and not found.tuned:
        raise ValueError(f"tuning={tuning} must be None for implementation={name!r}; give tile instead")
    return found.forward, found.backward, {"tuning": tuning} if found.tuned else {"tile": tile}


def _check(q: Array, k: Array, v: Array, seen: KeyRange, tile: int) -> None:
    heads, width, kv_heads = q.shape[2], q.shape[3], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}; repeat keys and values first")
    if not 1 <= width <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={width} must be in 1..{MAX_HEAD_DIM}; split the heads")
    if tile < 1:
        raise ValueError(f"tile={tile} must be >= 1; 256 is a good start")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes={q.dtype, k.dtype, v.dtype} of q, k, v must be equal; cast them first")
    if seen.first.shape != q.shape[:2] or seen.last.shape != q.shape[:2]:
        raise ValueError(
            f"seen={seen.first.shape, seen.last.shape} must have the shape {q.shape[:2]}; give one per query"
        )
