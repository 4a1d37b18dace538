"""In which order each stage works, without ticks: for models of pipelines whose stages wait only for what they need.

Letters: S stages, K virtual stages, M microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftco_jax.pipeline.schedule import Schedule, ScheduleName


class Op(NamedTuple):
    """One forward or backward of a microbatch on a virtual stage."""

    backward: bool
    microbatch: int
    virtual_stage: int


Orders = tuple[tuple[Op, ...], ...]
"""What each stage does, first to last."""


class DeadlockError(ValueError):
    """Stages wait for each other; the message names what one of them waits for."""


def orders_of(schedule: Schedule) -> Orders:
    """The order in the tables, with the forward of a tick before its backward."""
    orders: list[list[Op]] = [[] for _ in range(schedule.stages)]
    for t in range(schedule.ticks):
        for s in range(schedule.stages):
            for backward, work in ((False, schedule.forward), (True, schedule.backward)):
                if work.active[t, s]:
                    k = int(work.chunk[t, s]) * schedule.stages + s
                    orders[s].append(Op(backward, int(work.microbatch[t, s]), k))
    return tuple(map(tuple, orders))


def textbook_orders(name: ScheduleName, *, stages: int, microbatches: int) -> Orders:
    """One chunk, stages not in step: 1f1b starts with S - 1 - s forwards and then takes one of each in turn."""
    orders: list[tuple[Op, ...]] = []
    for s in range(stages):
        ahead = min(microbatches, stages - 1 - s if name == "1f1b" else microbatches)
        order = [Op(False, m, s) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                order.append(Op(False, ahead + m, s))
            order.append(Op(True, m, s))
        orders.append(tuple(order))
    return tuple(orders)


def walk(orders: Orders, waits_for: Callable[[Op], Sequence[Op]] = lambda op: ()) -> list[Op]:
    """All ops, each after those of its stage before it and after what it needs.

    A forward needs that of the virtual stage before; a backward needs its forward and the backward of the virtual stage
    after. Whether there is such a walk does not depend on how long anything takes.

    Args:
        orders: of each stage.
        waits_for: what an op needs on top of that.

    Raises:
        DeadlockError: some stages can never go on.
    """
    last = max(op.virtual_stage for order in orders for op in order)
    to_do = [deque(order) for order in orders]
    done: set[Op] = set()
    walked: list[Op] = []
    while any(to_do):
        before = len(walked)
        for queue in to_do:
            while queue and not (missing := _needs(queue[0], last, waits_for) - done):
                done.add(queue[0])
                walked.append(queue.popleft())
        if len(walked) == before:
            stage, queue = next((s, queue) for s, queue in enumerate(to_do) if queue)
            missing = min(_needs(queue[0], last, waits_for) - done)
            raise DeadlockError(f"stage={stage} must not wait for {missing} before {queue[0]}; nobody can go on")
    return walked


def _needs(op: Op, last: int, waits_for: Callable[[Op], Sequence[Op]]) -> set[Op]:
    needs = set(waits_for(op))
    if op.backward:
        needs.add(op._replace(backward=False))
        if op.virtual_stage < last:
            needs.add(op._replace(virtual_stage=op.virtual_stage + 1))
    elif op.virtual_stage:
        needs.add(op._replace(virtual_stage=op.virtual_stage - 1))
    return needs
