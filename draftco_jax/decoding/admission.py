"""How requests come into slots and leave them: end, stage, read a chunk, start. Each is a function of the state.

    end      a slot whose request gets no further token gives its pages back and is empty
    stage    the next prompts in the table get staging rows and the pages they need
    read     every prompt that is not read to its end gets on by a chunk, draft included, a few prompts in a forward
    start    requests whose prompt is read get empty slots, in the order of the table, as far as pages allow

What several requests have in common, their prompt, ends before anything that is a request's own, and starting one is
copying and nothing else: full pages get one owner more, the page in which the prompt ends is copied, so are the rows of
recurrent states and of the draft's. Sharing or not is the same computation. The first token is drawn then
(`rounds.open_responses`), from the logits that were kept with the prompt and with the request's own random number.

A request is started when the pool has pages for all that it may ever write (prompt, its new tokens, drafts after them),
so nothing that decodes can run out of pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from draftco_jax.decoding.pages import free_pages, give_back, pages_of, share, take
from draftco_jax.decoding.slots import Slots, Staging, Starts, State, Table, Work, over, with_pools, without_pools
from draftco_jax.decoding.state_rows import put_back, replaced, spoiled, taken
from draftco_jax.drafts.base import Context, Features
from draftco_jax.models.paged_cache import NOBODY, PagedCache, is_paged
from draftco_jax.numerics.rows import pick, row_at, slice_rows, update_rows


def waiting(table: Table, state: State) -> Bool[Array, " N"]:
    """Requests that have no slot yet and are to have one."""
    number = jnp.arange(table.count, dtype=jnp.int32)
    return (number >= state.started) & (number < table.known) & ~state.aborted


# ---- end ----


def end(work: Work, table: Table, state: State) -> State:
    """Empty the slots of requests that are over, and the staging rows for which none waits any more."""
    slots, staging = state.slots, state.staging
    ended = (slots.request < table.count) & over(table, state)[jnp.minimum(slots.request, table.count - 1)]
    ahead = jnp.pad(jnp.cumsum(waiting(table, state).astype(jnp.int32)), (1, 0))
    used_up = (staging.first < table.count) & (ahead[staging.until] == ahead[staging.first])
    slot_cache, owners = _left(slots.cache, ended, state.owners)
    row_cache, owners = _left(staging.cache, used_up, owners)
    if work.slots.poison:
        freed = (owners == 0) & (state.owners > 0)
        slot_cache = slot_cache._replace(layers=_spoiled_pages(slot_cache.layers, freed))
    nobody = jnp.int32(table.count)
    slots = slots._replace(request=jnp.where(ended, nobody, slots.request), cache=slot_cache)
    staging = staging._replace(
        first=jnp.where(used_up, nobody, staging.first),
        until=jnp.where(used_up, nobody, staging.until),
        cache=row_cache,
    )
    if work.slots.poison:
        slots = slots._replace(**_spoiled_rows(work, table, slots, ended))
        staging = staging._replace(**_spoiled_rows(work, table, staging, used_up))
    return state._replace(slots=slots, staging=staging, owners=owners)


def _left(cache: PagedCache, rows: Bool[Array, " B"], owners: Int32[Array, " Q"]) -> tuple[PagedCache, Array]:
    """The rows without pages, and who owns which after that."""
    here = rows[:, None, None]
    owners = give_back(owners, jnp.where(here, cache.table, NOBODY))
    return cache._replace(table=jnp.where(here, NOBODY, cache.table)), owners


def _spoiled_pages(layers: Any, pages: Bool[Array, " Q"]) -> Any:
    def one(pool: Array) -> Array:
        here = jnp.expand_dims(pages, [d for d in range(pool.ndim) if d != pool.ndim - 3])
        return jnp.where(here, jnp.full_like(pool, jnp.nan), pool)

    spoil = lambda node: jax.tree.map(one, node) if is_paged(node) else node  # noqa: E731
    return jax.tree.map(spoil, layers, is_leaf=is_paged)


def _spoiled_rows(work: Work, table: Table, rows: Slots | Staging, mask: Bool[Array, " B"]) -> dict[str, Any]:
    cache = rows.cache._replace(layers=spoiled(work.layer_dims, mask, rows.cache.layers))
    return {"cache": cache, "draft": spoiled(work.draft_dims(table.context), mask, rows.draft)}


# ---- stage ----


class Stages(NamedTuple):
    """Which staging rows get which prompts."""

    rows: jax.Array  # bool[P]
    request: jax.Array  # i32[P] the first request with the prompt that waits


def may_stage(work: Work, table: Table, state: State) -> Stages:
    """The next prompts of the table, as many as there are empty rows and free pages for.

    Prompts that others were staged before leave free what the longest request takes, so that those can be started
    whatever waits behind them.
    """
    free = state.staging.first == table.count
    number = jnp.arange(table.count, dtype=jnp.int32)
    apart = waiting(table, state) & (number >= state.staged)
    before = jnp.cumsum(apart.astype(jnp.int32)) - apart.astype(jnp.int32)
    foremost = apart & (before == before[table.begins[table.group]])  # of its group
    request = jnp.nonzero(foremost, size=free.shape[0], fill_value=table.count)[0].astype(jnp.int32)
    at = jnp.minimum(request, table.count - 1)
    need = jnp.cumsum(pages_of(table.lengths[at], work.slots.page))
    need += jnp.where(jnp.all(free) & (jnp.arange(free.shape[0]) == 0), 0, work.most_pages)
    goes = (request < table.count) & (need <= free_pages(state.owners))
    count = jnp.sum(jnp.cumprod(goes.astype(jnp.int32)))
    place = jnp.cumsum(free.astype(jnp.int32)) - 1  # the first empty row gets the first prompt
    return Stages(free & (place < count), at[jnp.clip(place, 0, free.shape[0] - 1)])


def stage(work: Work, table: Table, state: State, stages: Stages) -> State:
    """Give prompts their rows."""
    staging, (rows, request) = state.staging, stages
    length = table.lengths[request]
    column = jnp.arange(staging.cache.table[0].size, dtype=jnp.int32).reshape(staging.cache.table.shape[1:])
    wanted = rows[:, None, None] & (column[None] < pages_of(length, work.slots.page)[:, None, None])
    pages, owners = take(state.owners, wanted)
    staging = staging._replace(
        first=jnp.where(rows, request, staging.first),
        until=jnp.where(rows, table.until[request], staging.until),
        length=jnp.where(rows, length, staging.length),
        position=jnp.where(rows, 0, staging.position),
        cache=staging.cache._replace(table=jnp.where(rows[:, None, None], pages, staging.cache.table)),
    )
    staged = jnp.maximum(state.staged, jnp.max(jnp.where(rows, table.until[request], 0)))
    return state._replace(staging=_begun(work, table, staging, rows), owners=owners, staged=staged)


def _begun(work: Work, table: Table, staging: Staging, fresh: Bool[Array, " P"]) -> Staging:
    """With the states of fresh rows as before anything was read."""
    who = jnp.minimum(staging.first, table.count - 1)
    context = Context(table.context.history[who], table.context.siblings[who])
    empty = without_pools(work.empty_cache(fresh.shape[0])).layers
    return staging._replace(
        cache=staging.cache._replace(layers=replaced(work.layer_dims, fresh, empty, staging.cache.layers)),
        draft=replaced(work.draft_dims(table.context), fresh, work.empty_draft(context), staging.draft),
    )


# ---- read ----


def being_read(table: Table, staging: Staging) -> Bool[Array, " P"]:
    """Rows whose prompt is not read to its end."""
    return (staging.first < table.count) & (staging.position < staging.length)


def read(work: Work, table: Table, state: State) -> State:
    """One chunk of every prompt that is being read, a few prompts in a forward."""
    rows = state.staging.first.shape[0]
    at_once = min(work.slots.read_rows, rows)

    def some(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, waiting = carry
        chosen = jnp.nonzero(waiting, size=at_once, fill_value=rows)[0].astype(jnp.int32)
        return _read_rows(work, table, state, chosen), waiting.at[chosen].set(False, mode="drop")

    carry = state, being_read(table, state.staging)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), some, carry)[0]


def _read_rows(work: Work, table: Table, state: State, rows: Int32[Array, " R"]) -> State:
    """A chunk of the prompts in these staging rows, of which those beyond the last are none."""
    staging, chunk = state.staging, work.chunk
    real, own = rows < staging.first.shape[0], jnp.minimum(rows, staging.first.shape[0] - 1)
    at, length = staging.position[own], staging.length[own]
    who = jnp.minimum(staging.first[own], table.count - 1)
    tokens, following = (slice_rows(table.prompts[who], at + after, chunk) for after in (0, 1))
    count = jnp.where(real, jnp.minimum(length - at, chunk), 0)
    cache = with_pools(staging.cache, state.slots.cache)
    cache = cache._replace(layers=taken(work.layer_dims, cache.layers, own), table=staging.cache.table[own])
    active = jnp.arange(chunk)[None, :] < count[:, None]
    step = work.policy.step(tokens, at, cache, tap_layers=work.tap_layers, lengths=count, active=active)
    last = jnp.maximum(count - 1, 0)
    taps, hidden = row_at(step.taps, last), row_at(step.hidden, last)
    put = lambda leaf, new: leaf.at[rows].set(new.astype(leaf.dtype), mode="drop")  # noqa: E731
    own_cache = without_pools(step.cache)
    layers = put_back(work.layer_dims, staging.cache.layers, rows, own_cache.layers)
    after = staging._replace(
        position=put(staging.position, at + count),
        cache=staging.cache._replace(layers=layers),
        logits=put(staging.logits, work.policy.logits(hidden)),
        taps=put(staging.taps, taps),
        hidden=put(staging.hidden, hidden),
    )
    if work.draft is not None:
        # The token after the last one of a prompt is each request's own.
        known = jnp.where(at + count < length, count, count - 1)
        features = Features(tokens, following, step.taps, step.hidden, at, jnp.maximum(known - 1, 0))
        dims = work.draft_dims(table.context)
        before = taken(dims, staging.draft, own)
        absorbed = work.draft.absorb(before, features.astype(work.draft_dtype), work.shared)
        absorbed = replaced(dims, known > 0, absorbed, before)
        after = after._replace(draft=put_back(dims, staging.draft, rows, absorbed))
    if staging.experts is not None and step.experts is not None:
        written = update_rows(staging.experts[own], step.experts.astype(staging.experts.dtype), at)
        after = after._replace(experts=put(staging.experts, written))
    slots = state.slots._replace(cache=with_pools(state.slots.cache, step.cache))
    return state._replace(slots=slots, staging=after)


# ---- start ----


def _all_pages(work: Work, table: Table, request: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """Pages that hold all that a request may write."""
    return pages_of(table.lengths[request] + table.limits[request] + work.lookahead, work.slots.page)


def _full_pages(work: Work, table: Table, request: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """Pages that hold prompt tokens alone, and will hold nothing else."""
    return table.lengths[request] // work.slots.page


def may_start(work: Work, table: Table, state: State) -> Starts:
    """The next requests of the table: all before them have started, their prompts are read, pages are free."""
    slots, staging = state.slots, state.staging
    empty = slots.request == table.count
    request = jnp.nonzero(waiting(table, state), size=empty.shape[0], fill_value=table.count)[0].astype(jnp.int32)
    at = jnp.minimum(request, table.count - 1)
    first, until = staging.first[None, :], staging.until[None, :]
    staged = (first <= at[:, None]) & (at[:, None] < until) & (first < table.count)
    row = jnp.argmax(staged, axis=1).astype(jnp.int32)
    ready = jnp.any(staged, axis=1) & (staging.position >= staging.length)[row]
    need = jnp.cumsum(_all_pages(work, table, at) - _full_pages(work, table, at))
    goes = (request < table.count) & ready & (need <= free_pages(state.owners))
    count = jnp.sum(jnp.cumprod(goes.astype(jnp.int32)))
    place = jnp.cumsum(empty.astype(jnp.int32)) - 1  # the first empty slot gets the first request
    chosen = jnp.clip(place, 0, empty.shape[0] - 1)
    return Starts(empty & (place < count), at[chosen], row[chosen])


def start(work: Work, table: Table, state: State, starts: Starts) -> State:
    """Put requests into slots."""
    slots, staging = state.slots, state.staging
    mask, request, row = starts
    flat = lambda pages: pages.reshape(pages.shape[0], -1)  # noqa: E731
    column = jnp.arange(flat(slots.cache.table).shape[1], dtype=jnp.int32)[None, :]
    full, beginning = _full_pages(work, table, request), flat(staging.cache.table)[row]
    shared = jnp.where(mask[:, None] & (column < full[:, None]), beginning, NOBODY)
    wanted = mask[:, None] & (column >= full[:, None]) & (column < _all_pages(work, table, request)[:, None])
    new, owners = take(share(state.owners, shared), wanted)
    pages = jnp.where(mask[:, None], shared + new, flat(slots.cache.table))

    split = mask & (table.lengths[request] % work.slots.page > 0)  # the prompt ends within a page
    source, target = (jnp.where(split, pick(names, full), NOBODY) for names in (beginning, pages))
    copy = lambda node: node.copied(source, target) if is_paged(node) else node  # noqa: E731
    layers = jax.tree.map(copy, slots.cache.layers, is_leaf=is_paged)
    layers = replaced(work.layer_dims, mask, taken(work.layer_dims, staging.cache.layers, row), layers)
    dims = work.draft_dims(table.context)
    slots = Slots(
        request=jnp.where(mask, request, slots.request),
        newest=slots.newest,
        cache=slots.cache._replace(layers=layers, table=pages.reshape(slots.cache.table.shape)),
        draft=replaced(dims, mask, taken(dims, staging.draft, row), slots.draft),
    )
    log = state.log
    if log is not None and log.ids is not None and staging.experts is not None:
        places = jnp.where(mask, request, table.count)
        read_with = staging.experts[row]
        log = log._replace(ids=log.ids.at[places, : read_with.shape[1]].set(read_with, mode="drop"))
    started = jnp.maximum(state.started, jnp.max(jnp.where(mask, request + 1, 0)))
    return state._replace(slots=slots, owners=owners, log=log, started=started)
