"""Baseline, for benchmarks only: features go to host memory where they are made and come back where the draft trains.

Stages of one process share the memory; between hosts a network transfer would come on top. A count of what was staged
goes from stage to stage with the activation, so that nothing is read before it was written. One chunk a stage, the
draft on the last stage.

Letters: S stages, F features, R rows of T tokens, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jaxtyping import Array, Float

from draftco_jax.pipeline.tap_channel import TAPS_SCOPE, Letter, TapPlan, Tick, put_together
from pallas_kernels.manual_axes import cast, fresh, varying_axes


class HostMemory:
    """Letters by lane (place on the other mesh axes), stage and micro-batch, and how many bytes came and went."""

    def __init__(self) -> None:
        self.letters: dict[tuple[int, int, int], list[np.ndarray]] = {}
        self.bytes_in = self.bytes_out = 0

    def clear(self) -> None:
        """Forget everything."""
        self.letters.clear()
        self.bytes_in = self.bytes_out = 0

    def put(self, lane: Any, stage: Any, microbatch: Any, *arrays: Any) -> np.ndarray:
        """Keep copies; a letter that is there already was never read."""
        key = (int(lane), int(stage), int(microbatch))
        if key in self.letters:
            raise RuntimeError(f"letter={key} must be read before it is written again; clear() after a failed update")
        self.letters[key] = [np.array(array) for array in arrays]
        self.bytes_in += sum(array.nbytes for array in self.letters[key])
        return np.ones((), np.int32)

    def take(self, lane: Any, stage: Any, microbatch: Any) -> list[np.ndarray]:
        """Give them back, once."""
        arrays = self.letters.pop((int(lane), int(stage), int(microbatch)))
        self.bytes_out += sum(array.nbytes for array in arrays)
        return arrays


MEMORY = HostMemory()
"""Of this process: programs that are compiled with it share it, one update at a time."""


class HostStaging(NamedTuple):
    """What is known of the letters in host memory."""

    staged: jax.Array  # i32[] letters of the stages before this one: they are there

    @classmethod
    def empty(cls, plan: TapPlan, like: Float[Array, "R T D"]) -> HostStaging:
        """Before the first tick."""
        del plan
        return cls(fresh((), 0, jnp.int32, varying_axes(like)))

    def due(self, plan: TapPlan, tick: Tick, made: Letter, axis: str) -> Letter:
        """All features [F, ...] of the micro-batch that the last stage has in this tick."""
        last, axes = plan.layout.stages - 1, varying_axes(made.data)
        # Nothing is taken before the count says that it was put.
        m, _ = lax.optimization_barrier((cast(tick.microbatch[last], axes), self.staged))
        here = cast((lax.axis_index(axis) == last) & tick.active[last], axes)
        letters = [_take(k, m, here, plan.own_features(k, made), axis) for k, _ in plan.waiting]
        return put_together(plan, (*letters, plan.own_features(last, made)))

    def after(self, plan: TapPlan, tick: Tick, made: Letter, axis: str) -> HostStaging:
        """This tick's features go to host memory."""
        stages, axes, done = plan.layout.stages, varying_axes(made.data), self.staged
        for k, _ in plan.waiting:
            here = cast((lax.axis_index(axis) == k) & tick.active[k], axes)
            done = done + _put(k, cast(tick.microbatch[k], axes), here, plan.own_features(k, made), axis)
        with jax.named_scope(TAPS_SCOPE):
            return HostStaging(lax.ppermute(done, axis, [(s, s + 1) for s in range(stages - 1)]))


def _lane(axes: frozenset[str], axis: str) -> Array:
    """Which of the pipelines that run side by side this is."""
    others = tuple(sorted(axes - {axis}))
    return lax.axis_index(others) if others else jnp.int32(0)


def _put(stage: int, m: Array, here: Array, letter: Letter, axis: str) -> Array:
    """1 where a letter was put."""
    axes = varying_axes(letter.data)

    def there(m: Array, letter: Letter) -> Array:
        put = lambda lane, m, *arrays: MEMORY.put(lane, stage, m, *arrays)  # noqa: E731
        one = jax.ShapeDtypeStruct((), jnp.int32)
        return cast(io_callback(put, one, _lane(axes, axis), m, *jax.tree.leaves(letter)), axes)

    return lax.cond(here, there, lambda m, letter: jnp.zeros_like(m), m, letter)


def _take(stage: int, m: Array, here: Array, like: Letter, axis: str) -> Letter:
    """A letter from host memory; zeros elsewhere."""
    axes = varying_axes(like.data)
    leaves, tree = jax.tree.flatten(like)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def there(m: Array) -> list[Array]:
        found = io_callback(lambda lane, m: MEMORY.take(lane, stage, m), shapes, _lane(axes, axis), m)
        return [cast(leaf, axes) for leaf in found]

    nowhere = lambda m: [jnp.zeros_like(leaf) for leaf in leaves]  # noqa: E731
    return jax.tree.unflatten(tree, lax.cond(here, there, nowhere, m))
