"""Requests through slots in steps of some turns: the host sees what has come out while the rest goes on.

The same loop as `serving.serve`, cut into calls of one program; what a request gets does not depend on the cut. Between
two steps the state stays on the device, and the texts so far are copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from draftco_jax.decoding.records import EngineShape, Request
from draftco_jax.decoding.serving import Weights, advance, collect, work_of
from draftco_jax.decoding.slots import SlotShape, State, Table, open_state, open_table, over
from draftco_jax.decoding.stopping import StopTable
from draftco_jax.models.compute import FloatName
from draftco_jax.models.functional import ModelGraph
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import Rollouts


class Progressed(NamedTuple):
    """What there is after a step, in numpy arrays."""

    over: np.ndarray  # bool[N] requests that get no further token; rows without one are over too
    rollouts: Rollouts  # of all rows, as far as they have come


class Streaming:
    """The two programs, compiled once for each size: open a table and its state, advance by some turns."""

    def __init__(
        self,
        graphs: tuple[ModelGraph, ModelGraph | None],
        *,
        shape: EngineShape,
        sampling: SamplingConfig,
        draft_dtype: FloatName = "float32",
    ) -> None:
        work = partial(work_of, graphs, shape=shape, sampling=sampling, draft_dtype=draft_dtype)

        def begin(weights: Any, request: Request, known: Int32[Array, ""], *, slots: SlotShape) -> tuple[Table, State]:
            opened = work(weights, slots=slots)
            table = open_table(opened, request, known)
            return table, open_state(opened, table)

        def step(
            weights: Any,
            table: Table,
            state: State,
            turns: Int32[Array, ""],
            stop_table: StopTable | None,
            *,
            slots: SlotShape,
        ) -> tuple[State, Bool[Array, " N"], Rollouts]:
            opened = work(weights, slots=slots, stop_table=stop_table)
            state = advance(opened, table, state, turns)
            return state, over(table, state), collect(opened, table, state)

        self._begin = jax.jit(begin, static_argnames=("slots",))
        self._step = jax.jit(step, static_argnames=("slots",), donate_argnums=(2,))

    def run(
        self,
        weights: tuple[Weights, Weights | None],
        request: Request,
        *,
        slots: SlotShape,
        known: int,
        turns: int,
        stop_table: StopTable | None = None,
    ) -> Iterator[Progressed]:
        """After every `turns` turns, until the first `known` requests are over; the other rows are no requests."""
        table, state = self._begin(weights, request, jnp.int32(known), slots=slots)
        while True:
            state, ended, rollouts = self._step(weights, table, state, jnp.int32(turns), stop_table, slots=slots)
            found = Progressed(*jax.tree.map(np.asarray, (ended, rollouts)))
            yield found
            if found.over.all():
                return
