"""The way of the residual stream through all layers, one by one or in loops over stacked ones (`layer_runs`).

Both give the same: the last output, the taps, the mixers' states, and what layers with experts said of their routing.

Letters: R rows of T tokens, D width, A = taps * D, M layers with experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from draftco_jax.models.block import Block
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.layer_runs import Run
from pallas_kernels.manual_axes import cast, varying_axes

BlockCall = Callable[[Block, Array, Any, Array | None], tuple[Array, Any, Any]]
"""(module, input, state, replayed experts) -> output, state, what else is to be told (None: nothing)."""


class Way(NamedTuple):
    """What is done at each layer, and what is wanted of it."""

    block: BlockCall
    compute: ComputeConfig
    taps: tuple[int, ...]  # layers whose outputs are wanted
    experts: jax.Array | None  # i32[R, T, M, k] to be replayed


class Slots(NamedTuple):
    """The same for a program of slots that several stages run, each with other layers at them (`pipeline`)."""

    taps: jax.Array  # i32[n] where the output of each slot is kept; `kept` and above: nowhere
    kept: int  # outputs that are kept in all
    here: jax.Array  # bool[n] whether there is a layer; the stream passes a slot without one unchanged


class Walked(NamedTuple):
    """What came of it."""

    x: jax.Array  # [R, T, D]
    taps: tuple[jax.Array, ...]  # [R, T, D] each, without gradient
    states: tuple[Any, ...]  # in the order in which they were given
    said: Any  # arrays [M, ...]; None without experts

    @property
    def tapped(self) -> Float[Array, "R T A"]:
        """Taps side by side; A = 0 without any."""
        return jnp.concatenate(self.taps, axis=-1) if self.taps else self.x[..., :0]


def one_by_one(layers: Sequence[Block], way: Way, x: Float[Array, "R T D"], states: Sequence[Any] | None) -> Walked:
    """A call for each layer."""
    outputs, after, said = [], [], []
    for layer, module in enumerate(layers):
        weights, call = _as_function(module, way, in_scan=False)
        chosen = way.experts[:, :, len(said)] if way.experts is not None and module.routes else None
        x, state, more = call(weights, x, () if states is None else states[layer], chosen)
        outputs.append(x)
        after.append(state)
        said += [] if more is None else [more]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *said) if said else None
    return Walked(x, tuple(jax.lax.stop_gradient(outputs[layer]) for layer in way.taps), tuple(after), stacked)


def in_loops(
    runs: Sequence[Run],
    groups: Sequence[Sequence[Block]],
    way: Way,
    x: Float[Array, "R T D"],
    states: Sequence[Any] | None,
    slots: Slots | None = None,
) -> Walked:
    """A loop for each run; `groups` are the stacked blocks at the places of each; `slots` may say what is kept."""
    wanted = len(way.taps) if slots is None else slots.kept
    # One place for each tap and one that all other layers write to, so that the loop body is the same for all.
    kept = cast(jnp.zeros((wanted + 1, *x.shape), x.dtype), varying_axes(x))
    after, said, routed = [], [], 0
    for number, (run, group) in enumerate(zip(runs, groups, strict=True)):
        count = run.repeats * sum(module.routes for module in group)
        ids = None if way.experts is None or not count else way.experts[:, :, routed : routed + count]
        routed += count
        told = _Told(None if states is None else states[number], ids, slots)
        x, kept, left, more = _loop(run, group, way, (x, kept), told)
        after.append(left)
        said += [more] if count else []
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *said) if said else None
    return Walked(x, tuple(kept[:-1]), tuple(after), stacked)


class _Told(NamedTuple):
    """What one run is given beside the stream."""

    states: Any
    ids: jax.Array | None  # i32[R, T, M of the run, k]
    slots: Slots | None


def _loop(
    run: Run, group: Sequence[Block], way: Way, start: tuple[Array, Array], told: _Told
) -> tuple[Array, Array, Any, Any]:
    """The layers of one run: output, taps kept so far, states, what was said [M of the run, ...]."""
    parts = [_as_function(module, way, in_scan=True) for module in group]
    places = [place for place, module in enumerate(group) if module.routes]
    numbers = np.array([[run.layer(r, p) for p in range(run.period)] for r in range(run.repeats)])
    taps, here, tapped = _of_run(numbers, way, told.slots)
    ids = told.ids
    if ids is not None:
        ids = jnp.moveaxis(ids, 2, 0)
        ids = ids.reshape(run.repeats, len(places), *ids.shape[1:])

    def body(carry: tuple, step: tuple) -> tuple:
        x, kept = carry
        weights, states, ids, taps, here = step
        after, said = [], []
        for place, (_, call) in enumerate(parts):
            chosen = ids[places.index(place)] if ids is not None and place in places else None
            y, state, more = call(weights[place], x, () if states is None else states[place], chosen)
            x = y if here is None else jnp.where(here[place], y, x)
            if tapped:
                kept = kept.at[taps[place]].set(jax.lax.stop_gradient(x))
            after.append(state)
            said += [] if more is None else [more if here is None else _only_if(here[place], more)]
        return (x, kept), (tuple(after), tuple(said))

    steps = (tuple(weights for weights, _ in parts), told.states, ids, taps, here)
    (x, kept), (after, said) = jax.lax.scan(body, start, steps, length=run.repeats)
    if not said:
        return x, kept, after, None
    in_order = lambda *leaves: jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])  # noqa: E731
    return x, kept, after, jax.tree.map(in_order, *said)


def _of_run(numbers: np.ndarray, way: Way, slots: Slots | None) -> tuple[Array, Array | None, bool]:
    """Where the outputs of a run are kept and which layers are there, [repeats, period], and if any output is kept."""
    if slots is not None:
        taps = jnp.minimum(slots.taps[numbers], slots.kept)
        return taps, slots.here[numbers], slots.kept > 0
    taps = np.vectorize(lambda layer: way.taps.index(layer) if layer in way.taps else len(way.taps))(numbers)
    return jnp.asarray(taps, jnp.int32), None, bool((taps < len(way.taps)).any())


def _only_if(here: Array, said: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(here, leaf, jnp.zeros_like(leaf)), said)


def _as_function(module: Block, way: Way, *, in_scan: bool) -> tuple[Any, Callable[..., tuple[Array, Any, Any]]]:
    """A block's weights apart from its call, as loops and rematerialisation need them."""
    graph, weights = nnx.split(module)
    return weights, way.compute.kept(
        lambda weights, *rest: way.block(nnx.merge(graph, weights), *rest), in_scan=in_scan
    )
