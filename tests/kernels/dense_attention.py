"""Dense attention in float64 numpy with textbook gradients: what every implementation is held to.

Written with the full softmax Jacobian, dS = P * (dP - sum(P * dP)) + P * dlse, not with the delta of the code that is
tested.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Dense(NamedTuple):
    """Value and gradients. q [X, N, H]; k, v [Y, K, H]; lse [X, N]."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray


def dense_attention(q, k, v, mask, *, scale, d_out, d_lse=None, sinks=None) -> Dense:
    """Attention of X queries over Y keys under mask [X, Y]; a query that sees nothing has out 0 and lse -inf."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    x, heads, _ = q.shape
    group = heads // k.shape[1]
    kk, vv = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("xnh,ynh->nxy", q, kk) * scale
    scores = np.where(mask[None], scores, -np.inf)
    sink = np.full((heads, x, 1), -np.inf) if sinks is None else np.tile(np.float64(sinks)[:, None, None], (1, x, 1))
    scores = np.concatenate([scores, sink], axis=-1)
    top = scores.max(axis=-1, keepdims=True)
    top = np.where(np.isinf(top), 0.0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = weights / np.where(total == 0, 1.0, total)
    keys = p[..., :-1]
    out = np.einsum("nxy,ynh->xnh", keys, vv)
    dp = np.concatenate([np.einsum("xnh,ynh->nxy", d_out, vv), np.zeros((heads, x, 1))], axis=-1)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    if d_lse is not None:
        ds = ds + p * np.asarray(d_lse, np.float64).T[..., None]
    inner = ds[..., :-1] * scale
    fold = lambda y: y.reshape(y.shape[0], k.shape[1], group, -1).sum(axis=2)  # noqa: E731
    return Dense(
        out=out,
        lse=lse.T,
        dq=np.einsum("nxy,ynh->xnh", inner, kk),
        dk=fold(np.einsum("nxy,xnh->ynh", inner, q)),
        dv=fold(np.einsum("nxy,xnh->ynh", keys, d_out)),
        dsinks=ds[..., -1].sum(axis=1),
    )


def relative(got, wanted) -> float:
    """Largest difference over the largest entry (over 1 if all are 0); infinities must be in the same places."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert not np.isnan(got).any()
    assert np.array_equal(np.isinf(got), np.isinf(wanted))
    finite = np.isfinite(wanted)
    difference = np.abs(np.where(finite, got, 0.0) - np.where(finite, wanted, 0.0)).max(initial=0.0)
    largest = np.abs(wanted[finite]).max(initial=0.0)
    return float(difference / (largest if largest > 1e-9 else 1.0))
