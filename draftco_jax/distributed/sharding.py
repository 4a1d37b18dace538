"""Logical axis -> mesh axis: which dims of the parameters are split over which axes of the mesh. One table a layout.

Each parameter states the logical axis of each of its dims, and of how many parts that must stay whole a dim consists
(`models.layers.parameter`). With the table and the sizes of a mesh that gives its `PartitionSpec`:

    a mesh axis that is not there splits nothing, and one mesh axis splits one dim of an array, the first that asks
    a dim is split evenly and between its parts, or refused by name
    key-value heads fewer than the ranks are the exception: where each rank can have one, all ranks hold all of them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from draftco_jax.distributed.axes import MeshAxis

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, Axes]

TRAIN: Rules = {
    "layers": MeshAxis.STAGE,
    "slot": None,
    "vocab": MeshAxis.TENSOR,
    "heads": MeshAxis.TENSOR,
    "kv_heads": MeshAxis.TENSOR,
    "mlp": MeshAxis.TENSOR,
    "mlp_pairs": MeshAxis.TENSOR,
    "mixer": MeshAxis.TENSOR,
    "mixer_heads": MeshAxis.TENSOR,
    "expert": MeshAxis.EXPERT,
    "embed": None,
    "router": None,
    "head_dim": None,
    "value_dim": None,
    "taps": None,
    "unit": None,
}
"""Of the train layout."""

ROLLOUT: Rules = {**TRAIN, "layers": None, "fused": None}
"""Of the rollout layout: every rank has all layers. Projections that were laid side by side are whole; over a
tensor axis none are."""

SHARED_WHERE_FEWER = ("kv_heads",)
"""Logical axes that are left whole where their parts are fewer than the ranks, so that several ranks share one."""


@dataclass(frozen=True)
class Stated:
    """What is known of a parameter without its values."""

    shape: tuple[int, ...]
    dtype: Any
    logical_axes: tuple[str, ...]
    units: tuple[tuple[str, int], ...] = ()


def with_axes(rules: Rules, changed: Mapping[str, Axes]) -> Rules:
    """The table with other mesh axes in the place of some: {"expert": ("context", "tensor"), "stage": None}."""
    put = lambda axes: changed.get(axes, axes) if isinstance(axes, str) else axes  # noqa: E731
    return {logical: put(axes) for logical, axes in rules.items()}


def rollout_rules(tensor: str | None, experts_over: tuple[str, ...]) -> Rules:
    """`ROLLOUT` over this tensor axis; experts are split where training splits them over it, by it alone."""
    return with_axes(ROLLOUT, {MeshAxis.TENSOR: tensor, MeshAxis.EXPERT: tensor if tensor in experts_over else None})


def stated_parameters(module: nnx.Module) -> dict[tuple[Any, ...], Stated]:
    """By tree path. The module may be abstract (`nnx.eval_shape`)."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value, known = variable.get_value(), variable.get_metadata()
        if "logical_axes" not in known:
            raise ValueError(f"{_name(path)} has no logical_axes; make it with models.layers.parameter")
        found[tuple(path)] = Stated(tuple(value.shape), value.dtype, known["logical_axes"], known.get("units", ()))
    return found


def partition_spec(path: tuple[Any, ...], stated: Stated, rules: Rules, sizes: Mapping[str, int]) -> PartitionSpec:
    """How one parameter is split over mesh axes of these sizes."""
    if len(stated.logical_axes) != len(stated.shape):
        raise ValueError(f"{_name(path)}: {stated.logical_axes=} must name each dim of {stated.shape=}")
    used: set[str] = set()
    dims: list[Axes] = []
    for logical, dim in zip(stated.logical_axes, stated.shape, strict=True):
        if logical not in rules:
            raise ValueError(f"{_name(path)}: logical axis {logical!r} must be in the table; known: {sorted(rules)}")
        wanted = rules[logical]
        wanted = (wanted,) if isinstance(wanted, str) else wanted or ()
        axes = tuple(str(axis) for axis in wanted if axis in sizes and axis not in used)
        ranks, units = prod(sizes[axis] for axis in axes), dict(stated.units).get(logical, dim)
        if units % ranks and logical in SHARED_WHERE_FEWER and ranks % units == 0:
            axes = ()
        elif units % ranks:
            also = ", or divide it" if logical in SHARED_WHERE_FEWER else ""
            raise ValueError(
                f"{_name(path)}: {logical}={units} must be a multiple of {ranks}, the size of mesh axes {axes}{also}; "
                "use a smaller axis"
            )
        used.update(axes)
        dims.append(axes if len(axes) > 1 else axes[0] if axes else None)
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def partition_specs(module: nnx.Module, rules: Rules, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The tree of a module's parameters with a `PartitionSpec` for each; `sizes` is `Mesh.shape`."""
    stated = stated_parameters(module)
    return traverse_util.unflatten_dict({path: partition_spec(path, one, rules, sizes) for path, one in stated.items()})


def shardings(specs: Any, mesh: Mesh) -> Any:
    """The same tree with a `NamedSharding` for each."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def local_shape(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of the piece that one device holds."""
    dims = tuple(spec) + (None,) * (len(shape) - len(spec))
    ranks = [prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes or ())) for axes in dims]
    return tuple(dim // count for dim, count in zip(shape, ranks, strict=True))


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
