"""Finds collectives that not all devices which should join them reach, in a traced program and without compiling it.

Devices that disagree on a condition do not run the same operations. A collective under it is then one of three:

    ppermute                        a fault whatever its axis: all devices of a program may have to join in a permute,
                                    so that one that some leave out hangs, or meets another and mixes their data
    over an axis they disagree on   a fault: members of one group take different branches
    over other axes alone           fine: all members of a group take the same branch

What a condition differs over is its type inside `shard_map(check_vma=True)`. That type may name more axes than the
value differs over, never fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

_PERMUTE = "ppermute"
_GROUPS = ("all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin", "psum", "psum_invariant",
           "ragged_all_to_all", "reduce_scatter", "unreduced_reduce_scatter")  # fmt: skip


def permutes_under_conditions(jaxpr: ClosedJaxpr) -> list[str]:
    """Faults of a program, `jax.make_jaxpr(function)(*args)`: one line each, with the operations around; none is right.

    Conditions are those of `cond` (and `switch`), and of loops whose number of rounds differs.
    """
    return list(_faults(jaxpr.jaxpr, "", frozenset()))


def _faults(jaxpr: Jaxpr, path: str, differs: frozenset[str]) -> Iterator[str]:
    """`differs`: axes that the conditions around differ over."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if differs:
            axes = _axes(eqn.params)
            if name == _PERMUTE or (name in _GROUPS and axes & differs):
                yield f"{path}{name} over {sorted(axes)} under a condition that differs over {sorted(differs)}"
        inner = differs
        if name == "cond":
            inner = differs | _varying(eqn.invars[0])
        elif name == "while":
            inner = differs | _varying(eqn.params["cond_jaxpr"].jaxpr.outvars[0])
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, (Jaxpr, ClosedJaxpr)):
                    body = part.jaxpr if isinstance(part, ClosedJaxpr) else part
                    yield from _faults(body, f"{path}{name}/", inner)


def _axes(params: dict[str, Any]) -> frozenset[str]:
    """Mesh axes of a collective; a number is an axis of an array."""
    named = params.get("axis_name", params.get("axes", ()))
    named = named if isinstance(named, (tuple, list)) else (named,)
    return frozenset(str(axis) for axis in named if isinstance(axis, str))


def _varying(atom: Any) -> frozenset[str]:
    """Nothing outside of shard_map."""
    kind = getattr(atom.aval, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)
