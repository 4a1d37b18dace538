"""Generation through slots: one compiled loop serves any number of requests, refilling slots as requests end.

    turn      end what is over -> stage prompts -> read a chunk of each -> start requests, with their first tokens
              -> one round of all slots

Keys and values lie in pages (`models.paged_cache`), prompts that neighbours in the table share are read once
(`admission`), and the draft length may change from round to round (`SlotShape.rule`). The host is not asked anything
between the first turn and the last.

A server goes in steps: `advance` by some turns, `slots.submit`, `abort` and `collect` between them, all functions of a
table and a state.

A request's tokens are those of `decoding.engine.generate_*` for the same key, prompt, weights and draft length, up to
rounding; they do not depend on the slot, on what else is served, on when it started or on how many slots there are,
unless a budget or siblings of a draft make requests look at each other, or a rule makes the draft length depend on
what was served beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from draftco_jax.decoding.admission import end, may_stage, may_start, read, stage, start
from draftco_jax.decoding.control import Control, Ledger, decide
from draftco_jax.decoding.records import EngineShape, Request, assemble
from draftco_jax.decoding.rounds import open_responses, places, play
from draftco_jax.decoding.slots import SlotShape, Starts, State, Table, Work, open_state, open_table, over
from draftco_jax.decoding.stopping import StopTable
from draftco_jax.drafts.base import Shared
from draftco_jax.models.compute import FloatName
from draftco_jax.models.functional import ModelGraph
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.types import Rollouts

Weights = Any  # parameter tree in the rollout layout


class Served(NamedTuple):
    """What a call gives."""

    rollouts: Rollouts
    control: Control  # for the next call
    ledger: Ledger  # rounds of this one


def serve(
    graphs: tuple[ModelGraph, ModelGraph | None],
    weights: tuple[Weights, Weights | None],
    request: Request,
    *,
    shape: EngineShape,
    slots: SlotShape,
    sampling: SamplingConfig,
    draft_dtype: FloatName = "float32",
    control: Control | None = None,
    stop_table: StopTable | None = None,
) -> Served:
    """Roll out all requests, of which as many decode at a time as there are slots."""
    work = work_of(
        graphs, weights, shape=shape, slots=slots, sampling=sampling, draft_dtype=draft_dtype, stop_table=stop_table
    )
    table = open_table(work, request)
    state = advance(work, table, open_state(work, table, control))
    return Served(collect(work, table, state), state.control, state.ledger)


def collect(work: Work, table: Table, state: State) -> Rollouts:
    """What has come out so far, of all rows of the table."""
    prompts = table.prompts[:, : work.shape.prompt_capacity]
    request = Request(prompts, table.lengths, table.keys, table.context)
    reasons = None if state.ends is None else state.ends.reason
    return assemble(request, state.out, state.stats, state.log, work.shape, reasons)


def advance(work: Work, table: Table, state: State, turns: Int32[Array, ""] | None = None) -> State:
    """Turns until every request is over, or so many."""
    until = None if turns is None else state.turn + turns

    def going(state: State) -> Bool[Array, ""]:
        more = ~jnp.all(over(table, state))
        return more if until is None else more & (state.turn < until)

    return jax.lax.while_loop(going, lambda state: turn(work, table, state), state)


def abort(state: State, requests: Bool[Array, " N"]) -> State:
    """These requests get no further token; slots, rows and pages are free from the next turn on, and those that waited
    are passed over."""
    return state._replace(aborted=state.aborted | requests)


def work_of(
    graphs: tuple[ModelGraph, ModelGraph | None],
    weights: tuple[Weights, Weights | None],
    *,
    shape: EngineShape,
    slots: SlotShape,
    sampling: SamplingConfig,
    draft_dtype: FloatName = "float32",
    stop_table: StopTable | None = None,
) -> Work:
    """Models and sizes.

    Raises:
        ValueError: drafts are asked for and there is no draft.
    """
    policy: Decoder = graphs[0].merge(weights[0])
    draft = None if graphs[1] is None or weights[1] is None else graphs[1].merge(weights[1])
    if draft is None and max(slots.draft_lengths) > 0:
        raise ValueError(f"draft_lengths={slots.draft_lengths} need a draft; give its weights, or (0,) for plain")
    shared = Shared(*policy.tables(draft_dtype))
    return Work(policy, draft, shared, shape, slots, sampling, draft_dtype, stop_table)


def turn(work: Work, table: Table, state: State) -> State:
    """One turn of the loop."""
    state = end(work, table, state)
    stages = may_stage(work, table, state)
    state = only_if(jnp.any(stages.rows), lambda state: stage(work, table, state, stages), state)
    state = read(work, table, state)
    starts = may_start(work, table, state)
    state = only_if(jnp.any(starts.slots), lambda state: _begin(work, table, state, starts), state)
    live = jnp.sum(places(table, state).live, dtype=jnp.int32)
    chosen = decide(work.slots.speculation, state.control, live)
    for number in range(len(work.slots.draft_lengths)):
        wanted = (live > 0) & (chosen == number)
        state = only_if(wanted, lambda state, number=number: play(work, table, state, number), state)
    return state._replace(turn=state.turn + 1)


def _begin(work: Work, table: Table, state: State, starts: Starts) -> State:
    return open_responses(work, table, start(work, table, state, starts), starts)


def only_if(condition: Bool[Array, ""], change: Callable[[State], State], state: State) -> State:
    """The changed state where the condition holds."""
    return jax.lax.cond(condition, change, lambda state: state, state)
