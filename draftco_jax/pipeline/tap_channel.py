"""The tap channel: target features go in one hop from the stage that makes them to the stage where the draft trains.

A feature is the output of a tapped layer, or the policy's final state. It travels beside the pipeline's own traffic:
nothing that the next stage waits for depends on it, and no gradient comes back. Two placements of the draft:

    all_stages   micro-batch m trains on stage m mod S. Once the S micro-batches of a group have passed the last stage,
                 stages exchange what they hold: for each distance d = 1 .. S - 1, stage s sends stage s + d the
                 features it made of that stage's micro-batch. Each feature crosses the network once, and no stage
                 receives more than any other. The ranks of the tensor axis hold the same features, so they take turns:
                 T groups are a round, rank t exchanges and trains on the t-th of them, and a draft that is whole on
                 every rank is still computed once a micro-batch.
    last_stage   every micro-batch trains on the last stage. Each source stage sends its features straight there.

When a feature is sent:

    direct       all_stages: a round later, beside the ticks of the next round; last_stage: in the tick that made it,
                 into a ring of slots on the receiver
    hold         just before it is used; the source keeps it until then
    post         after all ticks: every feature is kept (memory grows with M), the oracle

Depths follow from the schedule (`mailbox`), and one slot less is too few. With `stamps` each slot also holds the number
of its micro-batch, sent by the same route; a reader counts those that are not what it expects.

Two more modes are baselines to compare with, not for training: `relay` and `host` (modules `relay`, `host_staging`).

Source: 2609.07108 (TapChannel, Eq. 5: bytes = features * activation, once each).

Letters: S stages, V chunks, K virtual stages, T tensor ranks, M micro-batches, F features, J features that a virtual
stage may make, R rows of L tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from draftco_jax.pipeline.layout import StageLayout
from draftco_jax.pipeline.schedule import Schedule
from draftco_jax.pipeline.staged import tap_slots
from pallas_kernels.manual_axes import fresh, varying_axes

Placement = Literal["all_stages", "last_stage"]
TapMode = Literal["direct", "hold", "post"]
Baseline = Literal["relay", "host"]

TAPS_SCOPE = "tap_channel"
"""In the name of every operation that moves features between stages."""

NO_STAMP = -1


@dataclass(frozen=True)
class TapPlan:
    """Which features are made where, and by which route they go."""

    layout: StageLayout
    schedule: Schedule
    taps: tuple[int, ...]
    """Tapped layers, low to high: features 0 .. len(taps) - 1. The last feature is the final state."""
    placement: Placement = "all_stages"
    mode: TapMode | Baseline = "direct"
    stamps: bool = False
    depth_change: int = 0
    """Added to every depth: -1 is the negative control of the tests."""
    tensor_axis: str | None = None
    """all_stages: the axis whose ranks train on a group of micro-batches each; None: every rank trains on all."""
    tensor_ranks: int = 1
    """T, its size."""

    def __post_init__(self) -> None:
        """Refuse baselines where they do not go."""
        if self.mode in get_args(Baseline) and (self.placement != "last_stage" or self.layout.chunks > 1):
            raise ValueError(
                f"mode={self.mode} must have placement=last_stage and chunks=1, not {self.placement} and "
                f"{self.layout.chunks}; use direct"
            )
        if self.tensor_ranks > 1 and (self.tensor_axis is None or self.placement != "all_stages"):
            raise ValueError(
                f"tensor_ranks={self.tensor_ranks} must be 1 with tensor_axis={self.tensor_axis} and "
                f"placement={self.placement}; name the axis, with placement=all_stages"
            )

    @property
    def features(self) -> int:
        """F: taps, and the final state."""
        return len(self.taps) + 1

    @cached_property
    def made_at(self) -> tuple[int, ...]:
        """The virtual stage of each feature."""
        return (*(self.layout.stage_of(layer) for layer in self.taps), self.layout.virtual_stages - 1)

    @cached_property
    def slots(self) -> tuple[np.ndarray, int]:
        """`staged.tap_slots` of the taps: where a virtual stage keeps them, and how many at most (J - 1)."""
        return tap_slots(self.layout, self.taps)

    @cached_property
    def of_stage(self) -> tuple[tuple[int, ...], ...]:
        """[S] the features that a stage makes, over all its chunks."""
        stages = self.layout.stages
        return tuple(tuple(f for f, k in enumerate(self.made_at) if k % stages == s) for s in range(stages))

    @cached_property
    def widest(self) -> int:
        """Most features of a stage."""
        return max(map(len, self.of_stage))

    @cached_property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """all_stages: (distance, features) of each permute of an exchange."""
        counts = sorted({len(features) for features in self.of_stage} - {0})
        return tuple((distance, count) for distance in range(1, self.layout.stages) for count in counts)

    @cached_property
    def positions(self) -> Int32[np.ndarray, "K J"]:
        """Where what a virtual stage makes goes among the features of its stage; `widest`: nowhere."""
        found = np.full((self.layout.virtual_stages, self.slots[1] + 1), self.widest, np.int32)
        for k in range(self.layout.virtual_stages):
            own = self.of_stage[k % self.layout.stages]
            taps = [f for f in range(len(self.taps)) if self.made_at[f] == k]
            found[k, : len(taps)] = [own.index(f) for f in taps]
            if k == self.layout.virtual_stages - 1:
                found[k, -1] = own.index(self.features - 1)
        return found

    @cached_property
    def made_by(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(virtual stage, its features) of all that make any."""
        return tuple((k, tuple(f for f in range(self.features) if self.made_at[f] == k))
                     for k in sorted(set(self.made_at)))  # fmt: skip

    @cached_property
    def waiting(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Those whose features wait in a ring: all, but the last one where its features are used at once."""
        return self.made_by if self.late else self.made_by[:-1]

    def own_features(self, virtual_stage: int, made: Letter) -> Letter:
        """What a virtual stage makes, out of the J that every one keeps: its taps, and on the last the final state."""
        taps = sum(1 for f in range(len(self.taps)) if self.made_at[f] == virtual_stage)
        letter = made.pick(slice(0, taps))
        if virtual_stage != self.layout.virtual_stages - 1:
            return letter
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), letter, made.pick(slice(-1, None)))

    def depth(self, virtual_stage: int) -> int:
        """last_stage: slots of the ring in which features of a virtual stage wait for the last one's forward.

        min(S, K - 1 - k), the ticks in between; with hold they leave a tick earlier.
        """
        between = self.layout.virtual_stages - 1 - virtual_stage - (self.mode == "hold")
        return max(min(self.layout.stages, between) + self.depth_change, 1)

    @property
    def round_size(self) -> int:
        """S T, the micro-batches of a round."""
        return self.layout.stages * self.tensor_ranks

    @cached_property
    def round_ends(self) -> Int[np.ndarray, " n"]:
        """all_stages: tick in which each round has passed the last virtual stage; the last one need not be full."""
        size, total = self.round_size, self.schedule.microbatches
        last = np.append(np.arange(size, total, size), total) - 1
        return self.schedule.forward_ticks[last, -1]

    @cached_property
    def held_depth(self) -> int:
        """all_stages: slots of a stage's ring, so that none is written again before its round is sent.

        Read off the schedule: the smallest d with forward(m + d, k) after the round of m is through, for all m and k.
        """
        total = self.schedule.microbatches
        if self.late:
            return max(total + self.depth_change, 1)
        ends = self.round_ends[np.arange(total) // self.round_size]
        safe = lambda d: (self.schedule.forward_ticks[d:] > ends[: total - d, None]).all()  # noqa: E731
        proven = next(d for d in range(1, total + 1) if d == total or safe(d))
        return max(proven + self.depth_change, 1)

    @property
    def late(self) -> bool:
        """Whether the draft trains after all ticks."""
        return self.mode == "post" or (self.placement == "all_stages" and self.schedule.name == "gpipe")


class Ring(NamedTuple):
    """Features of the last few micro-batches, micro-batch m in slot m mod depth; the slot after the last is trash."""

    data: jax.Array  # [depth + 1, n, R, L, D]
    stamps: jax.Array | None  # i32[depth + 1, n]

    @classmethod
    def empty(cls, depth: int, features: int, like: Float[Array, "R L D"], *, stamps: bool) -> Ring:
        """Zeros, stamped as nothing."""
        axes = varying_axes(like)
        data = fresh((depth + 1, features, *like.shape), 0, like.dtype, axes)
        return cls(data, fresh((depth + 1, features), NO_STAMP, jnp.int32, axes) if stamps else None)

    @property
    def depth(self) -> int:
        """Without the trash slot."""
        return self.data.shape[0] - 1

    def read(self, microbatch: Int[Array, ""]) -> Letter:
        """What its slot holds."""
        slot = microbatch % self.depth
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), Letter(*self))

    def write(self, microbatch: Int[Array, ""], letter: Letter, active: Array) -> Ring:
        """All features of a micro-batch; to the trash where not active."""
        slot = jnp.where(active, microbatch % self.depth, self.depth)
        put = lambda ring, x: lax.dynamic_update_index_in_dim(ring, x, slot, 0)  # noqa: E731
        return Ring(*jax.tree.map(put, Letter(*self), letter))

    def write_some(self, microbatch: Int[Array, ""], letter: Letter, at: Int[Array, " J"], active: Array) -> Ring:
        """Some features of a micro-batch, each at its position; positions past the last are nowhere."""
        slot = jnp.where(active, microbatch % self.depth, self.depth)
        put = lambda ring, x: ring.at[slot, at].set(x, mode="drop")  # noqa: E731
        return Ring(*jax.tree.map(put, Letter(*self), letter))


class Letter(NamedTuple):
    """What is sent: features, and the number of their micro-batch."""

    data: jax.Array  # [n, R, L, D]
    stamps: jax.Array | None  # i32[n]

    @classmethod
    def of(cls, made: tuple[Array, ...], microbatch: Int[Array, ""], *, stamps: bool) -> Letter:
        """Of features just made."""
        data = jnp.stack(made)
        return cls(data, jnp.broadcast_to(microbatch, (len(made),)).astype(jnp.int32) if stamps else None)

    def pick(self, which: Any) -> Letter:
        """Some of its features."""
        return jax.tree.map(lambda x: x[which], self)

    def send(self, axis: str, pairs: list[tuple[int, int]]) -> Letter:
        """To other stages; stages that nothing is sent to get zeros."""
        with jax.named_scope(TAPS_SCOPE):
            return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), self)

    def wrong(self, microbatch: Int[Array, ""]) -> Int[Array, ""]:
        """How many stamps are not this micro-batch's; 0 without stamps."""
        if self.stamps is None:
            return jnp.zeros_like(microbatch)
        return jnp.sum(self.stamps != microbatch, dtype=jnp.int32)


class Tick(NamedTuple):
    """What a tick's forwards are, on every stage."""

    microbatch: jax.Array  # i32[S]
    chunk: jax.Array  # i32[S]
    active: jax.Array  # bool[S]
    due: jax.Array  # i32[] micro-batch of the last virtual stage's forward in the next tick; -1 for none


class Spread(NamedTuple):
    """all_stages: what this stage has made of the last micro-batches."""

    held: Ring

    @classmethod
    def empty(cls, plan: TapPlan, like: Float[Array, "R L D"]) -> Spread:
        """Before the first tick."""
        return cls(Ring.empty(plan.held_depth, plan.widest, like, stamps=plan.stamps))

    def keep(self, plan: TapPlan, tick: Tick, made: Letter, stage: Array) -> Spread:
        """This tick's features [J, ...] go to their places."""
        k = tick.chunk[stage] * plan.layout.stages + stage
        at = jnp.asarray(plan.positions)[k]
        return Spread(self.held.write_some(tick.microbatch[stage], made, at, tick.active[stage]))

    def send(self, plan: TapPlan, number: Int[Array, ""], axis: str) -> tuple[Letter, ...]:
        """Each feature of a round in one hop to the stage of its micro-batch: this stage's own, and what arrives.

        Stages with equally many features send in one permute for each distance, so that features are sent and nothing
        else.
        """
        stages, stage = plan.layout.stages, lax.axis_index(axis)
        first = first_of_group(plan, number)
        letters = [self.held.read(first + stage)]
        for distance, count in plan.hops:
            letter = self.held.read(first + (stage + distance) % stages)
            pairs = [(s, (s + distance) % stages) for s in range(stages) if len(plan.of_stage[s]) == count]
            letters.append(letter.pick(slice(0, count)).send(axis, pairs))
        return tuple(letters)


def first_of_group(plan: TapPlan, number: Int[Array, ""]) -> Int[Array, ""]:
    """The first micro-batch of this tensor rank's group in a round; of the last round some may have none."""
    turn = 0 if plan.tensor_axis is None else lax.axis_index(plan.tensor_axis)
    return (number * plan.tensor_ranks + turn) * plan.layout.stages


def sort_features(plan: TapPlan, letters: tuple[Letter, ...], axis: str) -> Letter:
    """All features [F, ...] of this stage's micro-batch in their order, from what `Spread.send` gave."""
    stages, stage = plan.layout.stages, lax.axis_index(axis)
    own = jnp.asarray(_padded(plan.of_stage, plan.widest, plan.features))
    mine, *arrived = letters
    box = jax.tree.map(lambda x: jnp.zeros_like(jnp.broadcast_to(x[:1], (plan.features, *x.shape[1:]))), mine)
    put = lambda box, ids, letter: jax.tree.map(lambda b, x: b.at[ids].set(x, mode="drop"), box, letter)  # noqa: E731
    box = put(box, own[stage], mine)
    for (distance, count), letter in zip(plan.hops, arrived, strict=True):
        source = (stage - distance) % stages
        sends = jnp.array([len(features) == count for features in plan.of_stage])[source]
        box = put(box, jnp.where(sends, own[source, :count], plan.features), letter)
    return box


class OnLast(NamedTuple):
    """last_stage: features on their way, a ring for each virtual stage that makes some and is not the last.

    Its slots are on the receiver (direct) or on the source (hold, post).
    """

    boxes: tuple[Ring, ...]
    arrived: tuple[Letter, ...]  # hold: what was sent for the next tick

    @classmethod
    def empty(cls, plan: TapPlan, like: Float[Array, "R L D"]) -> OnLast:
        """Before the first tick."""
        depth = lambda k: plan.schedule.microbatches if plan.late else plan.depth(k)  # noqa: E731
        boxes = [Ring.empty(depth(k), len(found), like, stamps=plan.stamps) for k, found in plan.waiting]
        first = jnp.int32(0)
        return cls(tuple(boxes), tuple(box.read(first) for box in boxes) if plan.mode == "hold" else ())

    def due(self, plan: TapPlan, tick: Tick, made: Letter, axis: str) -> Letter:
        """direct and hold: all features [F, ...] of the micro-batch that the last virtual stage has in this tick."""
        del axis
        m = tick.microbatch[plan.layout.stages - 1]
        letters = self.arrived if plan.mode == "hold" else tuple(box.read(m) for box in self.boxes)
        return put_together(plan, (*letters, plan.own_features(plan.layout.virtual_stages - 1, made)))

    def collect(self, plan: TapPlan, microbatch: Int[Array, ""], axis: str) -> Letter:
        """post: all features [F, ...] of a micro-batch."""
        return put_together(plan, self.fetch(plan, microbatch, axis))

    def after(self, plan: TapPlan, tick: Tick, made: Letter, axis: str) -> OnLast:
        """This tick's features [J, ...] are sent (direct), or kept where they are (hold, post).

        Direct: one single-pair permute a source. Stages that are not the receiver write zeros into rings that nobody
        reads, since all run one program.
        """
        stages, boxes = plan.layout.stages, []
        for (k, _), box in zip(plan.waiting, self.boxes, strict=True):
            source, letter = k % stages, plan.own_features(k, made)
            if plan.mode == "direct" and source != stages - 1:
                letter = letter.send(axis, [(source, stages - 1)])
            active = tick.active[source] & (tick.chunk[source] == k // stages)
            boxes.append(box.write(tick.microbatch[source], letter, active))
        kept = self._replace(boxes=tuple(boxes))
        if plan.mode != "hold":
            return kept
        # Sources before the last but one send what they had before this tick: nothing in it is waited for.
        early = [box if k < plan.layout.virtual_stages - 2 else new
                 for (k, _), box, new in zip(plan.waiting, self.boxes, boxes, strict=True)]  # fmt: skip
        return kept._replace(arrived=OnLast(tuple(early), ()).fetch(plan, jnp.maximum(tick.due, 0), axis))

    def fetch(self, plan: TapPlan, microbatch: Int[Array, ""], axis: str) -> tuple[Letter, ...]:
        """hold and post: the features of a micro-batch, from where they are kept to the last stage."""
        last, letters = plan.layout.stages - 1, []
        for (k, _), box in zip(plan.waiting, self.boxes, strict=True):
            letter, source = box.read(microbatch), k % plan.layout.stages
            letters.append(letter if source == last else letter.send(axis, [(source, last)]))
        return tuple(letters)


def put_together(plan: TapPlan, letters: tuple[Letter, ...]) -> Letter:
    """All features [F, ...] in their order, from the virtual stages that make them."""
    order = np.argsort([f for _, found in plan.made_by for f in found])
    whole = jax.tree.map(lambda *xs: jnp.concatenate(xs), *letters)
    return whole if (order == np.arange(plan.features)).all() else whole.pick(order)


def _padded(rows: tuple[tuple[int, ...], ...], width: int, fill: int) -> Int32[np.ndarray, "S width"]:
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows], np.int32)
