"""The Pallas kernels of the block op lower for a GPU on a host that has none; what the bodies ask of the hardware."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_attention import KeyRange, block_attention, block_attention_backward

H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
KERNELS = {"block_attention_forward", "block_attention_dq", "block_attention_dkv"}
# JAX 0.11 announces the end of this backend at every lowering.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def arguments(width, dtype, tokens=300, heads=4, kv_heads=2):
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    q, k = shape(2, tokens, heads, width), shape(2, tokens, kv_heads, width)
    seen, stat = shape(2, tokens, dtype=jnp.int32), shape(2, tokens, heads, dtype=jnp.float32)
    return q, k, k, seen, seen, shape(tokens, dtype=jnp.int32), stat, stat, q


def both(q, k, v, first, last, index, lse, delta, d_out):
    seen, options = KeyRange(first, last), {"scale": 0.1, "implementation": "pallas"}
    part = block_attention(q, k, v, seen, index, **options)
    return part, block_attention_backward(q, k, v, seen, index, lse, delta, d_out, **options)


def lower(function, args, mesh=None):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100) if mesh is None else mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_all_three_kernels_lower_for_cuda(width, dtype):
    text = lower(both, arguments(width, dtype)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 3
    assert set(re.findall(r"block_attention_[a-z]+", text)) >= KERNELS


def test_kernels_lower_inside_shard_map_with_its_type_check():
    """Outputs must say which mesh axes they vary over, or check_vma=True refuses the call."""
    mesh = AbstractMesh((2,), ("context",), axis_types=(AxisType.Auto,), abstract_device=H100)
    tokens, flat = P(None, "context"), P("context")
    specs = (tokens, tokens, tokens, tokens, tokens, flat, tokens, tokens, tokens)
    mapped = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=True)
    text = lower(mapped, arguments(64, jnp.bfloat16, tokens=256), mesh).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_product_sums_in_float32_and_none_is_rounded_to_tf32(dtype):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        text = str(jax.make_jaxpr(both)(*arguments(64, dtype)))
    products = re.findall(r"(\w+)\[[\d,]+\] = dot_general\[(.*?)\n\s*\]", text, flags=re.DOTALL)
    assert len(products) == 2 + 3 + 4  # scores and values; scores, d_weights, dq; scores, d_weights, dk, dv
    assert {kind for kind, _ in products} == {"f32"}
    assert all("Precision.HIGHEST" in options for _, options in products)
