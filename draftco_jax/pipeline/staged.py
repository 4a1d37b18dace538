"""A policy cut into stages: the same blocks as ever, stacked as a `StageLayout` says, and the call of one chunk.

Embedding, final norm and head are whole on every stage; the first virtual stage reads the one, the last the others.

Letters: R rows of T tokens, D width, n slots, V chunks of a stage, M layers with experts, k experts a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from draftco_jax.models.block import Block
from draftco_jax.models.calls import PackedCall
from draftco_jax.models.compute import FLOAT32, ComputeConfig
from draftco_jax.models.layer_walk import Slots, Way, in_loops
from draftco_jax.models.moe_routing import RoutingSums, routing_sums
from draftco_jax.models.transformer import Decoder, DecoderConfig, stacked_block
from draftco_jax.pipeline.layout import NOTHING, StageLayout

Weights = Any
"""State tree of the blocks of one chunk, arrays [repeats, ...]."""


class StageOutput(NamedTuple):
    """What one chunk makes of one micro-batch."""

    x: jax.Array  # [R, T, D]
    taps: tuple[jax.Array, ...]  # [R, T, D] each, without gradient
    routing: RoutingSums | None  # arrays [slots with experts, ...]; zeros where there is no layer


class StagedDecoder(Decoder):
    """A `Decoder` whose blocks lie in `stages`, arrays [S V, repeats, ...] (inside a shard_map [V, repeats, ...])."""

    def __init__(
        self, cfg: DecoderConfig, layout: StageLayout, compute: ComputeConfig = FLOAT32, *, rngs: nnx.Rngs
    ) -> None:
        self.layout = layout
        super().__init__(cfg, compute, rngs=rngs)

    def _make_blocks(self, rngs: nnx.Rngs) -> None:
        layout = self.layout

        def block(place: int, first: int, repeats: int) -> Block:
            return stacked_block(self.cfg, layout.example(first + place), (layout.virtual_stages, repeats), rngs)

        groups = [[block(place, run.first, run.repeats) for place in range(run.period)] for run in layout.runs]
        self.stages = nnx.List([nnx.List(group) for group in groups])

    def chunk_weights(self) -> Weights:
        """Of all chunks of this stage, arrays [V, repeats, ...]."""
        return nnx.state(self.stages)

    def chunk(
        self,
        weights: Weights,
        x: Float[Array, "R T D"],
        call: PackedCall,
        slots: Slots,
        experts: Int[Array, "R T M k"] | None = None,
    ) -> StageOutput:
        """The layers of one chunk.

        Args:
            weights: of that chunk.
            x: output of the virtual stage before it.
            call: the micro-batch.
            slots: which layers are there, and which outputs are kept.
            experts: routing to be replayed at the slots with experts.
        """
        graph, _ = nnx.split(self.stages)
        counted = call.segment_ids > 0

        def block(module: Block, x: Array, state: tuple[()], chosen: Array | None) -> tuple[Array, tuple[()], Any]:
            x, routing = module(x, call, chosen)
            return x, state, None if routing is None else routing_sums(routing, counted)

        way = Way(block, self.compute, (), experts)
        walked = in_loops(self.layout.runs, nnx.merge(graph, weights), way, x, None, slots)
        return StageOutput(walked.x, walked.taps, walked.said)


class RoutedSlots(NamedTuple):
    """Where layers with experts lie."""

    slots: tuple[int, ...]  # with experts
    ranks: np.ndarray  # i32[K, slots with experts] which of the policy's layers with experts; 0 where there is none
    here: np.ndarray  # bool[K, slots with experts]
    layers: int  # of them in all

    @classmethod
    def of(cls, policy: StagedDecoder) -> RoutedSlots:
        """Read off the blocks of the policy."""
        layout = policy.layout
        routes: dict[int, bool] = {}
        for run, group in zip(layout.runs, policy.stages, strict=True):
            for place, module in enumerate(group):
                routes |= {slot: module.routes for slot in run.layers_at(place)}
        slots = tuple(slot for slot in range(len(layout.kinds)) if routes[slot])
        found: Int32[np.ndarray, "K m"] = layout.layers[:, slots]
        order = np.sort(found[found != NOTHING])
        ranks = np.where(found != NOTHING, np.searchsorted(order, found), 0).astype(np.int32)
        return cls(slots, ranks, found != NOTHING, len(order))


def tap_slots(layout: StageLayout, taps: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """i32[K, n] which of its taps each virtual stage keeps at each slot, and the most that one keeps.

    Taps of a virtual stage are numbered in the order of its layers; slots that are not kept hold a large number.
    """
    wanted = np.isin(layout.layers, np.array(taps, np.int32))
    numbers = np.cumsum(wanted, axis=1, dtype=np.int32) - 1
    most = int(wanted.sum(axis=1).max(initial=0))
    return np.where(wanted, numbers, np.int32(np.iinfo(np.int32).max)), most


def slots_of(layout: StageLayout, virtual_stage: Array, taps: np.ndarray | None, kept: int) -> Slots:
    """Of a virtual stage that differs over devices; `taps` as `tap_slots` gives them, None: nothing is kept."""
    here = jnp.asarray(layout.layers != NOTHING)[virtual_stage]
    if taps is None:
        return Slots(jnp.zeros(len(layout.kinds), jnp.int32), 0, here)
    return Slots(jnp.asarray(taps)[virtual_stage], kept, here)
