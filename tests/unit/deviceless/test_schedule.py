"""Permutes read from scheduled HLO text, in the forms that jax 0.10 and 0.11 write."""

from __future__ import annotations

import pytest

from pallas_kernels.deviceless import permutes
from pallas_kernels.hlo_text import HloText, Operation, arrays

HLO = """HloModule m, is_scheduled=true

%body (p: (bf16[2,4], s32[])) -> (bf16[2,4], s32[]) {
  %kv = bf16[2,4]{1,0} get-tuple-element(%p), index=0
  %start = (bf16[2,4]{1,0}, bf16[2,4]{1,0}) collective-permute-start(%kv), channel_id=1, source_target_pairs={{0,1}}, metadata={op_name="ring/ppermute"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %small = f32[4]{0} fusion(%kv), kind=kLoop, calls=%f
  %attend = (f32[4]{0}, /*index=1*/f32[4]{0}) custom-call(%kv), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="ring/attend"}, backend_config={grid_x = 1 : i32, name = "block_forward", num_warps = 4 : i32}
  %done = bf16[2,4]{1,0} collective-permute-done(%start)
  %after = f32[4]{0} fusion(%done), kind=kLoop, calls=%f
}

%cond (p: (bf16[2,4], s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%inner (p: s32[]) -> s32[] {
  ROOT %n = s32[] add(%p, %p)
}

ENTRY %main (x: bf16[2,4]) -> bf16[2,4] {
  %w = (bf16[2,4]{1,0}, s32[]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %s1 = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}, backend_config={"collective_backend_config":{"is_sync":true}}
  %d1 = f32[8]{0} collective-permute-done(%s1)
  %plain = s32[4]{0} collective-permute(%i), source_target_pairs={{0,1}}
  %s2 = ((bf16[8]{0}, s32[2]{0}), (bf16[8]{0}, s32[2]{0})) collective-permute-start(%x, %i), source_target_pairs={{0,1}}
  %loop = s32[] while(%n0), condition=%cond2, body=%inner, backend_config={"known_trip_count":{"n":"2"}}
  %d2 = (bf16[8]{0}, s32[2]{0}) collective-permute-done(%s2)
  %s3 = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %tidy = f32[4]{0} fusion(%d2), kind=kLoop, calls=%f
  ROOT %d3 = f32[8]{0} collective-permute-done(%s3)
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def spans():
    return {span.name: span for span in permutes(HLO)}


def test_what_lies_between_start_and_done_overlaps(spans):
    ring = spans["start"]
    assert (ring.computation, ring.source, ring.dtype, ring.bytes, ring.times) == (
        "body",
        "ring/ppermute",
        "bf16",
        16,
        6,
    )
    assert [(work.kind, work.label) for work in ring.overlaps] == [("fusion", ""), ("kernel", "block_forward")]
    assert ring.asynchronous and ring.hidden


def test_both_forms_of_a_synchronous_permute_are_seen(spans):
    for name, dtype, size in (("s1", "f32", 32), ("plain", "s32", 16)):
        span = spans[name]
        assert (span.dtype, span.bytes, span.asynchronous, span.hidden) == (dtype, size, False, False)


def test_a_permute_of_several_arrays_counts_all_of_them(spans):
    assert (spans["s2"].dtype, spans["s2"].bytes) == ("bf16", 24)
    assert [work.kind for work in spans["s2"].overlaps] == ["loop"]


def test_a_fusion_alone_hides_nothing(spans):
    assert spans["s3"].asynchronous and not spans["s3"].hidden


def test_a_start_without_an_end_is_refused():
    with pytest.raises(ValueError, match="permute s3 must have an end"):
        permutes(HLO.replace("collective-permute-done(%s3)", "collective-permute-done(%s4)"))


def test_operations_with_tuples_of_tuples_are_read():
    line = "  ROOT %a.1 = ((f32[2]{0:T(8)}, s32[]), /*index=1*/(pred[3]{0}, s32[])) foo-start(f32[2]{0} %x, %y.2), k=1"
    operation = Operation.of(line)
    assert operation is not None
    assert (operation.name, operation.opcode, operation.operands) == ("a.1", "foo-start", ("x", "y.2"))
    assert [arrays(part) for part in operation.types] == [[("f32", 8), ("s32", 4)], [("pred", 3), ("s32", 4)]]
    assert Operation.of("}") is None and Operation.of("") is None


def test_a_loop_whose_trips_are_hidden_may_state_them():
    """Of its own scope only: a loop inside one that does so has stated nothing."""
    counted = HloText.of(HLO).times()
    assert (counted["body"], counted["inner"]) == (6, 2)
    known = 'backend_config={"known_trip_count":{"n":"6"}}'

    def times(name: str) -> dict[str, int | None]:
        return HloText.of(HLO.replace(known, f'metadata={{op_name="jit(f)/{name}"}}')).times()

    assert times("loop_of_3/while")["body"] == 3
    assert times("rounds/while")["body"] is None
    assert times("loop_of_3/while/body/while")["body"] is None
