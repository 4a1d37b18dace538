"""Turns configs into JSON trees, back again, or into a list of their differences."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from draftco_jax.config_io.hints import (
    SCALARS,
    component_classes,
    describe,
    field_hints,
    is_component,
    join,
    members,
    refused_by_component,
    tuple_element_hints,
)
from draftco_jax.errors import UserError

T = TypeVar("T")
_ABSENT = object()


def to_json(config: Any, path: str = "") -> dict[str, Any]:
    """The config as dicts, lists and scalars; each dataclass carries its class name under ``"type"``.

    Example: ``to_json(Adam(rate=0.1)) == {"type": "Adam", "rate": 0.1}``.
    """
    tree: dict[str, Any] = {"type": type(config).__name__}
    for field in dataclasses.fields(config):
        assert field.name != "type", f"{type(config).__name__}: a field cannot be called type, the class name is there"
        tree[field.name] = _value_to_json(getattr(config, field.name), join(path, field.name))
    return tree


def _value_to_json(value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(value, path)
    if isinstance(value, (tuple, list)):
        return [_value_to_json(element, f"{path}[{index}]") for index, element in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}={value} must be finite; where None is allowed, None switches a limit off")
    if value is None or isinstance(value, SCALARS):
        return value
    raise UserError(
        f"{path}={value!r} is a {type(value).__name__}; a config holds only true/false, numbers, texts, none, "
        "tuples of these or config dataclasses"
    )


def from_json(cls: type[T], tree: Any, registry: Sequence[type] = ()) -> T:
    """The config that ``to_json`` gave this tree for; every value is checked against its annotation.

    ``registry`` lists the dataclasses that may stand where the annotation is a base class or a protocol; where it is a
    dataclass or a union of them, nothing needs to be listed. Every field must be there, and no other.
    ``from_json(type(config), to_json(config))`` checks the types of a config made in Python.

    Raises UserError with the dotted path of the value at fault.
    """
    return _component_from_json(tree, cls, registry, "")


def _component_from_json(tree: Any, hint: Any, registry: Sequence[type], path: str) -> Any:
    classes = component_classes(hint, registry)
    name = tree.get("type") if isinstance(tree, Mapping) else None
    if name not in classes:
        where = join(path, "type")
        raise UserError(f"{where}={name} must be one of {', '.join(sorted(classes))}")
    cls = classes[name]
    hints = field_hints(cls)
    for key in tree:
        if key != "type" and key not in hints:
            raise UserError(f"{join(path, key)} is not a field of {name}; its fields are {', '.join(hints)}")
    for key in hints:
        if key not in tree:
            raise UserError(f"{join(path, key)} is missing; a saved config holds every field of {name}")
    values = {key: _value_from_json(tree[key], field, registry, join(path, key)) for key, field in hints.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise refused_by_component(path, error) from error


def _value_from_json(value: Any, hint: Any, registry: Sequence[type], path: str) -> Any:
    if isinstance(value, Mapping) and component_classes(hint, registry):
        return _component_from_json(value, hint, registry, path)
    for member in members(hint):
        if typing.get_origin(member) is tuple and isinstance(value, (tuple, list)):
            elements = tuple_element_hints(member, len(value))
            if elements is not None:
                pairs = enumerate(zip(value, elements, strict=True))
                return tuple(_value_from_json(one, part, registry, f"{path}[{index}]") for index, (one, part) in pairs)
        elif _fits(value, member, path):
            return value
    raise UserError(f"{path}={json.dumps(value)} must be {describe(hint)}")


def _fits(value: Any, member: Any, path: str) -> bool:
    """Whether a JSON scalar is of this annotation: true and 1 are told apart, 1 is a good float and stays as it is."""
    if member is types.NoneType:
        return value is None
    if typing.get_origin(member) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(member))
    if member is float:
        return type(value) in (int, float)
    if member in SCALARS:
        return type(value) is member
    if typing.get_origin(member) is tuple or is_component(member):
        return False
    raise TypeError(f"{path}: a config field cannot be annotated {member!r}")


def diff(old: Any, new: Any, path: str = "") -> list[str]:
    """What differs between two JSON trees, one ``path: old -> new`` a line, in the order of the fields."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line for key in keys for line in diff(old.get(key, _ABSENT), new.get(key, _ABSENT), join(path, str(key)))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line for index, pair in enumerate(zip(old, new, strict=True)) for line in diff(*pair, f"{path}[{index}]")
        ]
    # 1 and 1.0 are the same setting, true and 1 are not.
    if old == new and isinstance(old, bool) == isinstance(new, bool):
        return []
    return [f"{path}: {_shown(old)} -> {_shown(new)}"]


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
