"""Reads the annotations of config dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, Union

from draftco_jax.errors import UserError

SCALARS = (bool, int, float, str)
_NAMES = {types.NoneType: "none", bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, forward references resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, flattened; anything else is the only member of itself."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in members(part))
    return (types.NoneType,) if hint is None else (hint,)


def is_component(hint: Any) -> bool:
    """Whether a union member stands for nested dataclasses: one itself, or a base class or protocol of some."""
    return isinstance(hint, type) and typing.get_origin(hint) is None and hint not in (*SCALARS, types.NoneType)


def component_classes(hint: Any, registry: Sequence[type]) -> dict[str, type]:
    """The dataclasses a field may hold, by name; a base class or a protocol stands for those in the registry."""
    found: list[type] = []
    for member in filter(is_component, members(hint)):
        if getattr(member, "_is_protocol", False):
            # A protocol with data members cannot be asked about subclasses, so the registry is what vouches.
            found += registry
        else:
            candidates: tuple[type, ...] = (member, *registry)
            found += [cls for cls in candidates if hasattr(cls, "__dataclass_fields__") and issubclass(cls, member)]
    return _by_name(found)


def _by_name(classes: Iterable[type]) -> dict[str, type]:
    named: dict[str, type] = {}
    for cls in classes:
        if named.setdefault(cls.__name__, cls) is not cls:
            raise TypeError(f"two config classes are called {cls.__name__}: {named[cls.__name__]!r}, {cls!r}")
    return named


def tuple_element_hints(hint: Any, length: int) -> tuple[Any, ...] | None:
    """The annotation of each element of a tuple with that length; None where the annotation has another length."""
    arguments = typing.get_args(hint)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return (arguments[0],) * length
    return arguments if len(arguments) == length else None


def describe(hint: Any) -> str:
    """An annotation in words, to follow "must be"."""
    return " or ".join(_describe_member(member) for member in members(hint))


def _describe_member(member: Any) -> str:
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is Literal:
        return f"one of {', '.join(str(argument) for argument in arguments)}"
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return f"a list in which each is {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} ({', '.join(describe(argument) for argument in arguments)})"
    return _NAMES[member] if member in _NAMES else f"a {getattr(member, '__name__', member)}"


def join(path: str, name: str) -> str:
    """A dotted path one step longer."""
    return f"{path}.{name}" if path else name


def refused_by_component(path: str, error: ValueError) -> UserError:
    """The error of a component's own check, told with the component's place in the config."""
    return UserError(f"{path}: {error}" if path else str(error))
