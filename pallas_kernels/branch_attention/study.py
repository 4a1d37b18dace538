"""What a choice of sizes does: errors of the kernels against the reference, and what they ask of a GPU."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from pallas_kernels import deviceless
from pallas_kernels.block_attention.records import Partial
from pallas_kernels.branch_attention.api import branch_attention, branch_attention_backward
from pallas_kernels.branch_attention.bench import arrays
from pallas_kernels.branch_attention.records import Branch
from pallas_kernels.branch_attention.shapes import Shape
from pallas_kernels.branch_attention.tuning import Tuning

BOUNDS = {"float32": 1e-6, "bfloat16": 1e-2}
"""What the op's contract allows by dtype of the queries, as `relative_error`; lse is float32 whatever comes in.

float32: sums in another order, a few units in the last place. bfloat16: 8 bits of mantissa, once at the end and once in
the weights.
"""
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def bounds(shape: Shape) -> dict[str, float]:
    """The bound of each array of `errors`."""
    return {name: BOUNDS["float32" if name == "lse" else shape.dtype_name] for name in NAMES}


def relative_error(got: ArrayLike, wanted: ArrayLike) -> float:
    """Largest difference over the largest entry, max |got - wanted| / max |wanted|, in float32."""
    ours, theirs = jnp.asarray(got, jnp.float32), jnp.asarray(wanted, jnp.float32)
    if ours.shape != theirs.shape:
        raise ValueError(f"got={ours.shape} must have the shape {theirs.shape}; compare like with like")
    return float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(theirs)))


def errors(shape: Shape, sizes: Tuning | None, *, implementation: str = "pallas_interpret") -> dict[str, float]:
    """`relative_error` of out, lse and every gradient, sinks included, against "blockwise" in float32.

    Inputs are normal, the same each time; every fifth branch is not live. The reference has them as rounded to the
    dtype of the shape, so the error is that of the kernels alone.
    """
    given = inputs(shape)
    whole = jax.tree.map(lambda x: x if x.dtype == jnp.bool_ else x.astype(jnp.float32), given)
    got = jax.jit(both_ways(shape, implementation, sizes))(*given)
    wanted = jax.jit(both_ways(shape, "blockwise", None))(*whole)
    return {name: relative_error(*pair) for name, *pair in zip(NAMES, got, wanted, strict=True)}


def resources(
    shape: Shape, sizes: Tuning | None, *, implementation: str = "pallas", kind: str = "h100"
) -> dict[str, deviceless.KernelResources]:
    """Resources of the kernels "forward" and "backward" as compiled for a GPU, spills counted where there are some.

    The compiler must be installed (`deviceless.available`) and on the path before JAX starts (`deviceless.prepare`).
    """
    if implementation == "blockwise" or implementation.endswith("interpret"):
        raise ValueError(f"implementation={implementation!r} must have kernels for a GPU; use 'pallas' or 'jax_triton'")
    given = jax.eval_shape(lambda: inputs(shape))
    with tempfile.TemporaryDirectory() as folder:
        compiled = deviceless.compile_for(
            deviceless.gpu_mesh(kind),
            both_ways(shape, implementation, sizes),
            *given,
            options=deviceless.ptx_options(folder),
        )
        found = deviceless.kernel_resources(compiled)
        return {
            what: _with_spills(name, kernel, Path(folder))
            for what in ("forward", "backward")
            for name, kernel in found.items()
            if name.startswith(f"branch_{what}")
        }


def inputs(shape: Shape) -> tuple[Array, Partial, Branch, Array, Array]:
    """q, trunk, branch, sinks and dout of the shape; every fifth branch is not live."""
    given = arrays(shape)
    q, trunk, branch = given["forward"]
    live = jnp.arange(shape.dims.branches)[None, :] % 5 != 1
    sinks = jax.random.normal(jax.random.key(1), (shape.dims.heads,))
    return q, trunk, branch._replace(live=live), sinks, given["backward"][-1]


def both_ways(shape: Shape, implementation: str, sizes: Tuning | None) -> Callable[..., tuple[Array, ...]]:
    """A function of `inputs` that gives the arrays of NAMES: forward, and backward with its lse and delta."""
    options: dict[str, Any] = {
        "scale": shape.dims.width**-0.5,
        "rule": shape.rule,
        "implementation": implementation,
        "tuning": sizes,
    }

    def both(q: Array, trunk: Partial, branch: Branch, sinks: Array, d_out: Array) -> tuple[Array, ...]:
        out, lse = branch_attention(q, trunk, branch, sinks, **options)
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        grads = branch_attention_backward(q, branch, sinks, lse, delta, d_out, **options)
        return out, lse, *jax.tree.leaves(grads)

    return both


def _with_spills(name: str, kernel: deviceless.KernelResources, folder: Path) -> deviceless.KernelResources:
    """Where there is a stack, the machine code does not say what of it are spills; the assembler does."""
    if kernel.spill_bytes is not None:
        return kernel
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        target = _TARGET.search(ptx)
        if target and f".entry {name}" in ptx:
            assembled = deviceless.ptxas_resources(ptx, target[1])[name]
            return dataclasses.replace(kernel, spill_bytes=assembled.spill_bytes)
    raise RuntimeError(f"kernel={name} must be in the PTX that the compiler left; give its spills as None")
