"""The kernels of branch attention alone, by every implementation for GPUs, as compiled for one H100."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_attention import Partial
from pallas_kernels.branch_attention import IMPLEMENTATIONS, Branch, branch_attention, branch_attention_backward
from pallas_kernels.deviceless import compile_for, gpu_mesh, kernel_resources

HEADS, KV_HEADS, WIDTH = 32, 8, 128
KERNELS = [name for name in sorted(IMPLEMENTATIONS) if name != "blockwise" and not name.endswith("interpret")]
# branches, queries and keys of a branch: tokens of EAGLE-3 in the fourth pass, anchors of a block draft
BRANCHES = {"eagle3": (1024, 1, 3), "block": (64, 16, 16)}


@pytest.mark.parametrize("branches", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("implementation", KERNELS)
def test_no_kernel_spills_a_register(implementation, branches):
    groups, count, keys = branches
    options = {"scale": WIDTH**-0.5, "rule": "all", "implementation": implementation}

    def both_ways(q, out, lse, k, v, live, delta):
        branch = Branch(k, v, live)
        out, lse = branch_attention(q, Partial(out, lse), branch, None, **options)
        return out, lse, branch_attention_backward(q, branch, None, lse, delta, out, **options)

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, groups, *dims), dtype)

    queries, statistic = (count, HEADS, WIDTH), shape(count, HEADS, dtype=jnp.float32)
    branch = shape(keys, KV_HEADS, WIDTH)
    args = (
        shape(*queries),
        shape(*queries, dtype=jnp.float32),
        statistic,
        branch,
        branch,
        shape(dtype=jnp.bool_),
        statistic,
    )
    found = kernel_resources(compile_for(gpu_mesh("h100"), both_ways, *args))
    own = {name: kernel for name, kernel in found.items() if name.startswith("branch_")}
    assert len(own) >= 2, f"forward and backward are kernels of their own: {sorted(found)}"
    for name, kernel in own.items():
        print(f"{implementation}: {name}: {kernel}")
        assert kernel.spill_bytes == 0, name
