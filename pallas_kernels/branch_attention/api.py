"""The local end of an attention whose trunk came in parts: branch keys, attention sink, one exact merge, one cast.

    s[j, i] = scale * q_j . k_i                                           keys i of the branch that query j sees
    lse     = log( exp(lse_trunk) + sum_i exp(s[j, i]) + exp(sink_n) )
    out     = exp(lse_trunk - lse) out_trunk + sum_i exp(s[j, i] - lse) v_i

A sink is a learned score of each head that takes weight and gives nothing. A query without a trunk, without live keys
and without a sink has out 0 and lse -inf. The trunk's partial result is float32 and only `out` is cast, once, here.

Backward, with delta = dout . out minus the cotangent of lse: the formulas of `block_attention`, and
dsink = - sum over queries of exp(sink - lse) * delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.block_attention.records import Partial
from pallas_kernels.branch_attention import reference
from pallas_kernels.branch_attention.records import Branch, BranchGrads, Rule


class _Implementation(NamedTuple):
    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., BranchGrads]


IMPLEMENTATIONS: dict[str, _Implementation] = {
    "blockwise": _Implementation(reference.forward, reference.backward),
}


def branch_attention(
    q: Float[Array, "R G n N H"],
    trunk: Partial,
    branch: Branch | None,
    sinks: Float[Array, " N"] | None,
    *,
    scale: float,
    rule: Rule,
    implementation: str,
) -> tuple[Float[Array, "R G n N H"], Float[Array, "R G n N"]]:
    """The whole attention of these queries: `out` in the dtype of q, `lse` float32.

    Args:
        q: queries, positions already rotated in.
        trunk: what they saw of the trunk, `out` [R, G, n, N, H] and `lse` [R, G, n, N].
        branch: keys of their own branch; None: the trunk (and the sink) is all there is.
        sinks: score of each head's sink, or None.
        scale: factor of the scores.
        rule: which keys of its branch a query sees.
        implementation: "blockwise" (plain JAX).
    """
    _check(q, trunk, branch, rule)
    return _pick(implementation).forward(q, trunk, branch, sinks, scale=scale, rule=rule)


def branch_attention_backward(
    q: Float[Array, "R G n N H"],
    branch: Branch | None,
    sinks: Float[Array, " N"] | None,
    lse: Float[Array, "R G n N"],
    delta: Float[Array, "R G n N"],
    d_out: Float[Array, "R G n N H"],
    *,
    scale: float,
    rule: Rule,
    implementation: str,
) -> BranchGrads:
    """Gradients of the local part, given lse and delta of the whole."""
    return _pick(implementation).backward(q, branch, sinks, lse, delta, d_out, scale=scale, rule=rule)


def _pick(name: str) -> _Implementation:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} must be one of {sorted(IMPLEMENTATIONS)}; use 'blockwise' on a CPU")
    return IMPLEMENTATIONS[name]


def _check(q: Array, trunk: Partial, branch: Branch | None, rule: str) -> None:
    if trunk.out.shape != q.shape or trunk.lse.shape != q.shape[:-1]:
        raise ValueError(f"trunk={trunk.out.shape, trunk.lse.shape} must match the queries {q.shape}; reshape it")
    if rule not in ("all", "causal"):
        raise ValueError(f"rule={rule!r} must be 'all' or 'causal'; EAGLE-3 and DFlash are 'all'")
    if branch is None:
        return
    rows, groups, count, heads, width = q.shape
    keys = branch.keys.shape
    if keys[:2] != (rows, groups) or keys[4] != width or heads % keys[3] or branch.values.shape != keys:
        raise ValueError(
            f"branch.keys={keys} must be [{rows}, {groups}, m, K, {width}], K a divisor of {heads}, as values"
        )
    if branch.live.shape != (rows, groups):
        raise ValueError(f"branch.live={branch.live.shape} must be {(rows, groups)}; give one flag a branch")
    if rule == "causal" and keys[2] != count:
        raise ValueError(f"rule='causal' must have as many keys as queries, not {keys[2]} and {count}; use 'all'")
