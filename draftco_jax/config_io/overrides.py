"""Applies ``a.b.c=value`` texts to a config."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from draftco_jax.config_io.hints import (
    SCALARS,
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
Edits = dict[str, Any]  # name -> text, or the Edits of the component of that name


def apply_overrides(config: T, overrides: Sequence[str]) -> T:
    """A copy of the config with each ``a.b.c=value`` applied; the value is read by the field's annotation.

    true/false for bool, 3 or 1e-3 for numbers, ``none`` where None is allowed, ``1,2,3`` or a JSON list for tuples
    (texts in which a comma or white space counts need the list: ``["\\n", ", "]``). A path set twice takes the last
    value. All overrides are in place before any component checks itself, so two that only make sense together can be
    given in any order.

    Raises UserError for an unknown path, a value of another type, or a combination a component refuses.
    """
    edits: Edits = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not all(path.split(".")):
            raise UserError(f"override {override!r} must have the form a.b.c=value")
        _insert(edits, path, text.strip())
    return _rebuild(config, edits, "", config)


def _insert(edits: Edits, path: str, text: str) -> None:
    *parents, last = path.strip().split(".")
    for parent in parents:
        below = edits.setdefault(parent, {})
        if isinstance(below, str):
            raise UserError(f"{path} is set, and so is {parent} as a whole; keep one of the two")
        edits = below
    if isinstance(edits.get(last), dict):
        raise UserError(f"{path} is set as a whole, and so is a field below it; keep one of the two")
    edits[last] = text


def _rebuild(component: Any, edits: Edits, path: str, root: Any) -> Any:
    hints = field_hints(type(component))
    changes: dict[str, Any] = {}
    for name, edit in edits.items():
        here = join(path, name)
        if name not in hints:
            raise _unknown(here, name, type(component), root)
        if isinstance(edit, str):
            changes[name] = _read_field(edit, hints[name], here, getattr(component, name))
            continue
        value = getattr(component, name)
        if not dataclasses.is_dataclass(value):
            raise UserError(f"{here} is {value!r} in this config and has no field {next(iter(edit))}")
        changes[name] = _rebuild(value, edit, here, root)
    try:
        return dataclasses.replace(component, **changes)
    except ValueError as error:
        raise refused_by_component(path, error) from error


def _unknown(path: str, name: str, cls: type, root: Any) -> UserError:
    """Names the near misses: similar fields at this level, then equal or similar names anywhere in the config."""
    level = list(field_hints(cls))
    everywhere = {full: full.rsplit(".", 1)[-1] for full in _paths(root, "")}
    prefix = path[: len(path) - len(name)]
    similar = [prefix + close for close in difflib.get_close_matches(name, level, n=3)]
    endings = difflib.get_close_matches(name, sorted(set(everywhere.values())), n=2)
    similar += [full for full, ending in everywhere.items() if ending in endings and full not in similar]
    nearest = f"; nearest: {', '.join(similar[:4])}" if similar else ""
    place = f"{prefix.rstrip('.')} ({cls.__name__})" if prefix else cls.__name__
    return UserError(f"{path} is not a setting{nearest}; the fields of {place} are {', '.join(level)}")


def _paths(component: Any, path: str) -> Iterator[str]:
    for field in dataclasses.fields(component):
        value, here = getattr(component, field.name), join(path, field.name)
        yield here
        if dataclasses.is_dataclass(value):
            yield from _paths(value, here)


def _read_field(text: str, hint: Any, path: str, current: Any) -> Any:
    try:
        return _read(text, hint)
    except ValueError as error:
        if any(is_component(member) for member in members(hint)):
            raise UserError(
                f"{path}={text} cannot be given as text: it is a component (now {type(current).__name__}); "
                "set its fields, or choose another one in the config file"
            ) from error
        listed = text.startswith("[") and any(typing.get_origin(member) is tuple for member in members(hint))
        how = "; what starts with [ is read as JSON, so texts in it stand in quotes" if listed else ""
        raise UserError(f"{path}={text} must be {describe(hint)}{how}") from error


def _read(text: str, hint: Any) -> Any:
    """The value a text stands for; ValueError where no member of the annotation can read it."""
    return _read_by(text, members(hint))


def _read_by(text: str, choices: Sequence[Any]) -> Any:
    # None before all others and str after them, since a str can read every text.
    order = sorted(choices, key=lambda member: (member is not types.NoneType, member is str))
    for member in order:
        try:
            return _read_member(text, member)
        except ValueError:
            continue
    raise ValueError(text)


def _read_member(text: str, member: Any) -> Any:
    if typing.get_origin(member) is Literal:
        return _one_of(text, {str(choice): choice for choice in typing.get_args(member)})
    if typing.get_origin(member) is tuple:
        return _read_tuple(text, member)
    if member is types.NoneType:
        return _one_of(text.lower(), {"none": None})
    if member is bool:
        return _one_of(text.lower(), {"true": True, "false": False})
    if member is float:
        return _finite(float(text))
    if member in SCALARS:
        return member(text)
    raise ValueError(text)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _one_of(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _read_tuple(text: str, hint: Any) -> tuple[Any, ...]:
    inner = text.strip()
    if inner.startswith("["):
        parts, read = _json_list(inner), _read_json
    else:
        if inner[:1] + inner[-1:] == "()":
            inner = inner[1:-1]
        parts, read = [part.strip() for part in inner.rstrip(", ").split(",")] if inner.strip() else [], _read
    hints = tuple_element_hints(hint, len(parts))
    if hints is None:
        raise ValueError(text)
    return tuple(read(part, one) for part, one in zip(parts, hints, strict=True))


def _json_list(text: str) -> list[Any]:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(text) from error


def _read_json(value: Any, hint: Any) -> Any:
    """An element of a JSON list: a text stays as it is where one is wanted, and nothing else becomes a text."""
    if isinstance(value, str):
        return value if str in members(hint) else _read(value, hint)
    text = "none" if value is None else json.dumps(value)
    return _read_by(text, [member for member in members(hint) if member is not str])
