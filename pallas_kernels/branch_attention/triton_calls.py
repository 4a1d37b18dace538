"""The branch kernels in Triton's own language, called through jax-triton: for the day Pallas drops its Triton backend.

Triton is imported when a kernel is first asked for; it comes with the extra cuda12. Sizes, routes, masks and what is
refused are those of `pallas_calls`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.block_attention.records import Partial
from pallas_kernels.branch_attention import pallas_block, pallas_calls, reference, triton_block, triton_few
from pallas_kernels.branch_attention.records import Branch, BranchGrads, Rule
from pallas_kernels.branch_attention.tuning import SMALLEST_DOT, Dims, Launch, Tuning, pick
from pallas_kernels.gpu import check_target, power_above

HOPPER = 90
"""Compute capability that is compiled for on a machine without a GPU."""


def forward(
    q: Array,
    trunk: Partial,
    branch: Branch | None,
    sinks: Array | None,
    *,
    scale: float,
    rule: Rule,
    tuning: Tuning | None,
) -> tuple[Array, Array]:
    """See `api.branch_attention`."""
    check_target("jax_triton", pallas_calls.target_platform())
    if branch is None:
        return reference.forward(q, trunk, branch, sinks, scale=scale, rule=rule)
    dims = pallas_calls.dims_of(q, branch)
    launch = (tuning or pick(dims, q.dtype)).forward
    inputs = [pallas_calls.flat(x) for x in (q, *trunk)] + pallas_calls.flat_branch(branch) + [_sinks(sinks, dims)]
    outputs = [jax.ShapeDtypeStruct(inputs[0].shape, q.dtype), jax.ShapeDtypeStruct(inputs[2].shape, jnp.float32)]
    constants = kernel_constants(dims, launch, scale=scale, rule=rule, sinks=sinks is not None)
    out, lse = _call(dims, launch, "forward", inputs, outputs, constants)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


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
    tuning: Tuning | None,
) -> BranchGrads:
    """See `api.branch_attention_backward`."""
    check_target("jax_triton", pallas_calls.target_platform())
    if branch is None:
        return reference.backward(q, branch, sinks, lse, delta, d_out, scale=scale, rule=rule)
    dims = pallas_calls.dims_of(q, branch, d_out)
    launch = (tuning or pick(dims, q.dtype)).backward
    inputs = [pallas_calls.flat(x) for x in (q, d_out, lse, delta)]
    inputs += [*pallas_calls.flat_branch(branch), _sinks(sinks, dims)]
    # Without sinks their gradient is a place of one number that nothing is written to.
    of_sinks = (1, 1, 1) if sinks is None else pallas_calls.sink_shape(dims, launch)
    shapes = [inputs[0].shape, inputs[4].shape, inputs[4].shape, of_sinks]
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    constants = kernel_constants(dims, launch, scale=scale, rule=rule, sinks=sinks is not None)
    found = _call(dims, launch, "backward", inputs, outputs, constants)
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(found, (q, branch.keys, branch.values), strict=False))
    return BranchGrads(dq, dk, dv, None if sinks is None else jnp.sum(found[3], axis=(0, 1)))


def kernel_constants(dims: Dims, launch: Launch, *, scale: float, rule: Rule, sinks: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    sizes = {
        "QUERIES": dims.queries,
        "KEYS": dims.keys,
        "HEADS": dims.heads,
        "KV_HEADS": dims.kv_heads,
        "WIDTH": dims.width,
        "LANES": dims.lanes,
    }
    rules = {"scale": scale, "CAUSAL": rule == "causal", "SINKS": sinks}
    if dims.route == "few":
        return sizes | rules | {"BRANCHES": dims.branches, "TILE": launch.branches, "ROWS": power_above(dims.rows)}
    places = max(power_above(dims.keys), SMALLEST_DOT)
    return sizes | rules | {"CHUNKS": pallas_block.chunks(dims, launch), "ROWS": launch.rows, "PLACES": places}


@functools.cache
def kernel(route: str, direction: str) -> Any:
    """The Triton function of a route ("few", "block") and a direction ("forward", "backward")."""
    module = triton_few if route == "few" else triton_block
    make = module.forward_kernel if direction == "forward" else module.backward_kernel
    return make(_imported("triton"), _imported("triton.language"))


def _imported(name: str) -> Any:
    # By name, so that importing this module, and a type checker, need no Triton.
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"implementation='jax_triton' must find the module {name} ({error}); pip install 'draftco[cuda12]'"
        ) from error


def _sinks(sinks: Array | None, dims: Dims) -> Array:
    """The kernels take a pointer in any case."""
    return jnp.zeros((dims.heads,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)


def _call(
    dims: Dims,
    launch: Launch,
    direction: str,
    inputs: list[Array],
    outputs: list[jax.ShapeDtypeStruct],
    constants: dict[str, Any],
) -> list[Array]:
    triton_call = _imported("jax_triton").triton_call
    pallas_calls.check_not_empty(outputs)
    # Renamed in jax-triton 0.4.
    results = "out_type" if "out_type" in inspect.signature(triton_call).parameters else "out_shape"
    return list(
        triton_call(
            *inputs,
            **{results: outputs},
            kernel=kernel(dims.route, direction),
            grid=(pallas_calls.programs(dims, launch, direction),),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            # None: ask the GPU that is there.
            compute_capability=None if jax.default_backend() == "gpu" else HOPPER,
            name=f"branch_{direction}",
            **constants,
        )
    )
