"""The table of block sizes as compiled for an H100: no kernel spills, and products run where they should."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_attention import KeyRange, block_attention, block_attention_backward
from pallas_kernels.block_attention.tuning import SM90
from pallas_kernels.deviceless import compile_for, gpu_mesh, kernel_resources, ptx_options, ptxas_resources

KERNELS = ("block_attention_forward", "block_attention_dq", "block_attention_dkv")
SHARED_LIMIT = 232448  # bytes a block may ask for on sm_90
DTYPES = {"half": jnp.bfloat16, "single": jnp.float32}
# 80 is padded to 128, 16 is the narrowest; one token makes the smallest tiles there are.
CASES = [*((width, kind, 2048) for width, kind in SM90), (80, "half", 2048), (16, "half", 2048), (128, "half", 1)]


def both(q, k, v, first, last, index, lse, delta, d_out):
    seen, options = KeyRange(first, last), {"scale": 0.1, "implementation": "pallas"}
    part = block_attention(q, k, v, seen, index, **options)
    return part, block_attention_backward(q, k, v, seen, index, lse, delta, d_out, **options)


@pytest.mark.parametrize(("width", "kind", "tokens"), CASES)
def test_kernels_of_the_table_fit_an_h100(width, kind, tokens, tmp_path):
    shape = jax.ShapeDtypeStruct
    q, k = shape((1, tokens, 8, width), DTYPES[kind]), shape((1, tokens, 2, width), DTYPES[kind])
    seen, stat = shape((1, tokens), jnp.int32), shape((1, tokens, 8), jnp.float32)
    arguments = (q, k, k, seen, seen, shape((tokens,), jnp.int32), stat, stat, q)
    compiled = compile_for(gpu_mesh("h100"), both, *arguments, options=ptx_options(str(tmp_path)))
    found = kernel_resources(compiled)
    # One file is left for each kernel; others are of XLA, and one of them is empty.
    dumped = [path.read_text() for path in tmp_path.glob("*.ptx")]
    ptx = [text for text in dumped if ".target" in text and any(kernel in text for kernel in KERNELS)]
    assembled = {name: kernel for text in ptx for name, kernel in ptxas_resources(text).items()}
    for kernel in KERNELS:
        (name,) = [name for name in found if name.startswith(kernel)]
        print(width, kind, tokens, found[name], assembled[name].spill_bytes)
        assert found[name].spill_bytes == assembled[name].spill_bytes == 0
        assert found[name].shared_bytes <= SHARED_LIMIT
    assert ptx
    tensor_cores = re.compile(r"wgmma\.mma_async|mma\.sync")
    assert all(bool(tensor_cores.search(text)) == (kind == "half") for text in ptx)
    assert not any("tf32" in text for text in ptx)
