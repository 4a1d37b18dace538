"""The pipeline: one program for all stages, a tick at a time, with its own backward.

In a tick every stage runs at most one forward F and one backward B of a chunk, then outputs go one stage on and
gradients one stage back (`schedule`). B makes the chunk again from its saved input and takes the vector-Jacobian
product at once, so what is kept between ticks is inputs, as many as the schedule says, and not what lies inside the
layers: memory does not grow with the number of micro-batches. Three scans go through the ticks: F, F and B, B.

    receive dy, of the virtual stage after      (permute of the last tick's dx)
    F   x = embedding on the first virtual stage, else received; saved; y, features = chunk(x)
    send y to the virtual stage after, features where they are wanted
    B   x = saved; y, vjp = chunk; on the last virtual stage the loss gives dy; dw, dx = vjp(dy)

Everything runs inside one `shard_map`. Weights are typed as varying over all axes that micro-batches differ over, so
that no gradient is summed before the end. No permute stands under a condition that differs between stages; the head of
the last stage stands under one, with collectives of the tensor axis alone.

Letters: S stages, V chunks, K virtual stages, M micro-batches, R rows of T tokens of a micro-batch, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from draftco_jax.pipeline.host_staging import HostStaging
from draftco_jax.pipeline.relay import Relay
from draftco_jax.pipeline.schedule import Phase, Schedule
from draftco_jax.pipeline.tap_channel import Letter, OnLast, Spread, TapPlan, Tick, first_of_group, sort_features
from pallas_kernels.manual_axes import cast, varying_axes

Tree = Any
Channel = Spread | OnLast | Relay | HostStaging


class Chunk(NamedTuple):
    """What a chunk of layers makes of one micro-batch."""

    y: jax.Array  # [R, T, D]
    taps: tuple[jax.Array, ...]  # [R, T, D] each; none where they were not asked for
    penalty: jax.Array | None  # f32[] a term of the loss that the layers themselves have
    sums: Tree  # statistics that micro-batches add up


class Head(NamedTuple):
    """What the last virtual stage makes of its output."""

    sums: Tree
    maxima: Tree


@dataclass(frozen=True)
class StageProgram:
    """The model as the pipeline sees it; `m` is a traced micro-batch, `k` a traced virtual stage."""

    weights: Tree
    """Of all chunks of this stage, arrays [V, ...]."""
    embedding: jax.Array
    head_params: Tree
    embed: Callable[[Array], Array]
    """m -> x"""
    embedding_gradient: Callable[[Array, Array, Array, Array], Array]
    """(sum so far, m, dx, whether) -> sum"""
    chunk: Callable[..., Chunk]
    """(weights of one chunk, x, m, k, with_taps=...) -> Chunk"""
    head: Callable[[Tree, Array, Array, Array | None], tuple[Array, Head]]
    """(head_params, y, m, part) -> loss, what is logged. `part` None: y [R, T, D] is all of the micro-batch; else y
    [n, D] is that part of its R T tokens cut into S of n, padded at the end"""
    draft: Callable[[Array, Array], Tree] | None = None
    """(features [F, R, T, D], m) -> what micro-batches add up: loss, gradients, statistics"""


class PipelineResult(NamedTuple):
    """Sums over the micro-batches that this device worked on; over stages they are still to be summed."""

    weights: Tree  # gradients, f32[V, ...]
    embedding: jax.Array
    head: Tree
    head_sums: Tree
    head_maxima: Tree
    chunk_sums: Tree  # [V, ...]
    draft: Tree  # None without a draft
    wrong_stamps: jax.Array  # i32[]


class _Turns(NamedTuple):
    """The forwards or backwards of a tick: arrays [S], or a stage's own."""

    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array
    active: jax.Array


class _Row(NamedTuple):
    """One tick of the schedule, and what the tap channel is told of it."""

    forward: _Turns
    backward: _Turns
    due: jax.Array


class _Carry(NamedTuple):
    """What goes from tick to tick on a device."""

    x: jax.Array  # received
    dx: jax.Array  # made in the last tick, not sent yet
    inputs: jax.Array  # [slots + 1, R, T, D]
    result: PipelineResult
    channel: Channel | None


HeadPlacement = Literal["all_stages", "last_stage"]


def run_pipeline(
    program: StageProgram,
    plan: TapPlan,
    *,
    axis: str,
    axes: frozenset[str],
    head_placement: HeadPlacement = "last_stage",
) -> PipelineResult:
    """All ticks of one update, on each device of a shard_map.

    Args:
        program: the model.
        plan: schedule, layout, and the route of the features.
        axis: mesh axis of the stages.
        axes: all mesh axes that micro-batches and stages differ over; what the draft gives differs over the plan's
            tensor axis too.
        head_placement: last_stage: the last stage alone makes the loss, and in a tick all others wait for it.
            all_stages: its output goes to all stages, a part of the tokens each, and their gradients come back.
    """
    return _Pipeline(program, plan, axis, axes, head_placement).run()


@dataclass(frozen=True)
class _Pipeline:
    program: StageProgram
    plan: TapPlan
    axis: str
    axes: frozenset[str]
    head_placement: HeadPlacement

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.schedule.virtual_stages - 1

    @property
    def draft_axes(self) -> frozenset[str]:
        """All mesh axes that what the draft trains on differs over."""
        return self.axes if self.plan.tensor_axis is None else self.axes | {self.plan.tensor_axis}

    def run(self) -> PipelineResult:
        carry, rounds, sent = self._start(), 0, None
        in_rounds = isinstance(carry.channel, Spread) and not self.plan.late
        ends = self.plan.round_ends
        for phase in self._stretches(ends) if in_rounds else self.schedule.phases:
            if in_rounds and self.plan.mode == "direct" and rounds == len(ends) and sent is None:
                sent = self._send(carry, jnp.int32(rounds - 1))  # beside the ticks that are left
            rows = self._rows(phase)
            through = int(((ends >= phase.start) & (ends < phase.stop)).sum()) if in_rounds else 0
            if through:
                carry = self._rounds(carry, rows, phase, range(rounds, rounds + through))
            else:
                carry, _ = lax.scan(partial(self._tick, phase=phase), carry, rows)
            rounds += through
        return self._train_late(carry, sent)

    def _stretches(self, ends: np.ndarray) -> list[Phase]:
        """The phases, cut anew: ticks of a kind up to the end of a round; rounds of equal length are one stretch.

        The first round is one by itself: nothing is sent in its ticks.
        """
        found: list[Phase] = []
        through = [int(end) + 1 for end in ends]
        for _, same in groupby(self.schedule.phases, key=lambda phase: phase[2:]):
            phases = list(same)
            start, stop = phases[0].start, phases[-1].stop
            cuts = sorted({start, stop} | {tick for tick in through if start < tick < stop})
            kind = lambda cut: (cut[1] - cut[0], cut[1] in through, cut[1] == through[0])  # noqa: E731
            for _, equal in groupby(pairwise(cuts), key=kind):
                ticks = list(equal)
                found.append(phases[0]._replace(start=ticks[0][0], stop=ticks[-1][1]))
        return found

    def _start(self) -> _Carry:
        program, plan = self.program, self.plan
        m = cast(jnp.int32(0), self.axes)
        act = _zeros_of(jax.eval_shape(program.embed, m))
        out = jax.eval_shape(partial(program.chunk, with_taps=False), self._chunk(m), act, m, m)
        head = jax.eval_shape(lambda y: program.head(program.head_params, y, m, None), act)[1]
        over_chunks = lambda s: jnp.zeros_like(jnp.broadcast_to(s, (self.schedule.chunks, *s.shape)))  # noqa: E731
        channel, drafted = None, None
        if program.draft is not None:
            channel = _kind_of(plan).empty(plan, act)
            features = jnp.zeros_like(jnp.broadcast_to(act, (plan.features, *act.shape)))
            trained = cast(features, self.draft_axes), cast(m, self.draft_axes)
            drafted = _zeros_of(jax.eval_shape(program.draft, *trained))
        gradients = lambda tree: jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), tree)  # noqa: E731
        result = PipelineResult(
            weights=gradients(program.weights),
            embedding=gradients(program.embedding),
            head=gradients(program.head_params),
            head_sums=_zeros_of(head.sums),
            head_maxima=_zeros_of(head.maxima),
            chunk_sums=jax.tree.map(over_chunks, _zeros_of(out.sums)),
            draft=drafted,
            wrong_stamps=cast(jnp.int32(0), self.draft_axes),
        )
        inputs = jnp.zeros_like(jnp.broadcast_to(act, (self.schedule.slots + 1, *act.shape)))
        return _Carry(act, act, inputs, result, channel)

    # ---- one tick ----

    def _tick(self, carry: _Carry, row: _Row, *, phase: Phase) -> tuple[_Carry, None]:
        dy = self._hop(carry.dx, -1) if phase.backward else None
        if phase.forward:
            carry = self._forward(carry, row, phase)
        if dy is not None:
            carry = self._backward(carry, row.backward, dy, phase)
        return carry, None

    def _forward(self, carry: _Carry, row: _Row, phase: Phase) -> _Carry:
        program, mine = self.program, self._mine(row.forward)
        m, k = mine.microbatch, self._virtual_stage(mine)
        x = jnp.where(k == 0, program.embed(m), carry.x)
        out = program.chunk(self._chunk(mine.chunk), x, m, k, with_taps=program.draft is not None)
        inputs = lax.dynamic_update_index_in_dim(carry.inputs, x, mine.slot, 0)
        carry = carry._replace(inputs=inputs, x=self._hop(out.y, +1))
        if program.draft is None:
            return carry
        made = Letter.of((*out.taps, out.y), m, stamps=self.plan.stamps)
        return self._features(carry, row, made, phase)

    def _features(self, carry: _Carry, row: _Row, made: Letter, phase: Phase) -> _Carry:
        """What the tap channel does with this tick's features; on the last stage the draft trains at once."""
        plan, channel = self.plan, carry.channel
        tick = Tick(row.forward.microbatch, row.forward.chunk, row.forward.active, row.due)
        if isinstance(channel, Spread):
            return carry._replace(channel=channel.keep(plan, tick, made, lax.axis_index(self.axis)))
        assert channel is not None
        ticks = slice(phase.start, phase.stop)
        trains = self.schedule.forward.active[ticks, -1] & (
            self.schedule.forward.chunk[ticks, -1] == plan.layout.chunks - 1
        )
        if trains.any() and not plan.late:
            mine = self._mine(row.forward)
            here = mine.active & (self._virtual_stage(mine) == self.last)
            letter = channel.due(plan, tick, made, self.axis)
            carry = carry._replace(result=self._train(carry.result, letter, mine.microbatch, here))
        return carry._replace(channel=channel.after(plan, tick, made, self.axis))

    def _backward(self, carry: _Carry, turns: _Turns, dy: Array, phase: Phase) -> _Carry:
        mine = self._mine(turns)
        program, result, m, ok = self.program, carry.result, mine.microbatch, mine.active
        k = self._virtual_stage(mine)
        x = lax.dynamic_index_in_dim(carry.inputs, mine.slot, 0, keepdims=False)

        def chunk(weights: Tree, x: Array) -> tuple[tuple[Array, Array | None], Tree]:
            out = program.chunk(weights, x, m, k, with_taps=False)
            return (out.y, out.penalty), out.sums

        (y, penalty), vjp, sums = jax.vjp(chunk, self._chunk(mine.chunk), x, has_aux=True)
        if phase.head:
            last = ok & (k == self.last)
            on_all = self.head_placement == "all_stages" and self.schedule.stages > 1
            head, dhead, dy_of_loss = self._spread_head(turns, y) if on_all else self._head(last, y, m)
            dy = jnp.where(last, dy_of_loss, dy)
            result = result._replace(
                head=_add(result.head, dhead),
                head_sums=_add(result.head_sums, head.sums),
                head_maxima=jax.tree.map(jnp.maximum, result.head_maxima, head.maxima),
            )
        dpenalty = None if penalty is None else jnp.where(ok, jnp.ones_like(penalty), jnp.zeros_like(penalty))
        dweights, dx = vjp((dy, dpenalty))
        add = lambda total, g: total.at[mine.chunk].add(_only_if(ok, g).astype(total.dtype))  # noqa: E731
        # The hops must end before what only some stages do, or on the others they would hide behind nothing.
        x_next, dx = lax.optimization_barrier((carry.x, dx))
        result = result._replace(
            weights=jax.tree.map(add, result.weights, dweights),
            chunk_sums=jax.tree.map(add, result.chunk_sums, sums),
            embedding=program.embedding_gradient(result.embedding, m, dx, ok & (k == 0)),
        )
        return carry._replace(x=x_next, dx=dx, result=result)

    def _head(self, last: Array, y: Array, m: Array) -> tuple[Head, Tree, Array]:
        """Loss on the last virtual stage: what is logged, gradients of the head, dy; zeros elsewhere."""

        def there(y: Array) -> tuple[Head, Tree, Array]:
            loss_of = jax.value_and_grad(self.program.head, argnums=(0, 1), has_aux=True)
            (_, head), (dhead, dy) = loss_of(self.program.head_params, y, m, None)
            return head, dhead, dy

        return lax.cond(last, there, lambda y: _zeros_of(jax.eval_shape(there, y)), y)

    def _spread_head(self, turns: _Turns, y: Array) -> tuple[Head, Tree, Array]:
        """The same of this stage's part of the last virtual stage's tokens; dy is that of all of them.

        Every stage has the whole head, for its draft. Its cost on the way of a tick falls by S, for two hops of one
        activation.
        """
        stage, last = lax.axis_index(self.axis), self.schedule.stages - 1
        m, tokens = turns.microbatch[last], y.shape[0] * y.shape[1]
        part = -(-tokens // self.schedule.stages)
        spare = part * self.schedule.stages - tokens

        def there(y: Array) -> tuple[Head, Tree, Array]:
            flat = jnp.pad(y.reshape(tokens, -1), ((0, spare), (0, 0)))
            # One stage adds a token and the others zeros: exact in any dtype.
            mine = lax.psum_scatter(_only_if(stage == last, flat), self.axis, scatter_dimension=0, tiled=True)
            loss_of = jax.value_and_grad(self.program.head, argnums=(0, 1), has_aux=True)
            (_, head), (dhead, dmine) = loss_of(self.program.head_params, mine, m, stage)
            dy = lax.all_gather(dmine, self.axis, tiled=True)
            return head, dhead, dy[:tokens].reshape(y.shape)

        # The condition is the same on all devices.
        trains = turns.active[last] & (turns.chunk[last] == self.schedule.chunks - 1)
        return lax.cond(trains, there, lambda y: _zeros_of(jax.eval_shape(there, y)), y)

    # ---- the draft ----

    def _rounds(self, carry: _Carry, rows: _Row, phase: Phase, rounds: range) -> _Carry:
        """all_stages: the ticks of each round; then every device trains on its micro-batch of it, or of the one before.

        Training on the one before leaves the exchange all ticks of a round to hide behind.
        """
        direct = self.plan.mode == "direct"
        by_round = jax.tree.map(lambda table: table.reshape(len(rounds), -1, *table.shape[1:]), rows)

        def body(carry: _Carry, step: tuple[Array, _Row]) -> tuple[_Carry, None]:
            number, rows = step
            sent = self._send(carry, number - 1) if direct and rounds.start else None
            carry, _ = lax.scan(partial(self._tick, phase=phase), carry, rows)
            if not direct:
                own = self._own(self._send(carry, number), number)
                return carry._replace(result=self._train(carry.result, *own)), None
            if sent is None:
                return carry, None
            sent, carry = self._after(sent, carry)
            return carry._replace(result=self._train(carry.result, *self._own(sent, number - 1))), None

        steps = jnp.arange(rounds.start, rounds.stop, dtype=jnp.int32), by_round
        return _scan_of_one(body, carry, steps) if len(rounds) == 1 else lax.scan(body, carry, steps)[0]

    def _send(self, carry: _Carry, number: Array) -> tuple[Letter, ...]:
        """The features of a round go to where they are trained on."""
        assert isinstance(carry.channel, Spread)
        return carry.channel.send(self.plan, number, self.axis)

    def _after(self, sent: tuple[Letter, ...], carry: _Carry) -> tuple[tuple[Letter, ...], _Carry]:
        """The same; nothing of what was sent is read before the ticks that led to `carry` are over.

        Otherwise it would be put in order before them, and would have to arrive at once. The tie is a gradient: every
        backward changes it, and it is used later. One of the features' own type, since all that a barrier ties together
        comes out as varying over all their axes; where no weight has it, the order is the compiler's, and the same
        numbers come out.
        """
        axes = varying_axes(sent[0].data)
        leaves, tree = jax.tree.flatten(carry.result.weights)
        tie = next((i for i, leaf in enumerate(leaves) if varying_axes(leaf) == axes), None)  # norms are not split
        if tie is None:
            return sent, carry
        sent, leaves[tie] = lax.optimization_barrier((sent, leaves[tie]))
        return sent, carry._replace(result=carry.result._replace(weights=jax.tree.unflatten(tree, leaves)))

    def _own(self, sent: tuple[Letter, ...], number: Array) -> tuple[Letter, Array, Array]:
        """This device's micro-batch of a round: its features, its number, and whether there is one."""
        m = first_of_group(self.plan, number) + lax.axis_index(self.axis)
        return sort_features(self.plan, sent, self.axis), m, m < self.schedule.microbatches

    def _train_late(self, carry: _Carry, sent: tuple[Letter, ...] | None) -> PipelineResult:
        """What is left to train on when all ticks are over; `sent`: the last round, if that is all."""
        plan, channel, rounds = self.plan, carry.channel, len(self.plan.round_ends)
        if isinstance(channel, Spread) and plan.late:
            step = lambda result, n: (self._train(result, *self._own(self._send(carry, n), n)), None)  # noqa: E731
            return lax.scan(step, carry.result, jnp.arange(rounds, dtype=jnp.int32))[0]
        if isinstance(channel, Spread) and plan.mode == "direct":
            last = jnp.int32(rounds - 1)
            sent, carry = (self._send(carry, last), carry) if sent is None else self._after(sent, carry)
            return self._train(carry.result, *self._own(sent, last))
        if isinstance(channel, OnLast) and plan.late:
            step = partial(self._train_on_last, channel)
            return lax.scan(step, carry.result, jnp.arange(self.schedule.microbatches))[0]
        return carry.result

    def _train_on_last(self, channel: OnLast, result: PipelineResult, m: Array) -> tuple[PipelineResult, None]:
        """post: one micro-batch after the other."""
        here = cast(lax.axis_index(self.axis) == self.schedule.stages - 1, self.axes)
        return self._train(result, channel.collect(self.plan, m, self.axis), m, here), None

    def _train(self, result: PipelineResult, letter: Letter, m: Array, here: Array) -> PipelineResult:
        """The draft's loss and gradients of one micro-batch, added where `here`."""
        assert self.program.draft is not None
        drafted = _only_if(here, self.program.draft(letter.data, m))
        wrong = result.wrong_stamps + _only_if(here, letter.wrong(m))
        return result._replace(draft=_add(result.draft, drafted), wrong_stamps=wrong)

    # ---- small parts ----

    def _rows(self, phase: Phase) -> _Row:
        """Tables of the ticks of a phase."""
        schedule, ticks = self.schedule, slice(phase.start, phase.stop)
        work = schedule.forward
        on_last = work.active[:, -1] & (work.chunk[:, -1] == schedule.chunks - 1)
        due = np.append(np.where(on_last, work.microbatch[:, -1], -1)[1:], -1).astype(np.int32)
        cut = lambda table: jnp.asarray(table[ticks])  # noqa: E731
        return _Row(_Turns(*map(cut, work)), _Turns(*map(cut, schedule.backward)), cut(due))

    def _mine(self, turns: _Turns) -> _Turns:
        """This stage's part of a tick."""
        stage = lax.axis_index(self.axis)
        return jax.tree.map(lambda table: table[stage], turns)

    def _virtual_stage(self, mine: _Turns) -> Array:
        return mine.chunk * self.schedule.stages + lax.axis_index(self.axis)

    def _chunk(self, chunk: Array) -> Tree:
        """Weights of one chunk."""
        if self.schedule.chunks == 1:
            return jax.tree.map(lambda leaf: leaf[0], self.program.weights)
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, chunk, 0, keepdims=False), self.program.weights)

    def _hop(self, x: Array, step: int) -> Array:
        """One stage on or back; with several chunks the ends are joined."""
        stages = self.schedule.stages
        pairs = [(s, (s + step) % stages) for s in range(stages) if self.schedule.chunks > 1 or 0 <= s + step < stages]
        with jax.named_scope("stage_hop"):
            return lax.ppermute(x, self.axis, pairs) if pairs else x


def _scan_of_one(body: Callable[[_Carry, Any], tuple[_Carry, None]], carry: _Carry, steps: Any) -> _Carry:
    """A scan of one step that stays a loop in the compiled program: how often it runs is not told to the compiler.

    A loop that is known to run once would be taken apart, and its parts ordered with all that surrounds them: exchanges
    no longer lie beside ticks only, and what two rounds need lives at one time.
    """
    once = lax.optimization_barrier(jnp.int32(1))
    step = jax.tree.map(lambda table: table[0], steps)
    run = lambda state: (state[0] + 1, body(state[1], step)[0])  # noqa: E731
    with jax.named_scope("loop_of_1"):  # for those who count what runs (`pallas_kernels.hlo_text`)
        return lax.while_loop(lambda state: state[0] < once, run, (jnp.int32(0), carry))[1]


def _kind_of(plan: TapPlan) -> type[Channel]:
    """By which route features go."""
    if plan.placement == "all_stages":
        return Spread
    return {"relay": Relay, "host": HostStaging}.get(plan.mode, OnLast)


def _add(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _only_if(here: Array, tree: Tree) -> Tree:
    """Zeros elsewhere, also for what is not finite."""
    return jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree)


def _zeros_of(shapes: Tree) -> Tree:
    """Zeros of these shapes, dtypes and types."""
    return jax.tree.map(lambda s: cast(jnp.zeros(s.shape, s.dtype), s.manual_axis_type.varying), shapes)
