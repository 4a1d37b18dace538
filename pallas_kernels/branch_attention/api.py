"""The local end of an attention whose trunk came in parts: branch keys, attention sink, one exact merge, one cast.

    s[j, i] = scale * q_j . k_i                                           keys i of the branch that query j sees
    lse     = log( exp(lse_trunk) + sum_i exp(s[j, i]) + exp(sink_n) )
    out     = exp(lse_trunk - lse) out_trunk + sum_i exp(s[j, i] - lse) v_i

A sink is a learned score of each head that takes weight and gives nothing. A query without a trunk, without live keys
and without a sink has out 0 and lse -inf. The trunk's partial result is float32 and only `out` is cast, once, here.

Backward, with delta = dout . out minus the cotangent of lse: the formulas of `block_attention`, and
dsink = - sum over queries of exp(sink - lse) * delta.

As in `block_attention`, softcap, a bias of the scores and values of another width than keys are not here, and all
inputs must be finite, those of branches that are not live too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.block_attention.records import Partial
from pallas_kernels.branch_attention.records import Branch, BranchGrads, Rule
from pallas_kernels.branch_attention.tuning import Tuning


class _Implementation(NamedTuple):
    module: str
    """Module with `forward` and `backward`, imported when it is first asked for."""
    options: Mapping[str, Any]
    """Keywords of both that make this implementation of it."""
    tunable: bool


IMPLEMENTATIONS: dict[str, _Implementation] = {
    "blockwise": _Implementation("reference", {}, False),
    "pallas": _Implementation("pallas_calls", {"interpret": False}, True),
    "pallas_interpret": _Implementation("pallas_calls", {"interpret": True}, True),
    "jax_triton": _Implementation("triton_calls", {}, True),
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
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "R G n N H"], Float[Array, "R G n N"]]:
    """The whole attention of these queries: `out` in the dtype of q, `lse` float32.

    Args:
        q: queries, positions already rotated in.
        trunk: what they saw of the trunk, `out` [R, G, n, N, H] and `lse` [R, G, n, N].
        branch: keys of their own branch; None: the trunk (and the sink) is all there is.
        sinks: score of each head's sink, or None.
        scale: factor of the scores.
        rule: which keys of its branch a query sees.
        implementation: "blockwise" (plain JAX, anywhere), "pallas" or "jax_triton" (one fused kernel on a GPU: Pallas,
            or Triton's own language), "pallas_interpret" (the kernels of "pallas" step by step on any machine, for
            tests; refused under check_vma=True). With branch=None nothing is left but an elementwise merge: all of them
            run its plain form, after the same refusals.
        tuning: sizes of the kernels; None: the table of `tuning.pick`.
    """
    _check(q, trunk, branch, rule)
    module, options = _pick(implementation, tuning)
    return module.forward(q, trunk, branch, sinks, scale=scale, rule=rule, **options)


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
    tuning: Tuning | None = None,
) -> BranchGrads:
    """Gradients of the local part, given lse and delta of the whole."""
    module, options = _pick(implementation, tuning)
    return module.backward(q, branch, sinks, lse, delta, d_out, scale=scale, rule=rule, **options)


def _pick(name: str, tuning: Tuning | None) -> tuple[Any, dict[str, Any]]:
    """The module of an implementation and its keywords."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} must be one of {sorted(IMPLEMENTATIONS)}; use 'blockwise' on a CPU")
    picked = IMPLEMENTATIONS[name]
    if tuning is not None and not picked.tunable:
        raise ValueError(f"tuning={tuning} must be None with implementation={name!r}; only kernels have sizes")
    module = importlib.import_module(f"pallas_kernels.branch_attention.{picked.module}")
    return module, {**picked.options, **({"tuning": tuning} if picked.tunable else {})}


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
