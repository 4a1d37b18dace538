"""The order of a scheduled program and its picture, on a program written by hand."""

from __future__ import annotations

import dataclasses

import pytest
from matplotlib.figure import Figure

from pallas_kernels.deviceless import Order, orders, permutes
from pallas_kernels.deviceless.figure import draw_order, short_name

# One permute with a fusion and a kernel under it, one that nothing is under, one that is marked synchronous.
HLO = """
HloModule program, is_scheduled=true

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%carry), index=1
  %first = f32[8] fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="first"}
  %start = (f32[8], f32[8]) collective-permute-start(%first), source_target_pairs={{0,1},{1,0}}
  %second = f32[8] fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="second"}
  %third = f32[8] custom-call(%second), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "branch_forward_8b"}
  %done = f32[8] collective-permute-done(%start)
  %start.1 = (f32[8], f32[8]) collective-permute-start(%third), source_target_pairs={{0,1},{1,0}}
  %done.1 = f32[8] collective-permute-done(%start.1)
  %fourth = f32[8] fusion(%done, %done.1), kind=kLoop, calls=%fused, metadata={op_name="fourth"}
  %start.2 = (f32[8], f32[8]) collective-permute-start(%fourth), source_target_pairs={{0,1},{1,0}}, backend_config={"is_sync":true}
  %fifth = f32[8] fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="fifth"}
  %done.2 = f32[8] collective-permute-done(%start.2)
  ROOT %out = (s32[], f32[8]) tuple(%x, %done.2)
}

%condition (carry: (s32[], f32[8])) -> pred[] {
  %carry.1 = (s32[], f32[8]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x.1 = f32[8] parameter(0)
  %loop = (s32[], f32[8]) while(%x.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %end = f32[8] get-tuple-element(%loop), index=1
}
"""  # noqa: E501


@pytest.fixture
def order() -> Order:
    (found,) = orders(HLO)  # the entry sends nothing itself
    return found


def test_work_is_in_the_order_of_its_start_and_permutes_are_between(order):
    assert (order.computation, order.times) == ("body", 7)
    assert [work.name for work in order.works] == ["first", "second", "third", "fourth", "fifth"]
    assert [(p.start, p.end) for p in order.permutes] == [(1, 3), (3, 3), (4, 4)]
    assert [p.span for p in order.permutes] == permutes(HLO)
    for placed in order.permutes:
        assert placed.span.overlaps == order.works[placed.start : placed.end]


def test_the_picture_has_a_bar_for_each_and_names_kernels_without_their_sizes(order):
    axes = Figure().subplots()
    draw_order(axes, order)
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars[:5] == [(place, 1) for place in range(5)]
    assert bars[5][0] == 1 and bars[5][1] == 2  # the permute that something is under
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[3] != colours[2]  # a fusion is no kernel
    assert colours[6] == colours[7] != colours[5]  # hidden and not
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("branch_forward") == 1 and sum("MiB" in text for text in texts) == 3
    assert axes.get_title(loc="left") == "body, runs 7 times"


def test_a_loop_is_called_a_loop(order):
    assert short_name(dataclasses.replace(order.works[0], kind="loop")) == "loop"
