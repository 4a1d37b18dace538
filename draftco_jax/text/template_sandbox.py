"""The Jinja environment that chat templates run in: nothing outside the template's own arguments, and bounded work.

A chat template comes with a model and is somebody else's program. Jinja's immutable sandbox keeps it from Python's
internals and from changing its arguments. What the sandbox leaves open is bounded here: loop passes and macro calls,
the characters of a value and of the result, the size of numbers. The settings and helpers are those of transformers
(`trim_blocks`, `lstrip_blocks`, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML
alone, ``{% generation %}``).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_STEPS = 1 << 20
"""Loop passes and macro calls of one rendering."""
MAX_SECONDS = 30.0
"""Time of one rendering; looked at every 256 steps, for work that no step shows."""
MAX_CHARACTERS = 1 << 25
"""Characters of a text that a template may build."""
MAX_ITEMS = 1 << 20
"""Items of a list that a template may build, or write as text, those of lists within it included."""
MAX_BITS = 4096
"""Size of an integer that a template may build."""

_GROWING_FILTERS = frozenset(
    "batch center e escape forceescape format indent join list pprint replace round slice string sum truncate urlize "
    "wordwrap xmlattr".split()
)
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})|\{[^{}]*:[^{}]*(\d{4}|\{)")
"""A width or precision of four digits or more, or one that is itself an argument."""


class LimitExceeded(jinja2.TemplateError):
    """The template did more than it may."""


@dataclass
class Rendering:
    """The state of one rendering."""

    now: Callable[[], datetime]
    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    blocks: list[str] = field(default_factory=list)
    length: int = 0
    """Characters of `blocks`."""
    generated: list[tuple[int, str]] = field(default_factory=list)
    """(first character, text) of what was written inside ``{% generation %}``."""

    def spans(self) -> list[tuple[int, int]]:
        """Characters ``start <= i < end`` of what was written inside ``{% generation %}``.

        Raises `jinja2.TemplateError` where the text went somewhere else first, through a macro or ``{% set %}``.
        """
        text = "".join(self.blocks)
        for start, part in self.generated:
            if not text.startswith(part, start):
                raise jinja2.TemplateError("{% generation %} must not be inside a macro, a filter or a set block")
        return [(start, start + len(part)) for start, part in self.generated]


_current: ContextVar[Rendering] = ContextVar("chat_template_rendering")


def render(template: jinja2.Template, variables: dict[str, Any], now: Callable[[], datetime]) -> Rendering:
    """Runs a template of `environment`. Raises what the template raises, `LimitExceeded` among it."""
    state = Rendering(now)
    token = _current.set(state)
    try:
        for block in template.generate(**variables):
            state.blocks.append(block)
            state.length += len(block)
            _require(state.length, MAX_CHARACTERS, "characters written")
    finally:
        _current.reset(token)
    return state


class _Bounds(jinja2.ext.Extension):
    """Counts loop passes and macro calls, measures texts that are put together, and marks ``{% generation %}``."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_generation"), [], [], body).set_lineno(line)

    def _generation(self, caller: Callable[[], str]) -> str:
        state = _current.get()
        text = caller()
        state.generated.append((state.length, text))
        return text

    @property
    def _tick(self) -> bool:
        # A property, since the sandbox looks at every call, which costs more than most loop bodies.
        state = _current.get()
        state.steps += 1
        if state.steps & 255 == 0:
            _require(state.steps, MAX_STEPS, "loop passes and macro calls")
            _require(time.monotonic() - state.started, MAX_SECONDS, "seconds")
        return True

    def _join(self, *parts: Any) -> str:
        _measure(parts)
        return "".join(str(part) for part in parts)


class _Instrument(jinja2.visitor.NodeTransformer):
    """Puts the calls of `_Bounds` into a parsed template."""

    def __init__(self, bounds: _Bounds) -> None:
        self._bounds = bounds

    def visit_For(self, node: jinja2.nodes.For, *args: Any, **kwargs: Any) -> jinja2.nodes.Node:  # noqa: N802
        self._count(node)
        if node.test is not None:  # passes that the loop's own condition leaves out
            node.test = jinja2.nodes.And(self._tick(node), node.test)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro, *args: Any, **kwargs: Any) -> jinja2.nodes.Node:  # noqa: N802
        self._count(node)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat, *args: Any, **kwargs: Any) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._bounds.call_method("_join", list(node.nodes)).set_lineno(node.lineno)

    def _count(self, node: Any) -> None:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(self._tick(node)).set_lineno(node.lineno))

    def _tick(self, node: jinja2.nodes.Node) -> Any:
        return self._bounds.attr("_tick").set_lineno(node.lineno)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` whose attributes do not start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"attribute {name!r} of a namespace starts with an underscore")
        super().__setitem__(name, value)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        bounds = self.extensions[_Bounds.identifier]
        assert isinstance(bounds, _Bounds)
        return _Instrument(bounds).visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _bound_pattern(left)
            _measure(right)
        if operator in ("*", "**"):
            _bound_product(operator, left, right)
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            limit = MAX_CHARACTERS if isinstance(left, str) else MAX_ITEMS
            _require(len(left) + len(right), limit, "characters or items of one value")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # str.format comes wrapped
        _bound_arguments(getattr(method, "__self__", None), getattr(method, "__name__", ""), (*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)


def environment() -> jinja2.Environment:
    """A new environment for chat templates."""
    env = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Bounds, jinja2.ext.loopcontrols],
        finalize=_finalized,
    )
    for name in _GROWING_FILTERS:
        env.filters[name] = _bounded_filter(name, env.filters[name])
    env.filters["tojson"] = _tojson
    del env.globals["lipsum"]  # random text
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: _current.get().now().strftime(form)
    env.globals["namespace"] = _Namespace
    return env


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _measure(value)
    _require(indent or 0, 1000, "spaces of an indent")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _finalized(value: Any) -> Any:
    _measure(value)
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # Filters that need the environment get it as their first argument.
        values = [arg for arg in args if not isinstance(arg, (jinja2.Environment, jinja2.nodes.EvalContext))]
        _measure(values)
        _bound_arguments(values[0] if values else None, name, (*values[1:], *kwargs.values()))
        return function(*args, **kwargs)

    # How Jinja knows which first argument a filter wants.
    vars(bounded).update(vars(function))
    return bounded


def _bound_arguments(value: Any, name: str, args: tuple[Any, ...]) -> None:
    """Bounds what a method or filter of a text can be told to make."""
    if isinstance(value, str):
        for arg in args:
            if isinstance(arg, int):
                _require(abs(arg), MAX_CHARACTERS, f"for an argument of {name}")
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            found = value.count(args[0]) if args[0] else len(value) + 1
            _require(len(value) + found * len(args[1]), MAX_CHARACTERS, "characters of one value")
        if name in ("format", "format_map"):
            _bound_pattern(value)
            _measure(args)
        if name == "translate":
            raise jinja2.exceptions.SecurityError("translate on a text")
    if name == "join":
        items = args[0] if isinstance(value, str) and args else value
        separator = value if isinstance(value, str) and args else (args[0] if args else "")
        if isinstance(items, (list, tuple)):
            _require(len(items) * (len(str(separator)) + 1), MAX_CHARACTERS, "characters of one value")
            _measure(items)


def _bound_pattern(pattern: str) -> None:
    if _WIDE_FIELD.search(pattern):
        raise LimitExceeded(f"a field as wide as {pattern!r} asks for")


def _bound_product(operator: str, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            limit = MAX_CHARACTERS if isinstance(value, str) else MAX_ITEMS
            _require(len(value) * times, limit, "characters or items of one value")
    if isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        _require(size, MAX_BITS, "bits of a number")


def _measure(value: Any) -> None:
    """Refuses a value whose text would be too long: lists that hold each other many times over among them."""
    waiting, characters, items = [value], 0, 0
    while waiting:
        item = waiting.pop()
        items += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
        if characters > MAX_CHARACTERS or items + len(waiting) > MAX_ITEMS:
            raise LimitExceeded(f"more than {MAX_CHARACTERS} characters or {MAX_ITEMS} items of one value")


def _require(size: float, limit: float, what: str) -> None:
    if size > limit:
        raise LimitExceeded(f"more than {limit} {what}")
