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


class Walked(NamedTuple):
    """What came of it."""

    x: jax.Array  # [R, T, D]
    taps: jax.Array  # [R, T, A] side by side, without gradient; A = 0 when nothing is tapped
    states: tuple[Any, ...]  # in the order in which they were given
    said: Any  # arrays [M, ...]; None without experts


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
    taps = jnp.concatenate([outputs[layer] for layer in way.taps], axis=-1) if way.taps else x[..., :0]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *said) if said else None
    return Walked(x, jax.lax.stop_gradient(taps), tuple(after), stacked)


def in_loops(
    runs: Sequence[Run],
    groups: Sequence[Sequence[Block]],
    way: Way,
    x: Float[Array, "R T D"],
    states: Sequence[Any] | None,
) -> Walked:
    """A loop for each run; `groups` are the stacked blocks at the places of each."""
    # One slot for each tap and one that all other layers write to, so that the loop body is the same for all.
    kept = cast(jnp.zeros((len(way.taps) + 1, *x.shape), x.dtype), varying_axes(x))
    after, said, routed = [], [], 0
    for number, (run, group) in enumerate(zip(runs, groups, strict=True)):
        count = run.repeats * sum(module.routes for module in group)
        ids = None if way.experts is None or not count else way.experts[:, :, routed : routed + count]
        routed += count
        x, kept, left, more = _loop(run, group, way, (x, kept), None if states is None else states[number], ids)
        after.append(left)
        said += [more] if count else []
    taps = jnp.concatenate(list(kept[:-1]), axis=-1) if way.taps else x[..., :0]
    stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *said) if said else None
    return Walked(x, taps, tuple(after), stacked)


def _loop(
    run: Run, group: Sequence[Block], way: Way, start: tuple[Array, Array], states: Any, ids: Array | None
) -> tuple[Array, Array, Any, Any]:
    """The layers of one run: output, taps kept so far, states, what was said [M of the run, ...]."""
    parts = [_as_function(module, way, in_scan=True) for module in group]
    places = [place for place, module in enumerate(group) if module.routes]
    slots = np.array([[_slot(run.layer(r, p), way.taps) for p in range(run.period)] for r in range(run.repeats)])
    tapped = bool((slots < len(way.taps)).any())
    if ids is not None:
        ids = jnp.moveaxis(ids, 2, 0)
        ids = ids.reshape(run.repeats, len(places), *ids.shape[1:])

    def body(carry: tuple, step: tuple) -> tuple:
        x, kept = carry
        weights, states, ids, slots = step
        after, said = [], []
        for place, (_, call) in enumerate(parts):
            chosen = ids[places.index(place)] if ids is not None and place in places else None
            x, state, more = call(weights[place], x, () if states is None else states[place], chosen)
            if tapped:
                kept = kept.at[slots[place]].set(jax.lax.stop_gradient(x))
            after.append(state)
            said += [] if more is None else [more]
        return (x, kept), (tuple(after), tuple(said))

    steps = (tuple(weights for weights, _ in parts), states, ids, jnp.asarray(slots, jnp.int32))
    (x, kept), (after, said) = jax.lax.scan(body, start, steps, length=run.repeats)
    if not said:
        return x, kept, after, None
    in_order = lambda *leaves: jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])  # noqa: E731
    return x, kept, after, jax.tree.map(in_order, *said)


def _as_function(module: Block, way: Way, *, in_scan: bool) -> tuple[Any, Callable[..., tuple[Array, Any, Any]]]:
    """A block's weights apart from its call, as loops and rematerialisation need them."""
    graph, weights = nnx.split(module)
    return weights, way.compute.kept(
        lambda weights, *rest: way.block(nnx.merge(graph, weights), *rest), in_scan=in_scan
    )


def _slot(layer: int, taps: tuple[int, ...]) -> int:
    return taps.index(layer) if layer in taps else len(taps)
