"""Runs Triton kernels on a CPU, step by step, by Triton's own interpreter: their numbers without a GPU.

A process for this alone: started with TRITON_INTERPRET=1, and with jax-triton replaced by `interpreted_call`.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

import jax
import numpy as np


def install() -> None:
    """Make implementation "jax_triton" run here."""
    from pallas_kernels import deviceless
    from pallas_kernels.branch_attention import pallas_calls

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported; start a process for it")
    sys.path.append(str(deviceless.folder()))
    stand_in = types.ModuleType("jax_triton")
    stand_in.triton_call = interpreted_call  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["jax_triton"] = stand_in
    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter.InterpreterBuilder.create_dot = dot
    pallas_calls.target_platform = lambda: "gpu"


def interpreted_call(*inputs, kernel, out_shape, grid, num_warps, num_stages, compute_capability, name, **constants):
    """`jax_triton.triton_call`, with outputs that start as not-a-number so that what is not written shows."""

    def run(*arrays):
        outputs = [np.full(x.shape, np.nan, x.dtype) for x in out_shape]
        kernel[grid](*(_Tensor(np.array(x)) for x in arrays), *map(_Tensor, outputs), **constants)
        return outputs

    return jax.pure_callback(run, out_shape, *inputs)


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Product of a and b plus d, in the type of d. Triton's own, as of 3.9, multiplies the bit patterns of bfloat16."""
    left, right = (_float32(x) if x.dtype.is_bf16() else x.data for x in (a, b))
    return type(d)(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _float32(handle):
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


class _Tensor:
    """As much of a torch tensor as the interpreter asks for; its storage is itself."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return _Tensor(self.array)

    def set_(self, storage, offset, size, stride):
        self.array = storage.array

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, other):
        assert self.array is other.array
