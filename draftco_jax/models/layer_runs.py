"""Layers of one kind stacked: how a stack of blocks is cut into loops, and the way between the two parameter trees.

    one by one   layers / 17 / self_attn / ...                    an array for each layer
    stacked      runs / 0 / 3 / self_attn / ...  [repeats, ...]   an array for each place in the pattern of a run

A run is a pattern of kinds that is repeated: Qwen3.5 is one run of (linear, linear, linear, full) x 10, GPT-OSS one of
(sliding, full) x 18, Nemotron-H, whose pattern changes on the way, several. Layer f + r p + j is repetition r of place
j of a run that begins at layer f and has p places.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


class Run(NamedTuple):
    """`repeats` times the `period` kinds from layer `first` on."""

    first: int
    period: int
    repeats: int

    def layer(self, repeat: int, place: int) -> int:
        """Number of a layer."""
        return self.first + repeat * self.period + place

    def layers_at(self, place: int) -> range:
        """Numbers of the layers that are stacked at a place."""
        return range(self.first + place, self.first + self.period * self.repeats, self.period)


def find_runs(kinds: Sequence[Hashable]) -> tuple[Run, ...]:
    """Runs that cover all layers in order; at each layer that one which leaves the fewest blocks to be compiled."""
    runs: list[Run] = []
    first = 0
    while first < len(kinds):
        best = Run(first, 1, 1)
        for period in range(1, (len(kinds) - first) // 2 + 1):
            pattern, repeats = kinds[first : first + period], 1
            while kinds[first + repeats * period : first + (repeats + 1) * period] == pattern:
                repeats += 1
            if (repeats - 1) * period > (best.repeats - 1) * best.period:
                best = Run(first, period, repeats)
        runs.append(best)
        first += best.period * best.repeats
    return tuple(runs)


def stack_layers(params: Params, runs: Sequence[Run]) -> Params:
    """From one by one to stacked. Works on arrays of jax and numpy."""
    layers = params["layers"]
    stacked = {
        number: {
            place: jax.tree.map(lambda *leaves: _stack(leaves), *(layers[layer] for layer in run.layers_at(place)))
            for place in range(run.period)
        }
        for number, run in enumerate(runs)
    }
    return {name: tree for name, tree in params.items() if name != "layers"} | {"runs": stacked}


def unstack_layers(params: Params, runs: Sequence[Run]) -> Params:
    """From stacked to one by one."""
    layers = {
        run.layer(repeat, place): jax.tree.map(lambda leaf, r=repeat: leaf[r], params["runs"][number][place])
        for number, run in enumerate(runs)
        for repeat in range(run.repeats)
        for place in range(run.period)
    }
    return {name: tree for name, tree in params.items() if name != "runs"} | {"layers": dict(sorted(layers.items()))}


def _stack(leaves: tuple[Any, ...]) -> Any:
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)
