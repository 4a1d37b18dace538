"""One round of all slots: propose k drafts (k = 0: none), verify, commit into the table; and the first token of each.

The same round as in `decoding.engine`, by request number instead of by row. What differs: rounds of k = 0 are not
counted; and where later positions have a say in how a round ends (`EngineShape.fresh_rounds`), they draw from the
numbers of their position, as first tokens do, which no other round ever looks at.

Requests with options of their own (`decoding.options`) have laws and ends by their rows; how far a stop string has come
stands in the table, at the request's number, so that a slot holds nothing of it.

Letters as in `slots`; r = k + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from draftco_jax.decoding.budget import limit, round_uniforms
from draftco_jax.decoding.control import settle
from draftco_jax.decoding.experts import ExpertLog, log_step
from draftco_jax.decoding.options import RequestLaw
from draftco_jax.decoding.records import RULES, Response, Stats, committed_tokens, is_stop
from draftco_jax.decoding.slots import Ends, Slots, Starts, State, Table, Work, over
from draftco_jax.decoding.state_rows import replaced
from draftco_jax.decoding.stopping import BY_STOP_ID, BY_STOP_STRING, Limits, end_of_block
from draftco_jax.drafts.base import Features, Proposal, ReadsSiblings, borrowed, given_back
from draftco_jax.models.paged_cache import PagedCache
from draftco_jax.numerics.rows import pick
from draftco_jax.numerics.sampling import ACCEPT, COMMIT, PROPOSE, SamplingConfig, draw


class Place(NamedTuple):
    """Where each slot is in its request."""

    who: jax.Array  # i32[S] number of the request, some number where the slot does not decode
    live: jax.Array  # bool[S]
    anchor: jax.Array  # i32[S] position of the newest token, 0 where the slot does not decode


def places(table: Table, state: State) -> Place:
    """Of all slots."""
    who = jnp.minimum(state.slots.request, table.count - 1)
    live = (state.slots.request < table.count) & ~over(table, state)[who]
    count = state.out.count[who]
    return Place(who, live, jnp.where(live, table.lengths[who] + count - 1, 0))


def open_responses(work: Work, table: Table, state: State, starts: Starts) -> State:
    """The first tokens of the requests that have just got slots, drawn from what was read of their prompts."""
    place, slots, read = places(table, state), state.slots, state.staging
    place = Place(place.who, place.live & starts.slots, jnp.where(starts.slots, place.anchor, 0))
    laws = _sampling(work, table, state, place).log_law(read.logits[starts.row][:, None])
    numbers = _uniforms(work, table, state, place, 0)
    tokens = draw(jnp.exp(laws[:, 0]), numbers[:, 0, COMMIT])[:, None]
    end = _end(work, table, state, place, tokens, jnp.zeros_like(place.who))
    draft = slots.draft
    if work.draft is not None:
        taps, hidden = read.taps[starts.row][:, None], read.hidden[starts.row][:, None]
        last = pick(table.prompts[place.who], jnp.maximum(table.lengths[place.who] - 1, 0))[:, None]
        features = Features(last, tokens, taps, hidden, place.anchor, jnp.zeros_like(place.who))
        absorbed = work.draft.absorb(draft, features.astype(work.draft_dtype), work.shared)
        draft = replaced(work.draft_dims(table.context), place.live, absorbed, draft)
    newest = jnp.where(place.live, tokens[:, 0], slots.newest)
    return state._replace(
        out=_commit(table, state.out, place, tokens, pick(laws, tokens), end),
        ends=end.ends,
        slots=slots._replace(newest=newest, draft=draft),
    )


def play(work: Work, table: Table, state: State, number: int) -> State:
    """A round with the draft length of this number."""
    k = work.slots.draft_lengths[number]
    place, slots, stats = places(table, state), state.slots, state.stats
    sampling = _sampling(work, table, state, place)
    ahead = _uniforms(work, table, state, place, k)
    proposal, draft, cache = _propose(work, table, slots, place, ahead, sampling)
    if k and work.shape.verify_budget is not None:
        proposal = limit(proposal, place.live, work.shape.verify_budget)
    block = jnp.concatenate([slots.newest[:, None], proposal.tokens], axis=1)
    active = place.live[:, None] & (jnp.arange(k + 1)[None, :] <= proposal.count[:, None])
    step = work.policy.step(block, place.anchor, cache, tap_layers=work.tap_layers, active=active)
    log = _logged(work, table, state.log, step.experts, place, active)
    laws = sampling.log_law(work.policy.logits(step.hidden))
    if k:
        verify = RULES[work.shape.verification]
        accepted, final = verify(
            jnp.exp(laws), proposal.laws, proposal.tokens, ahead[:, :k, ACCEPT], ahead[:, :, COMMIT]
        )
    else:
        accepted, final = jnp.zeros_like(place.who), draw(jnp.exp(laws[:, 0]), ahead[:, 0, COMMIT])
    tokens = committed_tokens(proposal.tokens, accepted, final)
    end = _end(work, table, state, place, tokens, accepted)
    out, count = _commit(table, state.out, place, tokens, pick(laws, tokens), end), end.count
    last = jnp.maximum(count - 1, 0)
    if work.draft is not None:
        features = Features(block, tokens, step.taps, step.hidden, place.anchor, last).astype(work.draft_dtype)
        draft = work.draft.absorb(draft, features, work.shared)
    newest = jnp.where(count > 0, pick(tokens, last), slots.newest)
    if k:
        stats = _counted(table, stats, place, count, accepted, proposal.count)
    control, ledger = settle(
        work.slots.speculation,
        state.control,
        state.ledger,
        jnp.int32(number),
        active=jnp.sum(place.live, dtype=jnp.int32),
        live=place.live,
        proposed=proposal.count,
        accepted=accepted,
        committed=count,
    )
    slots = slots._replace(newest=newest, cache=step.cache, draft=draft)
    return state._replace(out=out, stats=stats, log=log, ends=end.ends, slots=slots, control=control, ledger=ledger)


def _sampling(work: Work, table: Table, state: State, place: Place) -> SamplingConfig | RequestLaw:
    """How the logits of this round become laws."""
    if table.options is None:
        return work.sampling
    options, written = table.options.rows(place.who), state.out.count[place.who]
    return RequestLaw(options.sampling, _limits(table, place), written, work.slots.filters)


def _limits(table: Table, place: Place) -> Limits:
    assert table.options is not None
    options = table.options.rows(place.who)
    return Limits(options.stop_ids, options.min_tokens, table.limits[place.who])


def _uniforms(work: Work, table: Table, state: State, place: Place, k: int) -> Float[Array, "S r 3"]:
    positions = (place.anchor + 1)[:, None] + jnp.arange(k + 1, dtype=jnp.int32)[None, :]
    if k and work.shape.fresh_rounds:
        return round_uniforms(table.keys[place.who], state.stats.rounds[place.who], k + 1)
    return table.uniforms[place.who[:, None], positions]


def _propose(
    work: Work,
    table: Table,
    slots: Slots,
    place: Place,
    ahead: Float[Array, "S r 3"],
    sampling: SamplingConfig | RequestLaw,
) -> tuple[Proposal, Any, PagedCache]:
    """Drafts of all slots; the draft's state and the policy's cache."""
    k, rows = ahead.shape[1] - 1, place.who.shape[0]
    if not k or work.draft is None:
        vocab = work.policy.cfg.vocab_size
        none = jnp.zeros((rows, 0), jnp.int32)
        return Proposal(none, jnp.zeros((rows, 0, vocab)), jnp.zeros((rows,), jnp.int32)), slots.draft, slots.cache
    state = slots.draft
    if isinstance(work.draft, ReadsSiblings):
        state = work.draft.place_siblings(state, _siblings(table, slots, place))
    state = borrowed(work.draft, state, slots.cache, place.live)
    proposal, state = work.draft.propose(
        state, slots.newest, place.anchor, ahead[:, :k, PROPOSE], sampling, work.shared
    )
    return proposal, *given_back(work.draft, state, slots.cache)


def _siblings(table: Table, slots: Slots, place: Place) -> Int[Array, "S G"]:
    """Slots in which siblings are decoding; -1 for those that wait or have ended."""
    number = jnp.where(place.live, slots.request, table.count)
    slot_of = jnp.full((table.count,), -1, jnp.int32)
    slot_of = slot_of.at[number].set(jnp.arange(number.shape[0], dtype=jnp.int32), mode="drop")
    siblings = table.context.siblings[place.who]
    return jnp.where(siblings >= 0, slot_of[jnp.maximum(siblings, 0)], -1)


def _logged(
    work: Work, table: Table, log: ExpertLog | None, ids: Array | None, place: Place, active: Array
) -> ExpertLog | None:
    """The log after the round's forward; what a rejected draft was read with is overwritten."""
    if log is None or ids is None:
        return None
    after = log_step(log._replace(ids=None), ids, place.anchor, active, work.policy.cfg.mixture)
    if after is None or log.ids is None:
        return after
    positions = place.anchor[:, None] + jnp.arange(active.shape[1], dtype=jnp.int32)[None, :]
    number = jnp.where(active, place.who[:, None], table.count)
    return after._replace(ids=log.ids.at[number, positions].set(ids.astype(log.ids.dtype), mode="drop"))


class RoundEnd(NamedTuple):
    """Where a round leaves each slot's request."""

    count: jax.Array  # i32[S] tokens committed
    stopped: jax.Array  # bool[S] a stop id or a stop string is among them
    ends: Ends | None  # of all requests


def _end(
    work: Work, table: Table, state: State, place: Place, tokens: Int[Array, "S r"], accepted: Int[Array, " S"]
) -> RoundEnd:
    """A round's tokens count up to the first end and the request's limit."""
    if table.options is not None:
        return _end_by_options(work, table, state, place, tokens, accepted)
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    before, bound = state.out.count[place.who], table.limits[place.who]
    stops = (slots <= accepted[:, None]) & is_stop(tokens, work.shape)
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, accepted + 1)
    count = jnp.where(place.live, jnp.minimum(until_stop, bound - before), 0).astype(jnp.int32)
    return RoundEnd(count, jnp.any(stops & (slots < count[:, None]), axis=1), None)


def _end_by_options(
    work: Work, table: Table, state: State, place: Place, tokens: Int[Array, "S r"], accepted: Int[Array, " S"]
) -> RoundEnd:
    """By each request's own stop ids and strings."""
    assert table.options is not None and state.ends is not None
    who, written = place.who, state.out.count[place.who]
    # A response begins in the state of its own strings, whatever was decoded before.
    before = jnp.where(written == 0, table.options.stop_start[who], state.ends.stop_state[who])
    emitted = jnp.where(place.live, accepted + 1, 0)
    end = end_of_block(work.stop_table, before, tokens, emitted, written, _limits(table, place))
    number = jnp.where(place.live, who, table.count)
    ends = Ends(
        reason=state.ends.reason.at[number].set(end.reason, mode="drop"),
        stop_state=state.ends.stop_state.at[number].set(end.state, mode="drop"),
    )
    return RoundEnd(end.count, (end.reason == BY_STOP_ID) | (end.reason == BY_STOP_STRING), ends)


def _commit(
    table: Table,
    out: Response,
    place: Place,
    tokens: Int[Array, "S r"],
    logprobs: Float[Array, "S r"],
    end: RoundEnd,
) -> Response:
    """Append what a round adds."""
    slots, before = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], out.count[place.who]
    # The whole block is written: what lies after `count` is overwritten by the next round or never read.
    number, columns = jnp.where(place.live, place.who, table.count), before[:, None] + slots
    return Response(
        tokens=out.tokens.at[number[:, None], columns].set(tokens, mode="drop"),
        logprobs=out.logprobs.at[number[:, None], columns].set(logprobs, mode="drop"),
        count=out.count.at[number].add(end.count, mode="drop"),
        stopped=out.stopped.at[number].max(end.stopped, mode="drop"),
    )


def _counted(
    table: Table,
    stats: Stats,
    place: Place,
    count: Int[Array, " S"],
    accepted: Int[Array, " S"],
    proposed: Int[Array, " S"],
) -> Stats:
    """With the verify rounds."""
    number = jnp.where(place.live, place.who, table.count)
    reached = jnp.arange(stats.accepted.shape[1])[None, :] < accepted[:, None]
    return Stats(
        rounds=stats.rounds.at[number].add(1, mode="drop"),
        committed=stats.committed.at[number].add(count, mode="drop"),
        proposed=stats.proposed.at[number].add(proposed, mode="drop"),
        accepted=stats.accepted.at[number].add(reached.astype(jnp.int32), mode="drop"),
    )
