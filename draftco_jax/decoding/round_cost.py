"""Seconds of a round of each draft length in a program of slots, measured on rounds alone.

All slots decode in the middle of their responses and stay there: after each round they are put back, so that a call of
many rounds costs as many times one. What a round costs beside its rounds (ends, prompts, starts) is the same for every
length and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from draftco_jax.decoding.control import start
from draftco_jax.decoding.cost_table import CostTable, Setting, measure
from draftco_jax.decoding.records import Request
from draftco_jax.decoding.rounds import play
from draftco_jax.decoding.slots import Slots, SlotShape, State, Table, Work, open_state, open_table
from draftco_jax.drafts.base import Context

ROUNDS_PER_CALL = 16


def measure_rounds(
    make: Callable[[Any], Work], weights: Any, context: Context, slots: SlotShape, setting: Setting, *, repeats: int = 5
) -> CostTable:
    """Time a round of each of the program's draft lengths.

    Args:
        make: weights -> the program; called inside `jit`.
        weights: of policy and draft.
        context: of a request of each slot.
        slots: of the program.
        setting: what the seconds will hold for.
        repeats: timed calls of each length, of which the median counts.
    """

    def round_of(rows: int, length: int) -> Callable[[], object]:
        number = slots.draft_lengths.index(length)
        run = jax.jit(partial(_rounds, make, number=number))
        return lambda: jax.block_until_ready(run(weights, context))

    table = measure(setting, (slots.slots,), slots.draft_lengths, round_of, repeats=repeats)
    seconds = tuple(tuple(s / ROUNDS_PER_CALL for s in row) for row in table.seconds)
    return CostTable(setting, table.rows, table.lengths, seconds)


def _rounds(make: Callable[[Any], Work], weights: Any, context: Context, *, number: int) -> Any:
    """Many rounds of one length, each from the same places."""
    work = make(weights)
    table, state = _amid(work, context)
    counts = state.out.count

    def body(_: Any, state: State) -> State:
        state = play(work, table, state, number)
        out = state.out._replace(count=counts, stopped=jnp.zeros_like(state.out.stopped))
        return state._replace(out=out)

    # All of it comes out: what nobody asks for the compiler leaves out, the draft's reading after a plain round first.
    return jax.lax.fori_loop(0, ROUNDS_PER_CALL, body, state)


def _amid(work: Work, context: Context) -> tuple[Table, State]:
    """All slots in the middle of responses to the longest prompts; of pages only how many they are matters."""
    count, shape = work.slots.slots, work.shape
    ones = jnp.ones((count, shape.prompt_capacity), jnp.int32)
    lengths = jnp.full((count,), shape.prompt_capacity, jnp.int32)
    table = open_table(work, Request(ones, lengths, jax.random.split(jax.random.key(0), count), context))
    rule = work.slots.speculation
    control = start(rule, jax.random.key(0), jnp.ones((len(rule.lengths),)))  # a rule that weighs costs has none yet
    state = open_state(work, table, control)
    cache = state.slots.cache
    names = 1 + jnp.arange(cache.table.size, dtype=jnp.int32) % (work.pages - 1)
    slots = Slots(
        request=jnp.arange(count, dtype=jnp.int32),
        newest=jnp.ones_like(lengths),
        cache=cache._replace(table=names.reshape(cache.table.shape)),
        draft=state.slots.draft,
    )
    half = jnp.full_like(lengths, max(shape.max_new_tokens // 2, 1))
    return table, state._replace(slots=slots, out=state.out._replace(count=half))
