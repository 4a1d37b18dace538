"""Which layers lie on which stage, and the one program that all stages run.

Virtual stage k = v * S + s is chunk v of stage s; virtual stages hold stretches of layers, in order. All stages run the
same program in lock step, ring and expert exchange included, so it must fit them all: its slots are a common
supersequence of the kinds of every virtual stage. Where a virtual stage has no layer for a slot, the stream passes it
unchanged. A uniform model has as many slots as its longest virtual stage; a hybrid has more only where stages cut its
pattern differently.

Parameters are stacked: `runs` of the slots (`models.layer_runs`) as in a scanned model, each array with one more
leading dim over virtual stages, in the order s * V + v, so that an even split of it over the stage axis gives each
stage its own.

Letters: S stages, V chunks of each, K = S V virtual stages, n slots, L layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from draftco_jax.models.layer_runs import Run, find_runs

Params = dict[str, Any]

NOTHING = -1
"""In a table of layers: a slot that a virtual stage leaves out."""


@dataclass(frozen=True)
class StageLayout:
    """Layers of each virtual stage, at the slots of the common program."""

    stages: int
    chunks: int
    kinds: tuple[Hashable, ...]
    """Of the slots."""
    table: tuple[tuple[int, ...], ...]
    """[K][n] number of the layer, or NOTHING."""

    @property
    def virtual_stages(self) -> int:
        """K."""
        return self.stages * self.chunks

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """How slots are stacked."""
        return find_runs(self.kinds)

    @cached_property
    def layers(self) -> Int32[np.ndarray, "K n"]:
        """The table as an array."""
        return np.array(self.table, np.int32)

    def entry(self, virtual_stage: int) -> int:
        """Place of a virtual stage in stacked arrays."""
        chunk, stage = divmod(virtual_stage, self.stages)
        return stage * self.chunks + chunk

    def stage_of(self, layer: int) -> int:
        """The virtual stage that holds a layer."""
        return int(np.argwhere(self.layers == layer)[0, 0])

    def example(self, slot: int) -> int:
        """A layer that lies at this slot somewhere: all of them have its shapes."""
        found = self.layers[:, slot]
        return int(found[found != NOTHING][0])


def split_layers(
    kinds: Sequence[Hashable], *, stages: int, chunks: int = 1, counts: Sequence[int] | None = None
) -> StageLayout:
    """Cut layers of these kinds into stages x chunks stretches.

    Args:
        kinds: of each layer.
        stages: S.
        chunks: V.
        counts: layers of each virtual stage, in order. None: as even as can be; what is left over goes to the first
            ones or the last ones, whichever gives the shorter program (the last stage also has the head).

    Raises:
        ValueError: fewer layers than virtual stages, or counts that do not cover them.
    """
    virtual = stages * chunks
    if stages < 1 or chunks < 1 or len(kinds) < virtual:
        raise ValueError(
            f"stages={stages} * chunks={chunks} must be from 1 to {len(kinds)}, the layers of the policy; use fewer"
        )
    if counts is not None:
        if len(counts) != virtual or sum(counts) != len(kinds) or min(counts) < 1:
            raise ValueError(
                f"layers_per_stage={tuple(counts)} must be {virtual} numbers >= 1 that add up to {len(kinds)}; "
                "leave it out for an even split"
            )
        return _laid_out(kinds, stages, chunks, counts)
    even, left = divmod(len(kinds), virtual)
    first = [even + (k < left) for k in range(virtual)]
    last = [even + (k >= virtual - left) for k in range(virtual)]
    return min((_laid_out(kinds, stages, chunks, c) for c in (first, last)), key=lambda layout: len(layout.kinds))


def to_stages(params: Params, layout: StageLayout) -> Params:
    """From layers one by one to stages. Works on arrays of jax and numpy; slots without a layer are zeros."""
    layers = params["layers"]
    order = [k for _, k in sorted((layout.entry(k), k) for k in range(layout.virtual_stages))]

    def stacked(run: Run, place: int) -> Any:
        slots = run.layers_at(place)
        found = [[layout.table[k][slot] for slot in slots] for k in order]
        pick = [[layers[x if x != NOTHING else layout.example(slots[0])] for x in row] for row in found]
        flat = jax.tree.map(lambda *leaves: _stack(leaves), *(tree for row in pick for tree in row))
        here = np.array(found) != NOTHING
        return jax.tree.map(lambda leaf: _masked(leaf.reshape(*here.shape, *leaf.shape[1:]), here), flat)

    stages = {i: {p: stacked(run, p) for p in range(run.period)} for i, run in enumerate(layout.runs)}
    return {name: tree for name, tree in params.items() if name != "layers"} | {"stages": stages}


def from_stages(params: Params, layout: StageLayout) -> Params:
    """From stages to layers one by one."""
    places = {run.layer(r, p): (i, p, r) for i, run in enumerate(layout.runs) for p in range(run.period)
              for r in range(run.repeats)}  # fmt: skip
    layers = {}
    for k, row in enumerate(layout.table):
        for slot, layer in enumerate(row):
            if layer != NOTHING:
                i, p, r = places[slot]
                at = (layout.entry(k), r)
                layers[layer] = jax.tree.map(lambda leaf, at=at: leaf[at], params["stages"][i][p])
    rest = {name: tree for name, tree in params.items() if name != "stages"}
    return rest | {"layers": dict(sorted(layers.items()))}


def _laid_out(kinds: Sequence[Hashable], stages: int, chunks: int, counts: Sequence[int]) -> StageLayout:
    ends = np.cumsum(counts)
    stretches = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    slots: list[Hashable] = []
    for stretch in stretches:
        slots = _merged(slots, [kinds[layer] for layer in stretch])
    return StageLayout(stages, chunks, tuple(slots), tuple(_placed(slots, kinds, stretch) for stretch in stretches))


def _placed(slots: Sequence[Hashable], kinds: Sequence[Hashable], stretch: range) -> tuple[int, ...]:
    """Each layer of a stretch at the first slot of its kind that is still ahead."""
    row, left = [], list(stretch)
    for kind in slots:
        row.append(int(left.pop(0)) if left and kinds[left[0]] == kind else NOTHING)
    assert not left, "slots are a supersequence of every stretch"
    return tuple(row)


def _merged(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Hashable]:
    """A shortest sequence that both are parts of, in order."""
    common = np.zeros((len(a) + 1, len(b) + 1), int)
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            common[i, j] = 1 + common[i + 1, j + 1] if a[i] == b[j] else max(common[i + 1, j], common[i, j + 1])
    merged, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            merged.append(a[i])
            i, j = i + 1, j + 1
        elif j == len(b) or (i < len(a) and common[i + 1, j] >= common[i, j + 1]):
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return merged


def _stack(leaves: tuple[Any, ...]) -> Any:
    return np.stack(leaves) if isinstance(leaves[0], np.ndarray) else jnp.stack(leaves)


def _masked(leaf: Any, here: np.ndarray) -> Any:
    if here.all():
        return leaf
    mask = here.reshape(here.shape + (1,) * (leaf.ndim - 2))
    where = np.where if isinstance(leaf, np.ndarray) else jnp.where
    return where(mask, leaf, np.zeros((), leaf.dtype))
