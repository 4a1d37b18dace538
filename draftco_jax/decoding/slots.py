"""What a program of slots carries: a table of requests, S slots that decode, P rows in which prompts are read.

A request's tokens, counts and log-probs stand in the table, at its own number, from its first token on. A slot holds
what decoding it needs beside: its pages, the rows of recurrent and draft states, its newest token. So nothing is copied
when a request ends, and nothing of it is left but pages and rows that the next owner overwrites.

Letters: N requests in the table, S slots, P staging rows, L prompt capacity, M new-token capacity, k most drafts of a
round, Q pages in the pool, W steps of n columns in a row's table of pages, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from draftco_jax.decoding.control import Control, Ledger, open_ledger, start
from draftco_jax.decoding.experts import ExpertLog
from draftco_jax.decoding.options import OptionRows
from draftco_jax.decoding.pages import unowned
from draftco_jax.decoding.records import EngineShape, Request, Response, Stats
from draftco_jax.decoding.speculation_control import FixedLength, Rule
from draftco_jax.decoding.state_rows import row_dims
from draftco_jax.decoding.stopping import NOT_ENDED, StopTable, allowed_tokens, require_room
from draftco_jax.drafts.base import Context, Draft, Shared
from draftco_jax.models.compute import FloatName
from draftco_jax.models.paged_cache import PagedCache, PagedLayer, is_paged, paged
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.request_sampling import ALL_FILTERS, FiltersInUse
from draftco_jax.numerics.sampling import SamplingConfig, request_uniforms


@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """Static sizes of a program of slots beside those of `EngineShape`."""

    slots: int
    draft_lengths: tuple[int, ...] = (0,)
    """Drafts a round may have, rising. 0: a plain step."""
    rule: Rule | None = None
    """Picks one of them for each round (`decoding.control`). None: always the last."""
    page: int = 16
    """Slots of a page."""
    pages: int | None = None
    """Of the pool; None: as many as all rows can need at the same time."""
    staging_rows: int | None = None
    """Prompts that are read, or wait for slots, at the same time. None: as many as there are slots, at most 32. Each
    holds a row of the draft's state, of recurrent ones and of logits."""
    read_rows: int = 8
    """Prompts of one forward; a turn has as many forwards as its prompts need."""
    chunk: int = 256
    """Prompt tokens of a row that are read in one turn, at most."""
    walk: int = 256
    """Cached tokens that attention looks at in one step, at least a page."""
    share_prefixes: bool = True
    """Neighbours in the table with the same prompt read it once and own its pages together."""
    filters: FiltersInUse = ALL_FILTERS
    """Which filters requests with options of their own may ask for (`decoding.options`); not read without options."""
    poison: bool = False
    """Fill what a request leaves with NaN, to show that nothing of it is read."""

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        for name in ("slots", "page", "staging_rows", "read_rows", "chunk", "walk"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; leave it out for the default")
        if not self.draft_lengths or min(self.draft_lengths) < 0:
            raise ValueError(
                f"draft_lengths={self.draft_lengths} must be numbers >= 0, at least one; use (0,) for plain"
            )
        if self.rule is not None and self.rule.lengths != self.draft_lengths:
            raise ValueError(
                f"draft_lengths={self.draft_lengths} must be those of the rule, {self.rule.lengths}; give the same"
            )

    @property
    def prompts_at_once(self) -> int:
        """`staging_rows`, given or not."""
        return min(self.slots, 32) if self.staging_rows is None else self.staging_rows

    @property
    def speculation(self) -> Rule:
        """The rule, given or not."""
        return self.rule or FixedLength(lengths=self.draft_lengths, length=self.draft_lengths[-1])


@dataclass(frozen=True)
class Work:
    """The models and sizes of a program: everything that is the same for all its turns."""

    policy: Decoder
    draft: Draft | None
    shared: Shared
    """The policy's tables as the draft reads them."""
    shape: EngineShape
    slots: SlotShape
    sampling: SamplingConfig
    draft_dtype: FloatName = "float32"
    stop_table: StopTable | None = None
    """Of the stop strings that requests name; None: they name none."""

    @property
    def lookahead(self) -> int:
        """k."""
        return max(self.slots.draft_lengths)

    @property
    def chunk(self) -> int:
        """Prompt tokens read at once."""
        return min(self.slots.chunk, self.shape.prompt_capacity)

    @property
    def prompt_room(self) -> int:
        """Prompt tokens, up to whole chunks."""
        return -(-self.shape.prompt_capacity // self.chunk) * self.chunk

    @property
    def capacity(self) -> int:
        """Slots that a row may write: the last token it may commit and a full block of drafts after it."""
        return max(self.shape.prompt_capacity + self.shape.max_new_tokens + self.lookahead, self.prompt_room)

    @property
    def steps(self) -> tuple[int, int]:
        """W and n."""
        columns = -(-self.capacity // self.slots.page)
        at_once = min(max(self.slots.walk // self.slots.page, 1), columns)
        return -(-columns // at_once), at_once

    @property
    def prompt_pages(self) -> int:
        """Of the longest prompt."""
        return -(-self.shape.prompt_capacity // self.slots.page)

    @property
    def most_pages(self) -> int:
        """All that one request may ever own."""
        return -(-(self.shape.prompt_capacity + self.shape.max_new_tokens + self.lookahead) // self.slots.page)

    @property
    def pages(self) -> int:
        """Q. Fewer than the least would leave a request waiting for ever."""
        least = 1 + self.prompt_pages + self.most_pages
        if self.slots.pages is not None and self.slots.pages < least:
            raise ValueError(
                f"pages={self.slots.pages} must be >= {least} to hold a prompt that is read and one request of the "
                "longest kind; raise it, or lower the capacities"
            )
        if self.slots.pages is not None:
            return self.slots.pages
        # Prompts that wait leave free what one request more would take (`admission.may_stage`).
        return 1 + self.slots.prompts_at_once * self.prompt_pages + (self.slots.slots + 1) * self.most_pages

    @property
    def beyond_context(self) -> bool:
        """Whether the longest response to the longest prompt, with the drafts of its last round, has no positions."""
        longest = self.shape.prompt_capacity + self.shape.max_new_tokens + max(self.lookahead - 1, 0)
        return longest > self.policy.cfg.max_position_embeddings

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Policy layers that the draft reads."""
        return () if self.draft is None else self.draft.cfg.tap_layers

    def empty_cache(self, rows: int) -> PagedCache:
        """Pools and states of so many rows, none of which owns a page."""
        table = jnp.zeros((rows, *self.steps), jnp.int32)
        dense = self.policy.empty_cache(rows, max(self.capacity, self.prompt_room), self.lookahead)
        return paged(dense, self.pages, self.slots.page, table)

    def empty_draft(self, context: Context) -> Any:
        """The draft's state for requests with this context; () without a draft."""
        if self.draft is None:
            return ()
        return self.draft.empty_state(context.history.shape[0], self.capacity, context)

    @cached_property
    def layer_dims(self) -> Any:
        """Where the rows are in the policy's states; pools have none."""
        return row_dims(lambda rows: self.empty_cache(rows).layers)

    def draft_dims(self, context: Context) -> Any:
        """Where the rows are in the draft's states."""
        return row_dims(
            lambda rows: self.empty_draft(Context(*(jnp.zeros((rows, x.shape[1]), jnp.int32) for x in context)))
        )


class Table(NamedTuple):
    """The requests, which no turn changes. Rows from `known` on are empty."""

    prompts: jax.Array  # i32[N, >= L]
    lengths: jax.Array  # i32[N]
    limits: jax.Array  # i32[N] new tokens at most, 1..M
    until: jax.Array  # i32[N] number of the first request after it that has another prompt
    begins: jax.Array  # i32[N] number of the first request of each group of neighbours with one prompt; N after them
    group: jax.Array  # i32[N] number of the group of each request
    keys: jax.Array  # key[N]
    uniforms: jax.Array  # f32[N, positions, 3]
    context: Context
    options: OptionRows | None  # None: the engine's sampling and stop ids for all
    known: jax.Array  # i32[]

    @property
    def count(self) -> int:
        """N."""
        return self.lengths.shape[0]


class Slots(NamedTuple):
    """Rows that decode."""

    request: jax.Array  # i32[S] number in the table; N: empty
    newest: jax.Array  # i32[S] the newest token
    cache: PagedCache  # with the pools
    draft: Any


class Staging(NamedTuple):
    """Rows in which prompts are read. What the draft reads with a token is the one after it, so of the last token it
    is told when a request's first one is drawn."""

    first: jax.Array  # i32[P] request it is read for, and those after it up to `until`; N: empty
    until: jax.Array  # i32[P]
    length: jax.Array  # i32[P] tokens to be read
    position: jax.Array  # i32[P] tokens read so far
    cache: PagedCache  # without the pools (`without_pools`)
    draft: Any
    logits: jax.Array  # f32[P, V] of the token after the prompt, once it is read
    taps: jax.Array  # [P, A] at the last token read
    hidden: jax.Array  # [P, D] there
    experts: jax.Array | None  # i16[P, tokens, layers with experts, k]; None: not recorded


class Starts(NamedTuple):
    """Which slots get which requests."""

    slots: jax.Array  # bool[S]
    request: jax.Array  # i32[S]
    row: jax.Array  # i32[S] staging row in which its prompt was read


class Ends(NamedTuple):
    """How far requests with options of their own are from their ends, at their numbers, as their tokens are."""

    reason: jax.Array  # i32[N] stopping.NOT_ENDED or why a response is over
    stop_state: jax.Array  # i32[N] of the stop strings; not read before the first token is there


class State(NamedTuple):
    """What a turn changes."""

    out: Response
    stats: Stats
    log: ExpertLog | None
    aborted: jax.Array  # bool[N]
    ends: Ends | None  # None: requests have no options of their own
    slots: Slots
    staging: Staging
    owners: jax.Array  # i32[Q]
    started: jax.Array  # i32[] requests before this one have had a slot or were aborted: they start in order
    staged: jax.Array  # i32[] the prompts of requests before this one have had a row
    turn: jax.Array  # i32[]
    control: Control
    ledger: Ledger


def open_table(work: Work, request: Request, known: Int32[Array, ""] | None = None) -> Table:
    """The requests of a call, or the first `known` of them and room for others.

    Where positions could run out, a request gets at most as many tokens as have one (`stopping.allowed_tokens`).

    Raises:
        UserError: a prompt that fills the capacity leaves the policy no position for a token.
    """
    count, given = request.prompts.shape
    prompts = jnp.pad(request.prompts, ((0, 0), (0, max(work.prompt_room + 1 - given, 0))))
    limits = jnp.full((count,), work.shape.max_new_tokens, jnp.int32)
    if request.max_tokens is not None:
        limits = jnp.clip(request.max_tokens, 1, limits)
    if work.beyond_context:
        positions = work.policy.cfg.max_position_embeddings
        require_room([work.shape.prompt_capacity], positions, work.lookahead)
        limits = allowed_tokens(request.prompt_lengths, limits, positions, work.lookahead)
    uniforms = request_uniforms(request.keys, work.capacity + 1)
    table = Table(
        prompts=prompts,
        lengths=request.prompt_lengths,
        limits=limits,
        until=jnp.zeros((count,), jnp.int32),
        begins=jnp.zeros((count,), jnp.int32),
        group=jnp.zeros((count,), jnp.int32),
        keys=request.keys,
        uniforms=uniforms,
        context=request.context,
        options=request.options,
        known=jnp.int32(count) if known is None else known,
    )
    return _grouped(work, table)


def submit(work: Work, table: Table, request: Request) -> Table:
    """The table with these requests after those it has; the caller sees to it that there is room for them.

    Siblings are numbers of rows in the table. What is staged or decoding is not touched. Either all requests of a table
    have options of their own or none has, with as many columns for stop ids.
    """
    if (table.options is None) != (request.options is None):
        raise ValueError(
            "options must be None for all requests of a table or for none; give the first ones options too"
        )
    new = open_table(work, request)
    rows = table.known + jnp.arange(new.count, dtype=jnp.int32)
    known = jnp.minimum(table.known + new.count, table.count)
    both = jax.tree.map(
        lambda old, more: old.at[rows].set(more, mode="drop"), table._replace(known=()), new._replace(known=())
    )
    return _grouped(work, both._replace(known=known))


def _grouped(work: Work, table: Table) -> Table:
    """With its groups: which neighbours begin alike, with the same prompt and the same texts for a draft to look at."""
    number = jnp.arange(table.count, dtype=jnp.int32)
    ends = number + 1 >= table.known
    if work.slots.share_prefixes:
        real = jnp.arange(table.prompts.shape[1])[None, :] < table.lengths[:, None]
        prompts = jnp.where(real, table.prompts, 0)
        beginning = jnp.concatenate([table.lengths[:, None], prompts, table.context.history], axis=1)
        ends |= jnp.any(beginning != jnp.roll(beginning, -1, axis=0), axis=1)
    else:
        ends |= True
    until = jax.lax.cummin(jnp.where(ends, number + 1, table.count), reverse=True)
    starts = jnp.roll(ends, 1).at[0].set(True)
    group = jnp.cumsum(starts.astype(jnp.int32)) - 1
    begins = jnp.full_like(number, table.count).at[jnp.where(starts, group, table.count)].set(number, mode="drop")
    return table._replace(until=until, begins=begins, group=group)


def open_state(work: Work, table: Table, control: Control | None = None) -> State:
    """Nothing has begun; what earlier calls learnt of the draft is in `control`."""
    rule = work.slots.speculation
    count, width = table.count, work.shape.max_new_tokens + work.lookahead + 1
    slots, rows = work.slots.slots, work.slots.prompts_at_once
    zeros = jnp.zeros((count,), jnp.int32)
    out = Response(
        tokens=jnp.full((count, width), work.shape.pad_id, jnp.int32),
        logprobs=jnp.zeros((count, width), jnp.float32),
        count=zeros,
        stopped=jnp.zeros((count,), bool),
    )
    log, staged_experts = _open_log(work, count)
    nobody = lambda n: jnp.full((n,), count, jnp.int32)  # noqa: E731
    nothing = lambda n: jnp.zeros((n,), jnp.int32)  # noqa: E731
    empty = lambda n: work.empty_draft(_no_texts(table.context, n))  # noqa: E731
    return State(
        out=out,
        stats=Stats(zeros, zeros, zeros, jnp.zeros((count, work.lookahead), jnp.int32)),
        log=log,
        aborted=jnp.zeros((count,), bool),
        ends=None if table.options is None else Ends(jnp.full((count,), NOT_ENDED, jnp.int32), zeros),
        slots=Slots(nobody(slots), nothing(slots), work.empty_cache(slots), empty(slots)),
        staging=Staging(
            first=nobody(rows),
            until=nobody(rows),
            length=nothing(rows),
            position=nothing(rows),
            cache=without_pools(work.empty_cache(rows)),
            draft=empty(rows),
            **_nothing_read(work, rows),
            experts=staged_experts,
        ),
        owners=unowned(work.pages),
        started=jnp.int32(0),
        staged=jnp.int32(0),
        turn=jnp.int32(0),
        control=start(rule, jax.random.key(0)) if control is None else control,
        ledger=open_ledger(rule),
    )


def _nothing_read(work: Work, rows: int) -> dict[str, Array]:
    """Room for what a forward over prompts gives at their last tokens."""

    def forward() -> tuple[Array, Array, Array]:
        start = jnp.zeros((rows,), jnp.int32)
        step = work.policy.step(
            start[:, None], start, work.empty_cache(rows), tap_layers=work.tap_layers, lengths=start
        )
        return work.policy.logits(step.hidden[:, 0]), step.taps[:, 0], step.hidden[:, 0]

    shapes = jax.eval_shape(forward)
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in zip(("logits", "taps", "hidden"), shapes, strict=True)}


def _no_texts(context: Context, rows: int) -> Context:
    return Context(*(jnp.full((rows, x.shape[1]), -1, jnp.int32) for x in context))


def _open_log(work: Work, count: int) -> tuple[ExpertLog | None, Array | None]:
    """The log of all requests, and the ids of prompts being read; None for a policy without experts."""
    mixture = work.policy.cfg.mixture
    if mixture is None:
        if work.shape.record_experts:
            raise ValueError("record_experts=True must be used with a policy that has experts; set it to False")
        return None, None
    if not work.shape.record_experts:
        return ExpertLog(None, jnp.float32(0.0), jnp.int32(0)), None
    if mixture.router.num_experts > jnp.iinfo(jnp.int16).max:
        raise ValueError(f"num_experts={mixture.router.num_experts} must fit in int16; record_experts=False does")

    def ids() -> Array | None:
        tokens, start = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
        return work.policy.step(tokens, start, work.empty_cache(1), tap_layers=(), lengths=start).experts

    layers, chosen = jax.eval_shape(ids).shape[2:]
    rows = lambda n, width: jnp.full((n, width, layers, chosen), -1, jnp.int16)  # noqa: E731
    log = ExpertLog(rows(count, work.capacity), jnp.float32(0.0), jnp.int32(0))
    return log, rows(work.slots.prompts_at_once, work.prompt_room)


def over(table: Table, state: State) -> Bool[Array, " N"]:
    """Requests that get no further token, and rows without one."""
    unknown = jnp.arange(table.count, dtype=jnp.int32) >= table.known
    return state.out.stopped | (state.out.count >= table.limits) | state.aborted | unknown


def without_pools(cache: PagedCache) -> PagedCache:
    """The cache of rows that read and write the pools of other rows' cache."""
    nothing = jnp.zeros((0,), jnp.int8)
    strip = lambda node: PagedLayer(nothing, nothing) if is_paged(node) else node  # noqa: E731
    return cache._replace(layers=jax.tree.map(strip, cache.layers, is_leaf=is_paged))


def with_pools(cache: PagedCache, owner: PagedCache) -> PagedCache:
    """The cache with the pools of another."""
    lend = lambda own, other: other if is_paged(own) else own  # noqa: E731
    return cache._replace(layers=jax.tree.map(lend, cache.layers, owner.layers, is_leaf=is_paged))
