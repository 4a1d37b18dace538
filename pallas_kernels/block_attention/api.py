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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_attention import reference
from pallas_kernels.block_attention.records import KeyGrads, KeyRange, Partial
from pallas_kernels.manual_axes import cast, fresh, varying_axes

MAX_HEAD_DIM = 256


class _Implementation(NamedTuple):
    forward: Callable[..., Partial]
    backward: Callable[..., KeyGrads]


IMPLEMENTATIONS: dict[str, _Implementation] = {
    "blockwise": _Implementation(reference.forward, reference.backward),
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
) -> Partial:
    """Attention of these queries over these keys.

    Args:
        q: queries, positions already rotated in.
        k: keys.
        v: values.
        seen: keys each query sees.
        key_index: place of each key in the whole sequence, increasing.
        scale: factor of the scores.
        implementation: "blockwise" (plain JAX, skips what no query of a tile sees).
        tile: queries and keys handled at a time.
    """
    _check(q, k, v, seen, tile)
    axes = varying_axes(q, k, v, *seen, key_index)
    q, k, v, first, last, key_index = (cast(x, axes) for x in (q, k, v, *seen, key_index))
    return _pick(implementation).forward(q, k, v, KeyRange(first, last), key_index, scale=scale, tile=tile)


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
) -> KeyGrads:
    """What this block adds to the gradients, given the merged lse and delta."""
    _check(q, k, v, seen, tile)
    axes = varying_axes(q, k, v, *seen, key_index, lse, delta, d_out)
    q, k, v, first, last, key_index = (cast(x, axes) for x in (q, k, v, *seen, key_index))
    lse, delta, d_out = (cast(x, axes) for x in (lse, delta, d_out))
    backward = _pick(implementation).backward
    return backward(q, k, v, KeyRange(first, last), key_index, lse, delta, d_out, scale=scale, tile=tile)


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


def _pick(name: str) -> _Implementation:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} must be one of {sorted(IMPLEMENTATIONS)}; use 'blockwise' on a CPU")
    return IMPLEMENTATIONS[name]


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
