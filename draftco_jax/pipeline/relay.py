"""Baseline: features travel with the activation, one stage a tick, until they are where the draft trains.

A stage adds what it made to what it received and passes it on, so a feature of stage s crosses S - 1 - s links and not
one, and the hops of every tick grow by it. No ring is needed: a feature arrives in the tick that uses it. One chunk a
stage, the draft on the last stage.

Letters: S stages, F features, J features that a virtual stage may make, R rows of T tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from draftco_jax.pipeline.tap_channel import NO_STAMP, Letter, TapPlan, Tick
from pallas_kernels.manual_axes import fresh, varying_axes


class Relay(NamedTuple):
    """What has come from the stage before."""

    carried: Letter  # [F, R, T, D]; features of later stages are zeros

    @classmethod
    def empty(cls, plan: TapPlan, like: Float[Array, "R T D"]) -> Relay:
        """Before the first tick."""
        axes = varying_axes(like)
        data = fresh((plan.features, *like.shape), 0, like.dtype, axes)
        return cls(Letter(data, fresh((plan.features,), NO_STAMP, jnp.int32, axes) if plan.stamps else None))

    def due(self, plan: TapPlan, tick: Tick, made: Letter, axis: str) -> Letter:
        """All features [F, ...] of the micro-batch that the last stage has in this tick."""
        del tick
        return self._filled(plan, made, axis)

    def after(self, plan: TapPlan, tick: Tick, made: Letter, axis: str) -> Relay:
        """Everything made so far goes one stage on.

        Links that carry equally many features share a permute, so that features are sent and nothing else.
        """
        del tick
        filled, carried = self._filled(plan, made, axis), jax.tree.map(jnp.zeros_like, self.carried)
        loads, receiver = link_loads(plan), lax.axis_index(axis) - 1
        for load in sorted(set(loads) - {0}):
            links = [s for s, own in enumerate(loads) if own == load]
            arrived = filled.pick(slice(0, load)).send(axis, [(s, s + 1) for s in links])
            here = jnp.isin(receiver, jnp.array(links, jnp.int32))
            carried = jax.tree.map(
                lambda old, new, here=here, load=load: old.at[:load].set(jnp.where(here, new, old[:load])),
                carried,
                arrived,
            )
        return Relay(carried)

    def _filled(self, plan: TapPlan, made: Letter, axis: str) -> Letter:
        """With what this stage made."""
        at = jnp.asarray(_places(plan))[lax.axis_index(axis)]
        return jax.tree.map(lambda box, new: box.at[at].set(new, mode="drop"), self.carried, made)


def link_loads(plan: TapPlan) -> tuple[int, ...]:
    """[S - 1] features that go over the link from stage s to s + 1: those of stages 0 .. s."""
    return tuple(sum(made <= s for made in plan.made_at[:-1]) for s in range(plan.layout.stages - 1))


def _places(plan: TapPlan) -> Int32[np.ndarray, "S J"]:
    """Number of each feature that a stage makes; F: nowhere."""
    found = np.full((plan.layout.stages, plan.slots[1] + 1), plan.features, np.int32)
    for s, own in enumerate(plan.of_stage):
        taps = [f for f in own if f < len(plan.taps)]
        found[s, : len(taps)] = taps
    found[-1, -1] = plan.features - 1
    return found
