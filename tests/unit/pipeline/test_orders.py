"""Orders of stages that are not in step, and the walk through them."""

from __future__ import annotations

import pytest

from draftco_jax.pipeline.orders import DeadlockError, Op, orders_of, textbook_orders, walk
from draftco_jax.pipeline.schedule import make_schedule


def said(order):
    return " ".join(f"{'B' if op.backward else 'F'}{op.microbatch}" for op in order)


def test_textbook_orders():
    assert [said(order) for order in textbook_orders("1f1b", stages=3, microbatches=4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert {said(order) for order in textbook_orders("gpipe", stages=3, microbatches=2)} == {"F0 F1 B0 B1"}
    assert said(textbook_orders("1f1b", stages=4, microbatches=1)[0]) == "F0 B0"


def test_the_order_of_a_schedule_is_that_of_its_ticks():
    orders = orders_of(make_schedule("1f1b", stages=2, chunks=2, microbatches=2))
    assert said(orders[0]) == "F0 F1 F0 F1 B0 B1 B0 B1"
    assert [op.virtual_stage for op in orders[0]] == [0, 0, 2, 2, 2, 2, 0, 0]
    assert said(orders[1]) == "F0 F1 F0 B0 F1 B1 B0 B1"


def test_a_walk_takes_each_op_after_what_it_needs():
    orders = textbook_orders("1f1b", stages=3, microbatches=5)
    place = {op: i for i, op in enumerate(walk(orders))}
    assert len(place) == 2 * 3 * 5
    for op, i in place.items():
        if op.backward:
            assert i > place[op._replace(backward=False)]
            assert op.virtual_stage == 2 or i > place[op._replace(virtual_stage=op.virtual_stage + 1)]
        elif op.virtual_stage:
            assert i > place[op._replace(virtual_stage=op.virtual_stage - 1)]
    for order in orders:
        assert sorted(order, key=place.__getitem__) == list(order)


def test_stages_that_wait_for_each_other_are_named():
    orders = textbook_orders("1f1b", stages=2, microbatches=3)
    first, second = Op(False, 0, 0), Op(True, 1, 0)
    with pytest.raises(DeadlockError, match="stage=0 must not wait for .*microbatch=1.* before .*microbatch=0"):
        walk(orders, lambda op: (second,) if op == first else ())
