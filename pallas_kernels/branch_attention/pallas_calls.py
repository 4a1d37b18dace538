"""The branch kernels in Pallas: what a GPU runs ("pallas", by Pallas' Triton backend) and the same interpreted.

Without branch keys what is left of the op is elementwise, of which XLA makes one fusion: the plain form is used then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.block_attention.records import Partial
from pallas_kernels.branch_attention import pallas_block, pallas_few, reference
from pallas_kernels.branch_attention.records import Branch, BranchGrads, Rule
from pallas_kernels.branch_attention.tuning import Dims, Launch, Tuning, pick
from pallas_kernels.gpu import check_interpreter, check_sizes, check_target, target_platform
from pallas_kernels.manual_axes import cast, varying_axes


def forward(
    q: Array,
    trunk: Partial,
    branch: Branch | None,
    sinks: Array | None,
    *,
    scale: float,
    rule: Rule,
    tuning: Tuning | None,
    interpret: bool,
) -> tuple[Array, Array]:
    """See `api.branch_attention`."""
    if not interpret:
        check_target("pallas", target_platform())
    if branch is None:
        return reference.forward(q, trunk, branch, sinks, scale=scale, rule=rule)
    dims = dims_of(q, branch)
    launch = (tuning or pick(dims, q.dtype)).forward
    kernel = (pallas_few if dims.route == "few" else pallas_block).forward_kernel
    inputs = [flat(x) for x in (q, *trunk)] + flat_branch(branch) + flat_sinks(sinks)
    bound = functools.partial(kernel, dims=dims, launch=launch, scale=scale, rule=rule, sinks=sinks is not None)
    shapes = [jax.ShapeDtypeStruct(inputs[0].shape, q.dtype), _float32(inputs[2].shape)]
    out, lse = _call(
        bound,
        name_of("forward", dims, q, rule, sinks),
        inputs,
        shapes,
        programs(dims, launch, "forward"),
        launch,
        interpret,
    )
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
    interpret: bool,
) -> BranchGrads:
    """See `api.branch_attention_backward`."""
    if not interpret:
        check_target("pallas", target_platform())
    if branch is None:
        return reference.backward(q, branch, sinks, lse, delta, d_out, scale=scale, rule=rule)
    dims = dims_of(q, branch, d_out)
    launch = (tuning or pick(dims, q.dtype)).backward
    kernel = (pallas_few if dims.route == "few" else pallas_block).backward_kernel
    inputs = [flat(x) for x in (q, d_out, lse, delta)] + flat_branch(branch) + flat_sinks(sinks)
    bound = functools.partial(kernel, dims=dims, launch=launch, scale=scale, rule=rule, sinks=sinks is not None)
    shapes = [_float32(inputs[0].shape), _float32(inputs[4].shape), _float32(inputs[4].shape)]
    if sinks is not None:
        shapes.append(_float32(sink_shape(dims, launch)))
    found = _call(
        bound,
        name_of("backward", dims, q, rule, sinks),
        inputs,
        shapes,
        programs(dims, launch, "backward"),
        launch,
        interpret,
    )
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(found, (q, branch.keys, branch.values), strict=False))
    return BranchGrads(dq, dk, dv, None if sinks is None else jnp.sum(found[3], axis=(0, 1)))


def dims_of(q: Array, branch: Branch, *others: Array) -> Dims:
    """Sizes of a call, with what no kernel takes refused."""
    rows, groups, queries, heads, width = q.shape
    dtypes = {jnp.dtype(x.dtype).name for x in (q, branch.keys, branch.values, *others)}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16", "float16"}:
        raise ValueError(f"dtypes={sorted(dtypes)} must be one of float32, bfloat16, float16; cast or use 'blockwise'")
    check_sizes(q=q.shape, keys=branch.keys.shape)
    return Dims(
        branches=rows * groups,
        queries=queries,
        keys=branch.keys.shape[2],
        heads=heads,
        kv_heads=branch.keys.shape[3],
        width=width,
    )


def name_of(direction: str, dims: Dims, q: Array, rule: Rule, sinks: Array | None) -> str:
    """Name of a kernel in profiles: kernels of different code have different names."""
    extras = "_causal" * (rule == "causal") + "_sinks" * (sinks is not None)
    sizes = f"{dims.branches}b_{dims.queries}q_{dims.keys}k_{dims.heads}n_{dims.kv_heads}kv_{dims.width}h"
    return f"branch_{direction}_{sizes}_{q.dtype.name}{extras}"


def flat(x: Array) -> Array:
    """Rows and branches as one dimension."""
    return x.reshape(-1, *x.shape[2:])


def flat_branch(branch: Branch) -> list[Array]:
    """Keys, values and live (as int32, which Triton can load) by branch."""
    return [flat(branch.keys), flat(branch.values), branch.live.reshape(-1).astype(jnp.int32)]


def flat_sinks(sinks: Array | None) -> list[Array]:
    """Sinks as an optional input."""
    return [] if sinks is None else [sinks.astype(jnp.float32)]


def programs(dims: Dims, launch: Launch, direction: str) -> int:
    """Programs of a launch."""
    if dims.route == "few":
        return pl.cdiv(dims.branches, launch.branches) * dims.kv_heads
    chunks = pallas_block.chunks(dims, launch) if direction == "forward" else 1
    return dims.branches * dims.kv_heads * chunks


def sink_shape(dims: Dims, launch: Launch) -> tuple[int, int, int]:
    """Parts of the gradient of the sinks, added up outside in a fixed order."""
    tiles = pl.cdiv(dims.branches, launch.branches) if dims.route == "few" else dims.branches
    return tiles, dims.queries, dims.heads


def check_not_empty(outputs: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Refuses a launch of no programs."""
    if any(x.size == 0 for x in outputs):
        raise ValueError(f"shapes={[x.shape for x in outputs]} must not be empty; skip the call")


def _float32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(
    kernel: Callable[..., None],
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    launch: Launch,
    interpret: bool,
) -> list[Array]:
    check_not_empty(outputs)
    axes = varying_axes(*inputs)
    if interpret:
        check_interpreter(axes)
    inputs = [cast(x, axes) for x in inputs]
    kind = jax.typeof(inputs[0]).manual_axis_type
    run = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind) for x in outputs],
        # Named, since which backend is meant when none is given differs between versions.
        compiler_params=plgpu.CompilerParams(num_warps=launch.num_warps, num_stages=launch.num_stages),
        interpret=interpret,
        name=name,
    )
    return list(run(*inputs))
