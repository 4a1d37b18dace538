"""Branch attention in plain JAX. Dense: a branch has a handful of keys, so its scores are [R, G, n, N, m]."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.block_attention.records import Partial, statistics_dtype
from pallas_kernels.branch_attention.records import Branch, BranchGrads, Rule


def forward(
    q: Array, trunk: Partial, branch: Branch | None, sinks: Array | None, *, scale: float, rule: Rule
) -> tuple[Array, Array]:
    """See `api.branch_attention`."""
    stat = statistics_dtype(q.dtype)
    top = trunk.lse
    if branch is not None:
        scores = _scores(q, branch, scale, rule)
        top = jnp.maximum(top, jnp.max(scores, axis=-1, initial=-jnp.inf))
    if sinks is not None:
        top = jnp.maximum(top, _per_head(sinks, stat))
    safe = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp(trunk.lse - safe)
    total, out = weight, trunk.out * weight[..., None]
    if branch is not None:
        weights = jnp.exp(scores - safe[..., None])
        total = total + jnp.sum(weights, axis=-1)
        out = out + _weigh_values(weights, branch)
    if sinks is not None:
        total = total + jnp.exp(_per_head(sinks, stat) - safe)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, safe + jnp.log(total), -jnp.inf)
    return (out / total[..., None]).astype(q.dtype), lse


def backward(
    q: Array,
    branch: Branch | None,
    sinks: Array | None,
    lse: Array,
    delta: Array,
    d_out: Array,
    *,
    scale: float,
    rule: Rule,
) -> BranchGrads:
    """See `api.branch_attention_backward`."""
    stat = statistics_dtype(q.dtype)
    empty = jnp.isneginf(lse)
    lse = jnp.where(empty, 0.0, lse)
    d_sinks = None
    if sinks is not None:
        taken = jnp.exp(_per_head(sinks, stat) - lse) * delta
        d_sinks = -jnp.sum(jnp.where(empty, 0.0, taken), axis=(0, 1, 2))
    if branch is None:
        return BranchGrads(jnp.zeros_like(q, dtype=stat), None, None, d_sinks)
    keys, values = branch.keys, branch.values
    weights = jnp.exp(_scores(q, branch, scale, rule) - lse[..., None])
    d_weights = jnp.einsum("rgjkxh,rgikh->rgjkxi", _grouped(d_out, keys), values, preferred_element_type=stat)
    d_scores = weights * (d_weights.reshape(weights.shape) - delta[..., None]) * scale
    ds, ws = (_grouped(x.astype(keys.dtype), keys) for x in (d_scores, weights))
    dq = jnp.einsum("rgjkxi,rgikh->rgjkxh", ds, keys, preferred_element_type=stat).reshape(q.shape)
    dk = jnp.einsum("rgjkxi,rgjkxh->rgikh", ds, _grouped(q, keys), preferred_element_type=stat)
    dv = jnp.einsum("rgjkxi,rgjkxh->rgikh", ws, _grouped(d_out, keys), preferred_element_type=stat)
    return BranchGrads(dq, dk, dv, d_sinks)


def _grouped(x: Array, keys: Array) -> Array:
    """[R, G, n, N, ...] -> [R, G, n, K, N / K, ...]."""
    kv_heads = keys.shape[3]
    return x.reshape(*x.shape[:3], kv_heads, x.shape[3] // kv_heads, *x.shape[4:])


def _scores(q: Array, branch: Branch, scale: float, rule: Rule) -> Array:
    """[R, G, n, N, m], -inf where not seen."""
    stat = statistics_dtype(q.dtype)
    keys = branch.keys
    scores = jnp.einsum("rgjkxh,rgikh->rgjkxi", _grouped(q, keys), keys, preferred_element_type=stat) * scale
    scores = scores.reshape(*q.shape[:4], keys.shape[2])
    rows, count = jnp.arange(q.shape[2]), jnp.arange(keys.shape[2])
    inside = jnp.ones((q.shape[2], keys.shape[2]), bool) if rule == "all" else count[None, :] <= rows[:, None]
    seen = branch.live[:, :, None, None, None] & inside[None, None, :, None, :]
    return jnp.where(seen, scores, -jnp.inf)


def _weigh_values(weights: Array, branch: Branch) -> Array:
    stat = weights.dtype
    weights = _grouped(weights.astype(branch.values.dtype), branch.values)
    out = jnp.einsum("rgjkxi,rgikh->rgjkxh", weights, branch.values, preferred_element_type=stat)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])


def _per_head(sinks: Array, stat: jnp.dtype) -> Array:
    return sinks.astype(stat)[None, None, None, :]
