"""Generate: one jitted program per call, plain or speculative, with static shapes and no host round trip.

    plain         prefill, then one token per step
    speculative   prefill, then rounds of propose (k drafts), verify (one target forward over k + 1 tokens), commit

Requests of a batch advance by their own accepted lengths. Nothing is copied to roll back: caches continue from an
earlier position (`models.kv_cache`). A request's tokens depend on its own key, prompt and weights only, unless a budget
(`decoding.budget`) makes requests share what is verified.

What proposes is a draft of any family (`drafts.base.Draft`): the loop knows its state by name only.

Letters: B requests, L prompt capacity, M new-token capacity, k drafts, r = k + 1 rows of a verify block, V vocabulary,
D width, A taps width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from draftco_jax.decoding.budget import limit, round_uniforms
from draftco_jax.decoding.control import Control
from draftco_jax.decoding.cost_table import CostTable, Setting
from draftco_jax.decoding.experts import ExpertLog, log_step, open_log
from draftco_jax.decoding.options import check_options
from draftco_jax.decoding.records import (
    RULES,
    EngineShape,
    Request,
    Response,
    Stats,
    Verified,
    assemble,
    committed_tokens,
    is_stop,
)
from draftco_jax.decoding.round_cost import measure_rounds
from draftco_jax.decoding.serving import Served, serve, work_of
from draftco_jax.decoding.sharded import Devices
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.stopping import StopTable
from draftco_jax.decoding.streaming import Progressed, Streaming
from draftco_jax.decoding.tree_rounds import play_tree
from draftco_jax.drafts.base import Context, Draft, Features, Shared, TreeCall, borrowed, given_back
from draftco_jax.models.compute import FloatName
from draftco_jax.models.functional import ModelGraph
from draftco_jax.models.kv_cache import Cache
from draftco_jax.models.transformer import Decoder
from draftco_jax.numerics.rows import pick, row_at, slice_rows, update_rows
from draftco_jax.numerics.sampling import ACCEPT, COMMIT, PROPOSE, SamplingConfig, draw, log_law, request_uniforms
from draftco_jax.types import Rollouts

Weights = Any  # parameter tree in the rollout layout


def generate_plain(
    graphs: tuple[ModelGraph, None], weights: tuple[Weights, None], request: Request, *, shape: EngineShape,
    sampling: SamplingConfig,
) -> Rollouts:  # fmt: skip
    """Plain decoding: one target forward per token."""
    policy: Decoder = graphs[0].merge(weights[0])
    uniforms = _uniforms(request, shape, 0)
    logits, _, cache, log = _prefill(policy, request, shape, 0, ())
    newest, out = _first_token(logits, uniforms, request, shape, sampling, 0)

    def running(carry: tuple) -> Bool[Array, ""]:
        return ~jnp.all(_done(carry[2], shape))

    def body(carry: tuple) -> tuple:
        newest, cache, out, step, log = carry
        position, live = request.prompt_lengths + out.count - 1, ~_done(out, shape)
        active = live[:, None]
        hidden, _, cache, ids = policy.step(newest[:, None], position, cache, tap_layers=(), active=active)
        log = log_step(log, ids, position, active, policy.cfg.mixture)
        laws = log_law(policy.logits(hidden[:, 0]), sampling)
        uniform = slice_rows(uniforms, position + 1, 1)[:, 0, COMMIT]
        newest = draw(jnp.exp(laws), uniform)
        out = Response(
            # Every live row writes the same column; finished rows write past their count.
            tokens=jax.lax.dynamic_update_slice(out.tokens, newest[:, None], (0, step)),
            logprobs=jax.lax.dynamic_update_slice(out.logprobs, pick(laws, newest)[:, None], (0, step)),
            count=out.count + live.astype(jnp.int32),
            stopped=out.stopped | (live & is_stop(newest, shape)),
        )
        return newest, cache, out, step + 1, log

    _, _, out, _, log = jax.lax.while_loop(running, body, (newest, cache, out, jnp.int32(1), log))
    return assemble(request, out, _no_stats(out, 0), log, shape)


def generate_speculative(
    graphs: tuple[ModelGraph, ModelGraph], weights: tuple[Weights, Weights], request: Request, *,
    shape: EngineShape, sampling: SamplingConfig, draft_length: int, draft_dtype: FloatName = "float32",
) -> Rollouts:  # fmt: skip
    """Speculative decoding; the output law is that of `generate_plain`, whatever the draft is."""
    policy: Decoder = graphs[0].merge(weights[0])
    draft: Draft = graphs[1].merge(weights[1])
    shared, k = Shared(*policy.tables(draft_dtype)), draft_length
    taps_of, tree = draft.cfg.tap_layers, shape.tree_of(k)
    ahead = k if tree is None else tree.drafted
    uniforms = _uniforms(request, shape, ahead)
    logits, prompt, cache, log = _prefill(policy, request, shape, ahead, taps_of)
    newest, out = _first_token(logits, uniforms, request, shape, sampling, k)
    state = draft.empty_state(newest.shape[0], _capacity(shape, ahead), request.context)
    state = draft.absorb(state, _prompt_features(request, prompt, newest).astype(draft_dtype), shared)
    stats = _no_stats(out, k)

    def running(carry: tuple) -> Bool[Array, ""]:
        return ~jnp.all(_done(carry[3], shape))

    def body(carry: tuple) -> tuple:
        newest, state, cache, out, stats, log = carry
        anchor = request.prompt_lengths + out.count - 1  # position of the newest committed token
        live, caches = ~_done(out, shape), (state, cache, log)
        if tree is not None:
            call = TreeCall(tree, newest, anchor, sampling, shared)
            verified, caches = play_tree((policy, draft), call, live, caches, (request.keys, stats.rounds))
        else:
            if shape.fresh_rounds:
                numbers = round_uniforms(request.keys, stats.rounds, k + 1)
            else:
                numbers = slice_rows(uniforms, anchor + 1, k + 1)
            call = LineCall(newest, anchor, live, numbers, sampling, shared)
            verified, caches = _play_line((policy, draft), call, caches, shape)
        state, cache, log = caches
        out, stats, count = _commit(out, stats, verified, shape)
        last = jnp.maximum(count - 1, 0)
        # The draft reads the TRUE target features of the verified indices, over whatever it guessed there.
        features = Features(verified.block, verified.tokens, verified.taps, verified.hidden, anchor, last)
        state = draft.absorb(state, features.astype(draft_dtype), shared)
        newest = jnp.where(count > 0, pick(verified.tokens, last), newest)
        return newest, state, cache, out, stats, log

    *_, out, stats, log = jax.lax.while_loop(running, body, (newest, state, cache, out, stats, log))
    return assemble(request, out, stats, log, shape)


class LineCall(NamedTuple):
    """What a round of drafts in a line is given."""

    newest: jax.Array  # i32[B]
    anchor: jax.Array  # i32[B]
    live: jax.Array  # bool[B] requests that still decode
    numbers: jax.Array  # f32[B, r, 3] uniforms
    sampling: SamplingConfig
    shared: Shared


def _play_line(
    models: tuple[Decoder, Draft],
    call: LineCall,
    caches: tuple[Any, Cache, ExpertLog | None],
    shape: EngineShape,
) -> tuple[Verified, tuple[Any, Cache, ExpertLog | None]]:
    """Propose, verify: what the round gives, and the draft's state, the cache and the log after it."""
    (policy, draft), (state, cache, log) = models, caches
    k = call.numbers.shape[1] - 1
    state = borrowed(draft, state, cache, call.live)
    proposal, state = draft.propose(
        state, call.newest, call.anchor, call.numbers[:, :k, PROPOSE], call.sampling, call.shared
    )
    state, cache = given_back(draft, state, cache)
    if shape.verify_budget is not None:
        proposal = limit(proposal, call.live, shape.verify_budget)
    drafts, q, proposed = proposal
    block = jnp.concatenate([call.newest[:, None], drafts], axis=1)
    active = call.live[:, None] & (jnp.arange(k + 1)[None, :] <= proposed[:, None])
    hidden, taps, cache, ids = policy.step(block, call.anchor, cache, tap_layers=draft.cfg.tap_layers, active=active)
    log = log_step(log, ids, call.anchor, active, policy.cfg.mixture)
    laws = log_law(policy.logits(hidden), call.sampling)
    verify = RULES[shape.verification]
    accepted, final = verify(jnp.exp(laws), q, drafts, call.numbers[:, :k, ACCEPT], call.numbers[:, :, COMMIT])
    tokens = committed_tokens(drafts, accepted, final)
    verified = Verified(tokens, pick(laws, tokens), accepted, proposed, block, taps, hidden)
    return verified, (state, cache, log)


class _Prompt(NamedTuple):
    """What the policy made of the padded prompts."""

    taps: jax.Array  # [B, L, A]
    hidden: jax.Array  # [B, L, D]


def _no_stats(out: Response, k: int) -> Stats:
    zeros = jnp.zeros_like(out.count)
    return Stats(zeros, zeros, zeros, jnp.zeros((zeros.shape[0], k), jnp.int32))


def _prefill(
    policy: Decoder, request: Request, shape: EngineShape, lookahead: int, tap_layers: tuple[int, ...]
) -> tuple[Float[Array, "B V"], _Prompt, Cache, ExpertLog | None]:
    """Run the padded prompts; logits at each prompt's last token, taps and states everywhere, caches filled.

    Capacity covers the last token a request may commit and a full block of drafts after it, so no write is clamped.
    """
    batch, capacity, lengths = request.prompts.shape[0], _capacity(shape, lookahead), request.prompt_lengths
    cache = policy.empty_cache(batch, capacity, lookahead)
    start = jnp.zeros((batch,), jnp.int32)
    active = jnp.arange(shape.prompt_capacity)[None, :] < lengths[:, None]
    hidden, taps, cache, ids = policy.step(
        request.prompts, start, cache, tap_layers=tap_layers, lengths=lengths, active=active
    )
    log = open_log(ids, policy.cfg.mixture, capacity, record=shape.record_experts)
    return policy.logits(row_at(hidden, lengths - 1)), _Prompt(taps, hidden), cache, log


def _first_token(
    logits: Float[Array, "B V"],
    uniforms: Float[Array, "B S 3"],
    request: Request,
    shape: EngineShape,
    sampling: SamplingConfig,
    lookahead: int,
) -> tuple[Int[Array, " B"], Response]:
    """The token sampled at prefill: it belongs to no verify round."""
    laws = log_law(logits, sampling)
    token = draw(jnp.exp(laws), slice_rows(uniforms, request.prompt_lengths, 1)[:, 0, COMMIT])
    batch, width = token.shape[0], shape.max_new_tokens + lookahead + 1
    out = Response(
        tokens=jnp.full((batch, width), shape.pad_id, jnp.int32).at[:, 0].set(token),
        logprobs=jnp.zeros((batch, width), jnp.float32).at[:, 0].set(pick(laws, token)),
        count=jnp.ones((batch,), jnp.int32),
        stopped=is_stop(token, shape),
    )
    return token, out


def _prompt_features(request: Request, prompt: _Prompt, newest: Int[Array, " B"]) -> Features:
    """The prompts as a draft absorbs them: the token after the last one is the newest."""
    last = request.prompt_lengths - 1
    following = jnp.concatenate([request.prompts[:, 1:], jnp.zeros_like(request.prompts[:, :1])], axis=1)
    at_last = jnp.arange(following.shape[1])[None, :] == last[:, None]
    following = jnp.where(at_last, newest[:, None], following)
    return Features(request.prompts, following, prompt.taps, prompt.hidden, jnp.zeros_like(last), last)


def _commit(
    out: Response,
    stats: Stats,
    verified: Verified,
    shape: EngineShape,
) -> tuple[Response, Stats, Int[Array, " B"]]:
    """Append a round's tokens up to the first stop token and the length limit; how many were committed."""
    live, (tokens, logprobs, accepted, proposed) = ~_done(out, shape), verified[:4]
    slots = jnp.arange(tokens.shape[1])[None, :]
    emitted = slots <= accepted[:, None]
    stops = emitted & is_stop(tokens, shape)
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, accepted + 1)
    count = jnp.where(live, jnp.minimum(until_stop, shape.max_new_tokens - out.count), 0).astype(jnp.int32)

    # Writing the whole block is safe: what lies after `count` is overwritten by the next round or never read.
    out = Response(
        tokens=update_rows(out.tokens, tokens, out.count),
        logprobs=update_rows(out.logprobs, logprobs, out.count),
        count=out.count + count,
        stopped=out.stopped | jnp.any(stops & (slots < count[:, None]), axis=1),
    )
    reached = (jnp.arange(tokens.shape[1] - 1)[None, :] < accepted[:, None]) & live[:, None]
    rounds, reached = live.astype(jnp.int32), reached.astype(jnp.int32)
    stats = Stats(
        stats.rounds + rounds, stats.committed + count, stats.proposed + rounds * proposed, stats.accepted + reached
    )
    return out, stats, count


def _capacity(shape: EngineShape, lookahead: int) -> int:
    return shape.prompt_capacity + shape.max_new_tokens + lookahead


def _uniforms(request: Request, shape: EngineShape, lookahead: int) -> Float[Array, "B S 3"]:
    return request_uniforms(request.keys, _capacity(shape, lookahead) + 1)


def _done(out: Response, shape: EngineShape) -> Bool[Array, " B"]:
    return out.stopped | (out.count >= shape.max_new_tokens)


class Engine:
    """Compiled generate programs for one policy and, where speculation is on, one draft.

    Weights are arguments of every call, so a publish changes no program. With `devices` requests and weights go over a
    mesh (`decoding.sharded`).
    """

    def __init__(
        self,
        policy_graph: ModelGraph,
        draft_graph: ModelGraph | None,
        *,
        shape: EngineShape,
        sampling: SamplingConfig,
        draft_dtype: FloatName = "float32",
        devices: Devices | None = None,
    ) -> None:
        self.shape = shape
        self.sampling = sampling
        self.devices = devices
        compiled = jax.jit if devices is None else partial(devices.compiled, policy=policy_graph, shape=shape)
        self._plain = compiled(partial(generate_plain, (policy_graph, None), shape=shape, sampling=sampling))
        slotted = partial(serve, (policy_graph, draft_graph), shape=shape, sampling=sampling, draft_dtype=draft_dtype)
        self._slotted = jax.jit(slotted, static_argnames=("slots",))
        self._slotted_rollouts = compiled(partial(_rollouts, slotted), static_argnames=("slots",))
        self._work = partial(
            work_of, (policy_graph, draft_graph), shape=shape, sampling=sampling, draft_dtype=draft_dtype
        )
        self._streaming = Streaming(
            (policy_graph, draft_graph), shape=shape, sampling=sampling, draft_dtype=draft_dtype
        )
        self._speculative = (
            None
            if draft_graph is None
            else compiled(
                partial(
                    generate_speculative,
                    (policy_graph, draft_graph),
                    shape=shape,
                    sampling=sampling,
                    draft_dtype=draft_dtype,
                ),
                static_argnames=("draft_length",),
            )
        )

    def generate(
        self,
        policy_weights: Weights,
        draft_weights: Weights | None,
        request: Request,
        draft_length: int = 0,
        slots: int | SlotShape | None = None,
        stop_table: StopTable | None = None,
    ) -> Rollouts:
        """Roll out the requests; draft_length 0 decodes plainly.

        Sampling and stop ids are the engine's, or each request's own (`Request.options`), which takes slots.

        Args:
            policy_weights: published policy tree.
            draft_weights: published draft tree; None when draft_length is 0.
            request: prompts i32[B, prompt_capacity], their lengths, and one key per request.
            draft_length: k, the number of tokens proposed per round.
            slots: requests that decode at the same time, the others wait for their turn (`decoding.serving`); a
                `SlotShape` says more, draft lengths included. None: all at once, and done when the last one is.
            stop_table: of the stop strings that the options of requests name (`decoding.options.prepare_options`).
        """
        if slots is not None:
            if isinstance(slots, int):
                slots = SlotShape(slots=slots, draft_lengths=(draft_length,))
            if draft_length not in slots.draft_lengths:
                raise ValueError(
                    f"draft_length={draft_length} must be one of draft_lengths={slots.draft_lengths} of the slots; "
                    "change one of them"
                )
            if self.devices is None:
                return self.serve(policy_weights, draft_weights, request, slots, stop_table=stop_table).rollouts
        self._check(request, slots, stop_table)
        if self.devices is not None:
            self.devices.check_request(request)
        if slots is not None:
            draft_weights = draft_weights if max(slots.draft_lengths) else None
            return self._slotted_rollouts((policy_weights, draft_weights), request, slots=slots)
        if draft_length == 0:
            return self._plain((policy_weights, None), request)
        if draft_length < 0 or self._speculative is None or draft_weights is None:
            raise ValueError(f"draft_length={draft_length} needs a draft and a length >= 0; use 0 for plain decoding")
        return self._speculative((policy_weights, draft_weights), request, draft_length=draft_length)

    def serve(
        self,
        policy_weights: Weights,
        draft_weights: Weights | None,
        request: Request,
        slots: SlotShape,
        control: Control | None = None,
        stop_table: StopTable | None = None,
    ) -> Served:
        """Roll out the requests through slots; the result holds what their rounds taught, for the next call.

        Args:
            policy_weights: published policy tree.
            draft_weights: published draft tree; not read where no length of `slots.draft_lengths` is above 0.
            request: as of `generate`.
            slots: sizes, draft lengths and the rule that chooses among them.
            control: of the call before, or of `control.start`; None: before any round, without a cost table.
            stop_table: as of `generate`.
        """
        self._check_one_device("serve")
        self._check(request, slots, stop_table)
        weights = policy_weights, draft_weights if max(slots.draft_lengths) else None
        return self._slotted(weights, request, slots=slots, control=control, stop_table=stop_table)

    def stream(
        self,
        policy_weights: Weights,
        draft_weights: Weights | None,
        request: Request,
        slots: SlotShape,
        *,
        known: int | None = None,
        turns: int = 32,
        stop_table: StopTable | None = None,
    ) -> Iterator[Progressed]:
        """Roll out the requests through slots, as `serve` does, and tell after every `turns` turns what is there.

        Args:
            policy_weights: published policy tree.
            draft_weights: published draft tree; not read where no length of `slots.draft_lengths` is above 0.
            request: of which the first `known` rows are requests and the others room that is not used.
            slots: sizes, draft lengths and the rule that chooses among them.
            known: None: all rows.
            turns: of the loop between two looks.
            stop_table: as of `generate`.
        """
        self._check_one_device("stream")
        self._check(request, slots, stop_table)
        weights = policy_weights, draft_weights if max(slots.draft_lengths) else None
        known = request.prompts.shape[0] if known is None else known
        return self._streaming.run(weights, request, slots=slots, known=known, turns=turns, stop_table=stop_table)

    def measure_rounds(
        self,
        policy_weights: Weights,
        draft_weights: Weights | None,
        context: Context,
        slots: SlotShape,
        setting: Setting,
        *,
        repeats: int = 5,
    ) -> CostTable:
        """Seconds of a round of each draft length of these slots, one row; `context` as of a request of each slot."""
        self._check_one_device("measure_rounds")
        self._refuse_tree()
        make = partial(self._work, slots=slots)
        return measure_rounds(make, (policy_weights, draft_weights), context, slots, setting, repeats=repeats)

    def _refuse_tree(self) -> None:
        """In slots, whose keys and values lie in pages, not compacted, and over a mesh, where heads are split."""
        if self.shape.tree is not None:
            raise ValueError(
                "verification=tree must be used without slots, on one device; leave slots and devices out, or verify "
                "token or block"
            )

    def _check(self, request: Request, slots: SlotShape | None, stop_table: StopTable | None) -> None:
        """Refuse, before anything runs, what the programs of these sizes cannot serve; None: the static ones."""
        if request.prompts.shape[1] != self.shape.prompt_capacity:
            raise ValueError(
                f"prompts are padded to {request.prompts.shape[1]} tokens but prompt_capacity="
                f"{self.shape.prompt_capacity}; pad to the capacity or raise it"
            )
        if slots is not None or self.devices is not None:
            self._refuse_tree()
        if slots is None:
            for name in ("max_tokens", "options"):
                if getattr(request, name) is not None:
                    raise ValueError(f"{name} of each request must be None without slots; give slots, or ask all alike")
        if slots is not None and request.options is not None:
            check_options(request.options, slots.filters, stop_table)
        elif stop_table is not None:
            raise ValueError("stop_table must come with the options of each request, which name its states; give both")

    def _check_one_device(self, call: str) -> None:
        if self.devices is not None:
            raise ValueError(
                f"{call} must have devices=None: what it keeps of the rounds is of one device; use generate over a mesh"
            )


def _rollouts(slotted: Callable[..., Served], weights: tuple, request: Request, *, slots: SlotShape) -> Rollouts:
    """Without what the rounds taught."""
    return slotted(weights, request, slots=slots).rollouts


def request_keys(key: Key[Array, ""], count: int) -> Key[Array, " B"]:
    """One key per request: fold_in(key, i), so that request i keeps its key in a larger or smaller batch."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def no_context(batch: int) -> Context:
    """The context of requests whose draft matches no texts."""
    return Context(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), jnp.int32))
