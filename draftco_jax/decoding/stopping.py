r"""Where responses end, as data: what a compiled loop needs to end each request at its own place, without the host.

A request may name stop ids, stop strings, a shortest and a longest length, all of it in arrays, so that requests come
and go without a new program. A round adds a block of tokens to each response, of which those up to the first end are
kept:

    stop id        that token is the last one
    stop string    the token that completes it is the last one (`text.stop_automaton`); at a stop id nothing is read
    max_tokens     the response is full

`min_tokens` forbids stop ids before a response holds that many tokens: their probability is taken out of the law,
before temperature and filters. Row i of a verify block is the law of the token after `written` + i others, so it is the
row that is masked, not the block. The target's rows must be masked; the draft's should be by the same rule, as what is
never accepted only costs (speculation is lossless whatever the draft's law is). Tokens before that number are not read
for stop strings either: a string begins behind them.

Log-probs of masked rows are those of the masked law: a trainer that recomputes them must mask alike.

Letters: B requests, T tokens of a block, n stop ids, V vocabulary, Q states of all automata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from draftco_jax.errors import UserError
from draftco_jax.text.stop_automaton import StopAutomaton

NOT_ENDED, BY_STOP_ID, BY_STOP_STRING, BY_LENGTH = 0, 1, 2, 3
"""Why a response ended. A token that is a stop id and the last one that fits counts as a stop."""

NO_ID = -1


class StopTable(NamedTuple):
    """Automata of several sets of stop strings, one under another."""

    following: jax.Array  # i32[Q, V] state after each id
    complete: jax.Array  # bool[Q] states in which a string is complete; never left


class Limits(NamedTuple):
    """What each request says about its end, stop strings apart."""

    stop_ids: jax.Array  # i32[B, n], NO_ID where a request names fewer
    min_tokens: jax.Array  # i32[B], 0: may end at once
    max_tokens: jax.Array  # i32[B], >= 1


class BlockEnd(NamedTuple):
    """What a block adds to the responses."""

    count: jax.Array  # i32[B] tokens kept
    reason: jax.Array  # i32[B] NOT_ENDED or why the response is now at its end
    state: jax.Array  # i32[B] of the stop strings after the tokens kept


def stop_id_rows(stop_ids: Sequence[Sequence[int]], vocab_size: int, width: int | None = None) -> Int32[Array, "B n"]:
    """Stop ids of each request as rows, filled up with `NO_ID`.

    Args:
        stop_ids: of each request.
        vocab_size: rows of the model's vocabulary; a request may not name all of them.
        width: columns; as many as the longest request needs, and at least one, if None. A fixed width keeps a program.
    """
    needed = max([1, *(len(ids) for ids in stop_ids)])
    width = needed if width is None else width
    for ids in stop_ids:
        if len(ids) > width:
            raise UserError(f"stop_ids={list(ids)} must be at most {width} ids; name fewer or make room for more")
        if any(not 0 <= token < vocab_size for token in ids) or len(set(ids)) == vocab_size:
            raise UserError(
                f"stop_ids={list(ids)} must lie in 0..{vocab_size - 1} and leave some id to be written; correct them"
            )
    rows = [[*ids, *[NO_ID] * (width - len(ids))] for ids in stop_ids]
    return jnp.asarray(np.asarray(rows, np.int32).reshape(len(rows), width))


def stop_table(automata: Sequence[StopAutomaton], states: int | None = None) -> tuple[StopTable, tuple[int, ...]]:
    """One table of several automata, and the state in which a response starts under each.

    Args:
        automata: of the different sets of stop strings in use, one of none among them where a request has none.
        states: rows of the table; as many as needed if None. A fixed number keeps a program as sets come and go.
    """
    sizes = [len(automaton.table) for automaton in automata]
    starts = tuple(int(start) for start in np.cumsum([0, *sizes[:-1]]))
    needed = sum(sizes)
    if states is not None and states < needed:
        raise UserError(
            f"states={states} must be >= {needed}, those of all stop strings; raise it or name fewer strings"
        )
    rows = [automaton.table + start for automaton, start in zip(automata, starts, strict=True)]
    complete = np.concatenate([np.arange(len(automaton.table)) >= automaton.hits_from for automaton in automata])
    spare = (states or needed) - needed
    following = np.pad(np.concatenate(rows), ((0, spare), (0, 0)))
    return StopTable(jnp.asarray(following), jnp.asarray(np.pad(complete, (0, spare)))), starts


def is_stop_id(tokens: Int[Array, "B T"], stop_ids: Int[Array, "B n"]) -> Bool[Array, "B T"]:
    """Whether a token is one of its request's stop ids."""
    return jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)


def without_early_stops(
    logits: Float[Array, "B T V"],
    written: Int[Array, " B"],
    limits: Limits,
    ids: Int[Array, " V"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits with -inf at stop ids in rows of tokens that come too early to end a response.

    For the target's rows of a verify block, for one row of plain decoding and, by the same `written`, for the draft's.

    Args:
        logits: row i is the law of the token that `written` + i tokens of the response come before.
        written: tokens of the response so far.
        limits: of the requests.
        ids: what the columns stand for, where a draft knows some ids only; None: the ids in order.
    """
    rows = jnp.arange(logits.shape[1])[None, :]
    early = written[:, None] + rows < limits.min_tokens[:, None]
    stop_ids = limits.stop_ids
    if ids is None:
        # NO_ID is sent behind the vocabulary, where nothing is written; a negative index would count from the end.
        at = jnp.where(stop_ids == NO_ID, logits.shape[2], stop_ids)
        stops = jnp.zeros((logits.shape[0], logits.shape[2]), bool)
        stops = stops.at[jnp.arange(logits.shape[0])[:, None], at].set(True, mode="drop")
    else:
        stops = jnp.any(ids[None, :, None] == stop_ids[:, None, :], axis=-1)
    return jnp.where(early[:, :, None] & stops[:, None, :], -jnp.inf, logits)


def advance(
    table: StopTable,
    state: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    skip: Int[Array, " B"] | None = None,
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """Read tokens for stop strings.

    Args:
        table: of all sets of strings.
        state: of each request before the block.
        tokens: a block; entries at and after `count` are not read, whatever they hold.
        count: tokens of the block that count.
        skip: tokens at the beginning of the block that leave the state as it is; none if None.

    Returns:
        the state after `count` tokens, and the place of the first token that completes a string, T if none does.
    """
    length = tokens.shape[1]
    skip = jnp.zeros_like(count) if skip is None else skip

    def read(carry: tuple, column: tuple) -> tuple:
        state, first = carry
        token, place = column
        inside = (place >= skip) & (place < count)
        # What is not read may be no id.
        state = jnp.where(inside, table.following[state, jnp.where(inside, token, 0)], state)
        first = jnp.where(inside & table.complete[state], jnp.minimum(first, place), first)
        return (state, first), None

    start = state.astype(jnp.int32), jnp.full(state.shape, length, jnp.int32)
    (state, first), _ = jax.lax.scan(read, start, (tokens.T, jnp.arange(length, dtype=jnp.int32)))
    return state, first


def end_of_block(
    table: StopTable | None,
    state: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    emitted: Int[Array, " B"],
    written: Int[Array, " B"],
    limits: Limits,
) -> BlockEnd:
    """How many tokens of a block are kept, and whether the responses are at their end.

    Args:
        table: of the stop strings; None where no request names any, which costs nothing.
        state: of the stop strings before the block.
        tokens: a block; entries at and after `emitted` are not read.
        emitted: tokens of the block that a round gave out; 0 for a request that is already at its end.
        written: tokens of the response before the block, less than max_tokens where some are emitted.
        limits: of the requests.
    """
    places = jnp.arange(tokens.shape[1])[None, :]
    room = limits.max_tokens - written
    offered = jnp.minimum(emitted, room).astype(jnp.int32)
    allowed = written[:, None] + places >= limits.min_tokens[:, None]
    stops = is_stop_id(tokens, limits.stop_ids) & (places < offered[:, None]) & allowed
    at_id = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1), tokens.shape[1]).astype(jnp.int32)
    at_string = jnp.full_like(at_id, tokens.shape[1])
    if table is not None:
        # The text ends before a stop id, so what that token would say completes nothing.
        read = jnp.minimum(offered, at_id)
        state, at_string = advance(table, state, tokens, read, jnp.clip(limits.min_tokens - written, 0))
    by_string, by_id = at_string < offered, at_id < offered
    count = jnp.minimum(offered, jnp.minimum(at_id, at_string) + 1)
    full = (emitted > 0) & (count == room)
    reason = jnp.where(full, BY_LENGTH, NOT_ENDED)
    reason = jnp.where(by_string, BY_STOP_STRING, jnp.where(by_id, BY_STOP_ID, reason))
    return BlockEnd(count, reason.astype(jnp.int32), state.astype(jnp.int32))


def allowed_tokens(
    prompt_lengths: Int[Array, " B"], max_new: Int[Array, " B"], max_positions: int, lookahead: int
) -> Int32[Array, " B"]:
    """Tokens that a response may hold so that every token has a position and no round writes beyond the last one.

    The last round starts with at most M - 1 tokens written, its block of `lookahead` drafts at positions
    P + M - 2 .. P + M - 2 + lookahead, and the last token of all stands at P + M - 1; hence

        M = min(max_new, max_positions - P - max(lookahead - 1, 0)),   at least 0

    A write beyond the last position is not an error in XLA: it goes to an earlier place. 0 means that the request
    cannot be served.

    Args:
        prompt_lengths: P.
        max_new: tokens asked for.
        max_positions: positions of the model or of the cache, whichever are fewer.
        lookahead: drafts of a round; 0 for plain decoding.
    """
    room = max_positions - prompt_lengths - max(lookahead - 1, 0)
    return jnp.clip(jnp.minimum(max_new, room), 0).astype(jnp.int32)


def require_room(prompt_lengths: Sequence[int], max_positions: int, lookahead: int) -> None:
    """Refuses prompts after which not one token fits."""
    longest = max(prompt_lengths, default=0)
    if longest > (most := max_positions - 1 - max(lookahead - 1, 0)):
        raise UserError(
            f"prompt_length={longest} must be <= {most}, so that a token fits into max_positions={max_positions} with "
            f"lookahead={lookahead}; shorten the prompt or draft fewer tokens"
        )
