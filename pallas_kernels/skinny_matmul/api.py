"""y = x @ W for few rows, W packed once and used often: what a decoding step and a verify block are made of.

    y[m, n] = sum_k x[m, k] W[k, n]        float32, M = 1..64 rows

On a CPU XLA's own product of 2 to 16 rows costs about twice that of one, because it rearranges all of W in every call.
Packed weights need no rearranging, and a pass over them serves all rows.

Of "native" a row's result does not depend on how many rows there are, on which it is, on the others or on the number
of threads, bit for bit: each element is one chain of fused multiply-adds in the order of k. Between processors with and
without AVX2, and between implementations, results differ by rounding. Denormals are those of XLA (flushed to zero).

More than 64 rows (`MAX_ROWS`) are computed by the reference, whatever the implementation: there XLA's blocking pays,
but W is first made from the panels again. No derivatives: this is for rollouts.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pallas_kernels.skinny_matmul import library, reference
from pallas_kernels.skinny_matmul.records import WIDTH, PackedWeight

IMPLEMENTATIONS = ("native", "native_portable", "xla")
MAX_ROWS = 64


def available() -> bool:
    """Whether "native" can be asked for here: the library was built, and this process runs on CPUs."""
    return library.registered() and jax.default_backend() == "cpu"


def pack(w: Float[Array, "..."]) -> PackedWeight:
    """W for `skinny_matmul`: once for a weight, not once for a call."""
    _float32("w", w)
    if len(w.shape) != 2 or 0 in w.shape:
        raise ValueError(f"w.shape={w.shape} must be [K, N], none of them 0; give one matrix")
    return reference.pack(w)


def unpack(packed: PackedWeight) -> Float32[Array, "K N"]:
    """The matrix that was packed."""
    return reference.unpack(packed)


def skinny_matmul(
    x: Float[Array, "*b K"], packed: PackedWeight, *, implementation: str, threads: int | None = None
) -> Float32[Array, "*b N"]:
    """x @ W; M is the product of the leading dims.

    Under `vmap` the calls of a batch run one after the other, so that results are those without it; lay what is mapped
    over into rows to have one pass over W. A mapped W is passed to each.

    Args:
        x: the rows.
        packed: of `pack`.
        implementation: "xla" (the reference, for any device), "native" (the compiled kernel) or "native_portable" (its
            path for processors without AVX2, for tests). One that is not there is an error, never another one instead.
        threads: of the native ones; None: those of XLA's pool, and one for weights too small to share.
    """
    _check(x, packed, implementation, threads)
    rows = math.prod(x.shape[:-1])
    flat = x.reshape(rows, x.shape[-1])
    if implementation == "xla" or rows > MAX_ROWS:
        y = reference.matmul(flat, packed)
    else:
        y = _native(flat, packed, portable=implementation == "native_portable", threads=threads or 0)
    return y.reshape(*x.shape[:-1], packed.columns)


def _native(x: Array, packed: PackedWeight, *, portable: bool, threads: int) -> Array:
    out = jax.ShapeDtypeStruct((x.shape[0], packed.columns), jnp.float32)
    call: Any = jax.ffi.ffi_call(library.TARGET, out, vmap_method="sequential")
    return call(x, packed.panels, threads=np.int64(threads), portable=np.bool_(portable))


def _check(x: Array, packed: PackedWeight, implementation: str, threads: int | None) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} must be one of {IMPLEMENTATIONS}; 'xla' runs everywhere")
    _float32("x", x)
    _float32("packed.panels", packed.panels)
    panels = packed.panels.shape
    if len(panels) != 3 or panels[2] != WIDTH or panels[0] != -(-packed.columns // WIDTH):
        raise ValueError(f"packed.panels.shape={panels} must be [ceil(N/16), K, 16] of N={packed.columns}; use pack(w)")
    if not x.shape or x.shape[-1] != panels[1]:
        raise ValueError(
            f"x.shape={x.shape} must end in K={panels[1]}, the rows of W; pack the weight that belongs to x"
        )
    if 0 in x.shape:
        raise ValueError(f"x.shape={x.shape} must hold at least one row; leave the call out")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} must be >= 1; use None for those of XLA's pool")
    if implementation != "xla" and not available():
        raise ValueError(
            f"implementation={implementation!r} must have been built, and runs on CPUs only; run `python -m "
            "pallas_kernels.skinny_matmul.build` or use 'xla'"
        )


def _float32(name: str, array: Array) -> None:
    if array.dtype != jnp.float32:
        raise ValueError(f"{name}.dtype={array.dtype} must be float32; cast it first")
