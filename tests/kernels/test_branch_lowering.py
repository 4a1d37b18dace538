"""The branch kernels become GPU programs on a machine without a GPU: as far as PTX is made, on every version of JAX."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.block_attention import Partial
from pallas_kernels.branch_attention import Branch, branch_attention, branch_attention_backward

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
CALLS = {"pallas": "__gpu$xla.gpu.triton", "jax_triton": "triton_kernel_call"}
# (queries, keys, width): each of the two routes, a head that is a power of two and one that is not.
SHAPES = [(1, 4, 128), (1, 7, 80), (16, 16, 128), (9, 9, 80)]

# From 0.11 on JAX says that Pallas will drop this backend; "jax_triton" is there for the day it does.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_lowers_for_cuda_as_one_kernel(name, dtype, queries, keys, width):
    if name == "jax_triton" and importlib.util.find_spec("jax_triton") is None:
        pytest.skip("jax-triton is not installed (extra cuda12)")
    options = {"scale": 0.1, "rule": "causal" if queries == keys else "all", "implementation": name}

    def forward(q, trunk, branch, sinks):
        return branch_attention(q, trunk, branch, sinks, **options)

    def backward(q, branch, sinks, lse, delta, d_out):
        return branch_attention_backward(q, branch, sinks, lse, delta, d_out, **options)

    shape = jax.ShapeDtypeStruct
    q, kv = shape((1, 33, queries, 8, width), dtype), shape((1, 33, keys, 2, width), dtype)
    trunk = Partial(shape(q.shape, jnp.float32), shape(q.shape[:-1], jnp.float32))
    branch, sinks = Branch(kv, kv, shape((1, 33), jnp.bool_)), shape((8,), jnp.float32)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        for function, given in (
            (forward, (q, trunk, branch, sinks)),
            (backward, (q, branch, sinks, trunk.lse, trunk.lse, q)),
        ):
            text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count(f"@{CALLS[name]}(") == 1, f"{function.__name__} of {name} is not one kernel"
