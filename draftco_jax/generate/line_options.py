"""What a line of a file of prompts asks for itself, beside the settings that hold for the whole file.

| key | value | |
|---|---|---|
| `temperature`, `top_k`, `top_p`, `min_p` | number | in the place of `sampling.*` |
| `stop` | text, or a list of texts | in the place of `stop_strings` |
| `stop_token_ids` | list of ids | beside the folder's stop tokens |
| `min_tokens`, `max_tokens` | number | in the place of `min_tokens`, `max_new_tokens` |
| `seed` | number | sample s of the line then depends on it and on s alone, not on where the line stands |

`null` is as good as no key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from draftco_jax.errors import UserError
from draftco_jax.text.stop_automaton import require_stop_strings

_NUMBERS = ("temperature", "top_p", "min_p")
_COUNTS = ("top_k", "min_tokens", "max_tokens", "seed")
_LEAST = {"min_tokens": 0, "max_tokens": 1}
MOST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """None: as the settings of the file say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of `SamplingConfig` that the line names."""
        named = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {name: value for name, value in named.items() if value is not None}


def read_line_options(given: dict[str, Any]) -> LineOptions:
    """The options in an object; other keys are not looked at.

    Raises:
        UserError: a value is not of its kind, or a length or a seed is none. Whether other numbers make sense is for
            those who use them to say.
    """
    values = {each.name: given[each.name] for each in fields(LineOptions) if given.get(each.name) is not None}
    for name in _NUMBERS:
        if name in values:
            if type(values[name]) not in (int, float):
                raise UserError(f"{name}={values[name]!r} must be a number; leave it out for the setting of the file")
            values[name] = _finite(name, values[name])
    for name in _COUNTS:
        if name in values and type(values[name]) is not int:
            raise UserError(f"{name}={values[name]!r} must be a whole number; leave it out for the setting of the file")
    for name, least in _LEAST.items():
        if values.get(name, least) < least:
            raise UserError(f"{name}={values[name]} must be >= {least}; leave it out for the setting of the file")
    require_seed(values.get("seed", 0))
    if "stop" in values:
        values["stop"] = _texts(values["stop"])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = _ids(values["stop_token_ids"])
    return LineOptions(**values)


def require_seed(seed: int) -> None:
    """Refuse numbers that `jax.random.key` does not tell apart from others: it reads 32 bits."""
    if not 0 <= seed <= MOST_SEED:
        raise UserError(f"seed={seed} must be in 0..{MOST_SEED}; choose another")


def _finite(name: str, value: int | float) -> float:
    try:
        number = float(value)
    except OverflowError:  # of a whole number
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{name} must be a finite number, and what is given is beyond all of them; lower it")
    return number


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"stop={value!r} must be a text that is not empty, or a list of such; [] for none")
    require_stop_strings(texts)
    return tuple(texts)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise UserError(f"stop_token_ids={value!r} must be a list of ids; [] for none beside the folder's")
    return tuple(value)
