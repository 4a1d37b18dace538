"""Branch attention as compiled for 8 H100: what travels is hidden behind work, is as much as it should be, and fits."""

from __future__ import annotations

import pytest

from draftco_jax.context_parallel.memory import backward_ring_bytes, forward_ring_bytes, passes_bytes
from draftco_jax.context_parallel.traffic import collectives, permuted_bytes
from pallas_kernels import block_attention, branch_attention
from pallas_kernels.deviceless import gpu_target, kernel_resources, peak_bytes, permutes

K = 1024
PAPER_PEAK_BYTES = 7.5e9
"""Peak of one rank in three passes of EAGLE-3 over 256K tokens on 8 ranks, arXiv 2609.07108, figure 6."""
# Interpreted kernels are made for a CPU; jax-triton has no block attention.
IMPLEMENTATIONS = [
    name
    for name in sorted(block_attention.IMPLEMENTATIONS)
    if name in branch_attention.IMPLEMENTATIONS and not name.endswith("interpret")
]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture(params=[64 * K, 256 * K], ids=["64K", "256K"])
def tokens(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["forward", "backward"])
def backward(request):
    return request.param


@pytest.fixture
def program(programs, implementation, tokens, backward):
    return programs.branch_program(tokens, implementation, backward)


def test_every_permute_of_the_ring_is_under_way_during_a_loop_or_kernel(program, backward):
    """The last hop of the gradients is left out: they are those of the last block, and nothing has to follow it.

    It is asynchronous all the same, and what the compiler found to put there is printed.
    """
    spans = permutes(program.hlo)
    assert spans and all(span.asynchronous for span in spans), spans
    if backward:
        *spans, last = spans
        assert (last.dtype, last.bytes, last.times) == ("f32", program.trunk.numbers * 4, 1)
        print("the last gradient hop is under way during", [work.label for work in last.overlaps] or "nothing")
    exposed = [span for span in spans if not span.hidden]
    assert not exposed, exposed


def test_bytes_are_those_of_the_formula_and_nothing_else_is_sent(program, backward):
    found = collectives(program.hlo)
    assert {c.kind for c in found} == {"collective-permute"}
    if not backward:
        assert permuted_bytes(found) == forward_ring_bytes(program.trunk)
        return
    assert permuted_bytes(found) == forward_ring_bytes(program.trunk) + backward_ring_bytes(program.trunk)


def test_memory_of_one_rank_is_below_that_of_the_paper(program, implementation, tokens, backward):
    peak = peak_bytes(program.compiled)
    print(
        f"{implementation}, {tokens // K}K tokens, {'forward and backward' if backward else 'forward'}: "
        f"{peak / 1e9:.2f} GB a rank (one read of the trunk)"
    )
    assert peak <= PAPER_PEAK_BYTES


@pytest.mark.parametrize("kernels", [name for name in IMPLEMENTATIONS if name != "blockwise"])
def test_three_passes_of_256k_tokens_need_less_memory_than_in_the_paper(programs, kernels):
    """EAGLE-3, forward and backward, every pass a ring: what the paper's figure measures."""
    program = programs.passes_program(256 * K, kernels)
    peak = peak_bytes(program.compiled)
    print(f"{kernels}, 256K tokens, three passes: {peak / 1e9:.2f} GB a rank (paper: {PAPER_PEAK_BYTES / 1e9:.1f} GB)")
    assert peak <= PAPER_PEAK_BYTES
    # Between two passes nothing is computed here, so only the last hop of each, which carries gradients, may have
    # nothing to run meanwhile. In a model the projections are there: test_joint_loss.py.
    spans, gradients = permutes(program.hlo), program.trunk.numbers * 4
    assert all(span.asynchronous for span in spans), spans
    exposed = [(span.bytes, span.times) for span in spans if not span.hidden]
    assert len(exposed) < programs.PASSES and set(exposed) <= {(gradients, 1)}, exposed
    assert permuted_bytes(collectives(program.hlo)) == passes_bytes(program.trunk, programs.PASSES, "replay")


def test_no_kernel_spills_a_register_or_asks_for_more_shared_memory_than_there_is(program, implementation):
    found = kernel_resources(program.compiled)
    assert found
    for name, kernel in found.items():
        assert kernel.spill_bytes == 0, (name, kernel)
        assert kernel.shared_bytes <= gpu_target("h100").shared_per_block, (name, kernel)
        if "attention" in name or "branch" in name:
            print(f"{implementation}: {name}: {kernel}")
