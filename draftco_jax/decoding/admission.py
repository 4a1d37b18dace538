"""How requests come into slots and leave them: end, stage, read a chunk, start. Each is a function of the state.

    end      a slot whose request gets no further token gives its pages back and is empty
    stage    the next prompt in the table gets a staging row and the pages it needs
    read     every staging row reads one chunk of its prompt, draft included
    start    requests whose prompt is read get empty slots, in the order of the table, as far as pages allow

A prompt is read but for its last token. That one is the first that the slot decodes: its round has no drafts, so the
token after it is drawn from the policy's law with the request's own random number, and the draft absorbs it as it
absorbs any token. What several requests have in common thus ends before anything that is a request's own, and starting
one is copying and nothing else: full pages get one owner more, the page in which the prompt ends is copied, so are the
rows of recurrent states and of the draft's. Sharing or not is the same computation.

A request is started when the pool has pages for all that it may ever write (prompt, its new tokens, drafts after them),
so nothing that decodes can run out of pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from draftco_jax.decoding.pages import free_pages, give_back, pages_of, share, take
from draftco_jax.decoding.slots import Slots, Staging, State, Table, Work, over, with_pools, without_pools
from draftco_jax.decoding.state_rows import replaced, spoiled, taken
from draftco_jax.drafts.base import Context, Features
from draftco_jax.models.paged_cache import NOBODY, PagedCache, is_paged
from draftco_jax.numerics.rows import pick, slice_rows, update_rows

# ---- end ----


def end(work: Work, table: Table, state: State) -> State:
    """Empty the slots of requests that are over, and the staging rows all of whose requests have started."""
    slots, staging = state.slots, state.staging
    ended = (slots.request < table.count) & over(table, state)[jnp.minimum(slots.request, table.count - 1)]
    used_up = (staging.first < table.count) & (staging.until <= state.started)
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
        here = jnp.expand_dims(pages, [d for d in range(pool.ndim) if d != pool.ndim - 4])  # stacked layers come first
        return jnp.where(here, jnp.full_like(pool, jnp.nan), pool)

    spoil = lambda node: jax.tree.map(one, node) if is_paged(node) else node  # noqa: E731
    return jax.tree.map(spoil, layers, is_leaf=is_paged)


def _spoiled_rows(work: Work, table: Table, rows: Slots | Staging, mask: Bool[Array, " B"]) -> dict[str, Any]:
    cache = rows.cache._replace(layers=spoiled(work.layer_dims, mask, rows.cache.layers))
    return {"cache": cache, "draft": spoiled(work.draft_dims(table.context), mask, rows.draft)}


# ---- stage ----


def may_stage(work: Work, table: Table, state: State) -> Bool[Array, ""]:
    """Whether there is a prompt, a row for it and pages for it."""
    return _fits(work, table, state.staging, state.owners, state.staged)


def _fits(
    work: Work, table: Table, staging: Staging, owners: Int32[Array, " Q"], request: Int32[Array, ""]
) -> Bool[Array, ""]:
    need = pages_of(table.lengths[jnp.minimum(request, table.count - 1)] - 1, work.slots.page)
    return (request < table.known) & jnp.any(staging.first == table.count) & (need <= free_pages(owners))


def stage(work: Work, table: Table, state: State) -> State:
    """Give the next prompts rows, as many as there are rows and pages for."""
    staging, owners, request = state.staging, state.owners, state.staged
    rows = staging.first.shape[0]
    fresh = jnp.zeros((rows,), bool)
    for _ in range(rows):
        fits = _fits(work, table, staging, owners, request)
        here = fits & (jnp.arange(rows) == jnp.argmax(staging.first == table.count))
        at = jnp.minimum(request, table.count - 1)
        length = table.lengths[at] - 1
        column = jnp.arange(staging.cache.table[0].size, dtype=jnp.int32).reshape(staging.cache.table.shape[1:])
        wanted = here[:, None, None] & (column < pages_of(length, work.slots.page))[None]
        pages, owners = take(owners, wanted)
        staging = staging._replace(
            first=jnp.where(here, request, staging.first),
            until=jnp.where(here, table.until[at], staging.until),
            length=jnp.where(here, length, staging.length),
            position=jnp.where(here, 0, staging.position),
            cache=staging.cache._replace(table=jnp.where(here[:, None, None], pages, staging.cache.table)),
        )
        fresh |= here
        request = jnp.where(fits, table.until[at], request)
    return state._replace(staging=_begun(work, table, staging, fresh), owners=owners, staged=request)


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
    """One chunk of every prompt that is being read: policy and draft."""
    staging, chunk = state.staging, work.chunk
    running, at = being_read(table, staging), staging.position
    who = jnp.minimum(staging.first, table.count - 1)
    tokens, following = (_from_prompts(table, who, at + after, chunk) for after in (0, 1))
    count = jnp.where(running, jnp.minimum(staging.length - at, chunk), 0)
    active = jnp.arange(chunk)[None, :] < count[:, None]
    step = work.policy.step(
        tokens,
        at,
        with_pools(staging.cache, state.slots.cache),
        tap_layers=work.tap_layers,
        lengths=count,
        active=active,
    )
    slots = state.slots._replace(cache=with_pools(state.slots.cache, step.cache))
    draft = staging.draft
    if work.draft is not None:
        last = jnp.maximum(count - 1, 0)
        features = Features(tokens, following, step.taps, step.hidden, at, last).astype(work.draft_dtype)
        # A row that reads nothing now stays as it is: rows after the last true one may be stored.
        absorbed = work.draft.absorb(draft, features, work.shared)
        draft = replaced(work.draft_dims(table.context), running, absorbed, draft)
    experts = staging.experts
    if experts is not None and step.experts is not None:
        written = update_rows(experts, step.experts.astype(experts.dtype), at)
        experts = jnp.where(running[:, None, None, None], written, experts)
    staging = staging._replace(position=at + count, cache=without_pools(step.cache), draft=draft, experts=experts)
    return state._replace(slots=slots, staging=staging)


def _from_prompts(table: Table, who: Int32[Array, " P"], at: Int[Array, " P"], count: int) -> Int32[Array, "P C"]:
    return slice_rows(table.prompts[who], at, count)


# ---- start ----


class Starts(NamedTuple):
    """Which slots get which requests."""

    slots: jax.Array  # bool[S]
    request: jax.Array  # i32[S]
    row: jax.Array  # i32[S] staging row in which its prompt was read


def _all_pages(work: Work, table: Table, request: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """Pages that hold all that a request may write."""
    return pages_of(table.lengths[request] + table.limits[request] + work.lookahead, work.slots.page)


def _full_pages(work: Work, table: Table, request: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """Pages that hold prompt tokens alone, and will hold nothing else."""
    return (table.lengths[request] - 1) // work.slots.page


def may_start(work: Work, table: Table, state: State) -> Starts:
    """The next requests of the table: all before them have started, their prompts are read, pages are free."""
    slots, staging = state.slots, state.staging
    empty = slots.request == table.count
    request = state.started + jnp.arange(empty.shape[0], dtype=jnp.int32)
    at = jnp.minimum(request, table.count - 1)
    first, until = staging.first[None, :], staging.until[None, :]
    staged = (first <= at[:, None]) & (at[:, None] < until) & (first < table.count)
    row = jnp.argmax(staged, axis=1).astype(jnp.int32)
    ready = jnp.any(staged, axis=1) & (staging.position >= staging.length)[row]
    need = jnp.cumsum(_all_pages(work, table, at) - _full_pages(work, table, at))
    goes = (request < table.known) & ready & (need <= free_pages(state.owners))
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

    split = mask & ((table.lengths[request] - 1) % work.slots.page > 0)  # the prompt ends within a page
    source, target = (jnp.where(split, pick(names, full), NOBODY) for names in (beginning, pages))
    copy = lambda node: node.copied(source, target) if is_paged(node) else node  # noqa: E731
    layers = jax.tree.map(copy, slots.cache.layers, is_leaf=is_paged)
    layers = replaced(work.layer_dims, mask, taken(work.layer_dims, staging.cache.layers, row), layers)
    dims = work.draft_dims(table.context)
    newest = pick(table.prompts[request], table.lengths[request] - 1)
    slots = Slots(
        request=jnp.where(mask, request, slots.request),
        newest=jnp.where(mask, newest, slots.newest),
        cache=slots.cache._replace(layers=layers, table=pages.reshape(slots.cache.table.shape)),
        draft=replaced(dims, mask, taken(dims, staging.draft, row), slots.draft),
    )
    log = state.log
    if log is not None and log.ids is not None and staging.experts is not None:
        places = jnp.where(mask, request, table.count)
        read_with = staging.experts[row]
        log = log._replace(ids=log.ids.at[places, : read_with.shape[1]].set(read_with, mode="drop"))
    started = state.started + jnp.sum(mask, dtype=jnp.int32)
    return state._replace(slots=slots, owners=owners, log=log, started=started)
