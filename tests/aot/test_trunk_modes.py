"""Gathered trunks and stripes as compiled for 8 H100: what they cost, and where their hops run."""

from __future__ import annotations

import pytest

from draftco_jax.context_parallel.memory import (
    backward_ring_bytes,
    forward_ring_bytes,
    gathered_extra_bytes,
    passes_bytes,
)
from draftco_jax.context_parallel.traffic import collectives, permuted_bytes
from pallas_kernels.deviceless import peak_bytes, permutes

TOKENS = 64 * 1024
KERNELS = "pallas"


@pytest.mark.parametrize("passes", [2, 3])
def test_a_gathered_trunk_costs_no_more_memory_than_the_rule_says_and_nearly_as_much(programs, passes):
    """Above the rule `pick_trunk_mode` would run a rank out of memory; far below, it would turn down what fits."""
    replayed = programs.passes_program(TOKENS, KERNELS, passes)
    gathered = programs.passes_program(TOKENS, KERNELS, passes, "gathered")
    extra = peak_bytes(gathered.compiled) - peak_bytes(replayed.compiled)
    rule = gathered_extra_bytes(gathered.trunk, passes)
    print(f"{passes} passes: gathered takes {extra / 1e6:.0f} MB more than replay, the rule says {rule / 1e6:.0f} MB")
    assert 0.9 * rule <= extra <= rule
    assert permuted_bytes(collectives(gathered.hlo)) == passes_bytes(gathered.trunk, passes, "gathered")


def test_hops_of_a_gathered_trunk_are_not_beside_a_kernel(programs):
    """Keys are all there before the first read and gradients leave after the last: what the docs say against it."""
    spans = permutes(programs.passes_program(TOKENS, KERNELS, 3, "gathered").hlo)
    print([(span.dtype, span.times, span.hidden, [work.label for work in span.overlaps]) for span in spans])
    assert sum(span.times for span in spans) == 2 * (programs.RANKS - 1)  # keys there, gradients home
    assert not any(span.hidden for span in spans), spans


def test_stripes_are_sent_beside_kernels_too(programs):
    """Forward and backward; the last hop of gradients has nothing to wait for it, as with zigzag."""
    program = programs.branch_program(TOKENS, KERNELS, True, stripe=128)
    *spans, last = permutes(program.hlo)
    assert all(span.asynchronous for span in (*spans, last)), spans
    assert (last.dtype, last.bytes, last.times) == ("f32", program.trunk.numbers * 4, 1)
    exposed = [span for span in spans if not span.hidden]
    assert spans and not exposed, exposed
    sent = permuted_bytes(collectives(program.hlo))
    assert sent == forward_ring_bytes(program.trunk) + backward_ring_bytes(program.trunk)
