"""Resources of the branch kernels under sizes that someone chose, as compiled for one H100."""

from __future__ import annotations

import pytest

from pallas_kernels.branch_attention.shapes import SHAPES
from pallas_kernels.branch_attention.study import resources
from pallas_kernels.branch_attention.tuning import Launch, Tuning

SHAPE = SHAPES["dflash_block16"]


@pytest.mark.parametrize("implementation", ["pallas", "jax_triton"])
def test_sizes_arrive_at_the_kernels(implementation):
    sizes = Tuning(forward=Launch(rows=16, num_warps=2), backward=Launch(rows=16, num_warps=8))
    found = resources(SHAPE, sizes, implementation=implementation)
    assert {what: kernel.threads for what, kernel in found.items()} == {"forward": 64, "backward": 256}
    assert all(kernel.spill_bytes == kernel.stack_bytes == 0 for kernel in found.values())


def test_spills_are_counted():
    """The machine code says only that there is a stack; 64 rows of 128 in one warp are 256 registers a thread."""
    launch = Launch(rows=64, num_warps=1)
    for what, kernel in resources(SHAPE, Tuning(forward=launch, backward=launch)).items():
        assert kernel.stack_bytes > 0 and kernel.spill_bytes, what
