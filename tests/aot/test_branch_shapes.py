"""The named shapes of branch attention as compiled for an H100: no spills, and room for two programs a core."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_attention import Partial
from pallas_kernels.branch_attention import Branch, branch_attention, branch_attention_backward
from pallas_kernels.branch_attention.shapes import SHAPES
from pallas_kernels.deviceless import compile_for, gpu_mesh, kernel_resources, ptx_options

# One of each route, head width and type; the named shapes that are left out differ in the number of branches.
NAMES = ["eagle3_8k_pass7", "eagle3_8k_width64", "eagle3_8k_width256", "dflash_block16", "dspark_block8", "small_pass4"]
REGISTERS_OF_A_CORE = 65536

# From 0.11 on JAX says that Pallas will drop this backend; "jax_triton" is there for the day it does.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@functools.cache
def mesh():
    return gpu_mesh("h100")


def both_ways(shape, implementation, options=None):
    """Forward and backward of a shape, compiled."""
    d = shape.dims
    call = {"scale": 0.1, "rule": shape.rule, "implementation": implementation}

    def both(q, trunk, branch, sinks, delta, d_out):
        out, lse = branch_attention(q, trunk, branch, sinks, **call)
        return out, branch_attention_backward(q, branch, sinks, lse, delta, d_out, **call)

    of = jax.ShapeDtypeStruct
    q = of((1, d.branches, d.queries, d.heads, d.width), shape.dtype)
    kv = of((1, d.branches, d.keys, d.kv_heads, d.width), shape.dtype)
    trunk = Partial(of(q.shape, jnp.float32), of(q.shape[:-1], jnp.float32))
    branch, sinks = Branch(kv, kv, of((1, d.branches), jnp.bool_)), of((d.heads,), jnp.float32)
    return compile_for(mesh(), both, q, trunk, branch, sinks, trunk.lse, q, options=options)


@pytest.mark.parametrize("implementation", ["pallas", "jax_triton"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_spills(name, implementation):
    if implementation == "jax_triton" and importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed")
    shape = SHAPES[name]
    compiled = both_ways(shape, implementation)
    found = {key: kernel for key, kernel in kernel_resources(compiled).items() if key.startswith("branch_")}
    assert len(found) == 2, sorted(found)  # one kernel each way
    for key, kernel in found.items():
        assert kernel.spill_bytes == 0 and kernel.stack_bytes == 0, (key, kernel)
        assert 2 * kernel.registers * kernel.threads <= REGISTERS_OF_A_CORE, (key, kernel)


@pytest.mark.parametrize(("name", "tensor_cores"), [("dflash_block16", True), ("small_block8", False)])
def test_float32_stays_whole_and_bfloat16_is_multiplied_by_tensor_cores(name, tensor_cores, tmp_path):
    """TF32 keeps 10 bits of the mantissa: 1e-3 where the contract asks for 1e-6, and no CPU would show it."""
    both_ways(SHAPES[name], "pallas", ptx_options(str(tmp_path)))
    programs = [path.read_text() for path in tmp_path.rglob("*.ptx")]
    kernels = [text for text in programs if ".entry branch_" in text]
    assert len(kernels) == 2, sorted(path.name for path in tmp_path.rglob("*"))
    for text in kernels:
        assert ("mma" in text and ".bf16" in text) == tensor_cores
        assert "tf32" not in text
