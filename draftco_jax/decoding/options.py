"""What each request of a call asks for: sampling, stop ids, stop strings, shortest and longest length.

    RequestOptions   of one request, as a person writes it
    OptionRows       of all requests, as arrays: a row travels with its request through table and slots
    RequestLaw       the rows of one round as laws, of the policy's logits and of a draft's

Arrays, so requests with other wishes need no new program; static are only the filters that some request may use
(`request_sampling.FiltersInUse`), the number of stop ids a request may have and the states of the stop strings.

Letters: B requests, n stop ids, t rows of a block, V vocabulary, W ids that a draft knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from draftco_jax.decoding.stopping import Limits, StopTable, stop_id_rows, stop_table, without_early_stops
from draftco_jax.errors import UserError
from draftco_jax.numerics import request_sampling
from draftco_jax.numerics.request_sampling import FiltersInUse, RequestSampling, asked_filters, law_each, log_law_each
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.text.stop_automaton import build_stop_automaton
from draftco_jax.text.tokenizer import Tokenizer

NO_TABLE = -1


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What one request asks for."""

    sampling: SamplingConfig = SamplingConfig()
    stop_ids: tuple[int, ...] = ()
    """Ids that end the response, all of them: the engine's own are not added."""
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """No stop id is drawn before the response holds so many tokens, and a stop string begins behind them."""
    max_tokens: int
    """New tokens at most."""

    def __post_init__(self) -> None:
        """Refuse lengths that no response has."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be >= 1; give the longest response that is wanted")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be in 0..max_tokens={self.max_tokens}; lower it")


class OptionRows(NamedTuple):
    """What the requests ask for, `Request.max_tokens` apart."""

    sampling: RequestSampling
    stop_ids: jax.Array  # i32[B, n], stopping.NO_ID where a request names fewer
    min_tokens: jax.Array  # i32[B]
    stop_start: jax.Array  # i32[B] state of the stop strings (`StopTable`) before the response; NO_TABLE for all
    # where no request names any

    def rows(self, which: Int[Array, " S"]) -> OptionRows:
        """Those of these requests."""
        return jax.tree.map(lambda leaf: leaf[which], self)


class Prepared(NamedTuple):
    """A call's options as the engine takes them."""

    rows: OptionRows
    max_tokens: jax.Array  # i32[B]
    stop_table: StopTable | None
    """None where no request names a stop string."""
    filters: FiltersInUse


def prepare_options(
    options: Sequence[RequestOptions],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    *,
    stop_ids: int | None = None,
    stop_states: int | None = None,
) -> Prepared:
    """Options of requests as arrays, one row each.

    Args:
        options: at least one.
        vocab_size: rows of the model's vocabulary.
        tokenizer: what makes text of ids; needed where a request names stop strings.
        stop_ids: columns for stop ids; as many as the longest request needs if None.
        stop_states: rows of the table of stop strings, which there is then in any case; as many as needed if None. With
            both numbers fixed, calls that ask for other things go through the same program.

    Raises `UserError` for ids outside the vocabulary and for stop strings that cannot be looked for.
    """
    table, starts = _stop_strings([each.stop_strings for each in options], vocab_size, tokenizer, stop_states)
    i32 = lambda values: jnp.asarray(np.asarray(values, np.int32))  # noqa: E731
    rows = OptionRows(
        sampling=request_sampling.of([each.sampling for each in options]),
        stop_ids=stop_id_rows([tuple(dict.fromkeys(each.stop_ids)) for each in options], vocab_size, stop_ids),
        min_tokens=i32([each.min_tokens for each in options]),
        stop_start=i32(starts),
    )
    filters = request_sampling.filters_in_use([each.sampling for each in options])
    return Prepared(rows, i32([each.max_tokens for each in options]), table, filters)


def _stop_strings(
    wanted: Sequence[tuple[str, ...]], vocab_size: int, tokenizer: Tokenizer | None, states: int | None
) -> tuple[StopTable | None, list[int]]:
    """One table of all sets of strings, and each request's state in it before its response."""
    sets = list(dict.fromkeys(wanted))
    if not any(sets) and states is None:
        return None, [NO_TABLE] * len(wanted)
    if tokenizer is None:
        raise UserError("stop_strings must come with a tokenizer, which says what ids are as text; give one")
    table, starts = stop_table([build_stop_automaton(tokenizer, strings, vocab_size) for strings in sets], states)
    start_of = dict(zip(sets, starts, strict=True))
    return table, [start_of[strings] for strings in wanted]


def check_options(rows: OptionRows, filters: FiltersInUse, stop_table: StopTable | None) -> None:
    """Refuse, on the host, what a program with these filters and this table would not see."""
    asked = asked_filters(rows.sampling)
    for name, used, there in zip(FiltersInUse._fields, asked, filters, strict=True):
        if used and not there:
            raise ValueError(f"filters={filters} must have {name}, which a request asks for; use ALL_FILTERS")
    states = 0 if stop_table is None else stop_table.complete.shape[0]
    starts = np.asarray(rows.stop_start)
    if stop_table is None and np.any(starts != NO_TABLE) or stop_table is not None and np.any(starts < 0):
        raise ValueError(
            f"stop_table with {states} states must be the one that stop_start={starts.tolist()} are states of; "
            "take both from one prepare_options"
        )


@dataclass(frozen=True)
class RequestLaw:
    """The laws of one round under each request's own settings, in the place of a `SamplingConfig`."""

    sampling: RequestSampling
    limits: Limits
    written: jax.Array  # i32[B] tokens of each response before the round
    filters: FiltersInUse

    def log_law(self, logits: Float[Array, "B t V"]) -> Float32[Array, "B t V"]:
        """Of the policy: row i speaks of the token that `written` + i others of its response come before."""
        return log_law_each(without_early_stops(logits, self.written, self.limits), self.sampling, self.filters)

    def law(
        self, logits: Float[Array, "B *t W"], first: int | Int[Array, ""] = 0, ids: Int[Array, " W"] | None = None
    ) -> Float32[Array, "B *t W"]:
        """Of a draft (`drafts.base.DraftSampling`): what the policy may not write is not proposed.

        A draft all of whose ids are forbidden proposes as if they were not; the policy refuses them.
        """
        blocks = logits if logits.ndim == 3 else logits[:, None]
        masked = without_early_stops(blocks, self.written + first, self.limits, ids)
        if ids is not None:
            masked = jnp.where(jnp.any(masked > -jnp.inf, axis=-1, keepdims=True), masked, blocks)
        return law_each(masked.reshape(logits.shape), self.sampling, self.filters)
