"""Collectives read from HLO text: loops, pairs of start and done, and what is refused."""

from __future__ import annotations

import pytest

from draftco_jax.context_parallel.traffic import collectives, permuted_bytes

LOOP = """HloModule m, is_scheduled=true

%inner (p: (bf16[2,4], s32[])) -> (bf16[2,4], s32[]) {
  %kv = bf16[2,4]{1,0} get-tuple-element(%p), index=0
  %s = (bf16[2,4]{1,0}, bf16[2,4]{1,0}) collective-permute-start(%kv), source_target_pairs={{0,1},{1,0}}
  %d = bf16[2,4]{1,0} collective-permute-done(%s)
  %ids = s32[4]{0} collective-permute(%i), source_target_pairs={{0,1},{1,0}}
}

%cond (p: (bf16[2,4], s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: bf16[2,4]) -> bf16[2,4] {
  %w = (bf16[2,4]{1,0}, s32[]) while(%t), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"6"}}
  %first = bf16[2,4]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %sum = f32[8]{0} all-reduce(%y), to_apply=%add
}
"""


def test_a_loop_counts_as_often_as_it_runs_and_a_pair_once():
    found = collectives(LOOP)
    assert permuted_bytes(found, ["bf16"]) == 7 * 16
    assert permuted_bytes(found) == 7 * 16 + 6 * 16
    assert [(c.kind, c.total_bytes) for c in found if c.kind != "collective-permute"] == [("all-reduce", 32)]


def test_senders_and_scope_of_a_permute():
    text = LOOP.replace("{{0,1},{1,0}}\n  %d", '{{0,1}}, metadata={op_name="jit(f)/while/body/scope/ppermute"}\n  %d')
    inner, *others = [c for c in collectives(text) if c.kind == "collective-permute"]
    assert (inner.pairs, inner.name, inner.times) == (1, "jit(f)/while/body/scope/ppermute", 6)
    assert {(c.pairs, c.name) for c in others} == {(2, "")}
    assert [c.pairs for c in collectives(text) if c.kind == "all-reduce"] == [0]


def test_what_cannot_be_counted_is_refused():
    unknown = LOOP.replace(', backend_config={"known_trip_count":{"n":"6"}}', "")
    with pytest.raises(ValueError, match="collective-permute in inner runs an unknown number of times"):
        collectives(unknown)
    branch = LOOP.replace(
        "while(%t), condition=%cond, body=%inner", "conditional(%t), branch_computations={%cond, %inner}"
    )
    with pytest.raises(ValueError, match="unknown number of times"):
        collectives(branch)
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("HloModule m")
