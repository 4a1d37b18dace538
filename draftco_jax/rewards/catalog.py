"""From a reward's name to its scorer."""

from __future__ import annotations

import re

from draftco_jax.errors import UserError
from draftco_jax.rewards.dapo import DapoScorer
from draftco_jax.rewards.gsm8k import Gsm8kScorer, gold_number
from draftco_jax.rewards.math_verify import math_verify_scorer, require_library
from draftco_jax.rewards.pool import PoolConfig, PoolScorer
from draftco_jax.rewards.scores import Scorer
from draftco_jax.rewards.worker import load_function

REWARDS = ("math_verify", "dapo", "dapo_strict", "gsm8k")

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def require_scorer(name: str) -> None:
    """Raises `UserError` for a name that is neither one of `REWARDS` nor a function ``package.module:function`` that
    can be imported here."""
    if name == "math_verify":
        return require_library()
    if name in REWARDS:
        return
    if not _FUNCTION.fullmatch(name):
        raise UserError(f"reward={name} must be one of {', '.join(REWARDS)}, or package.module:function")
    try:
        load_function(name)
    except Exception as error:  # whatever a user's module raises
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"reward={name} must be a function that can be imported ({what}); correct the path") from error


def require_gold(name: str, answer: str, place: str) -> None:
    """Raises `UserError` for a gold answer, of the row at `place`, that no response to it could match."""
    if name == "gsm8k" and gold_number(answer) is None:
        raise UserError(
            f"{place}: answer={answer[:60]!r} must be a number as a whole for reward=gsm8k; correct it, or choose "
            "another reward"
        )


def build_scorer(name: str, pool: PoolConfig) -> Scorer:
    """The scorer of a name; a user's function and math_verify run in a pool of processes."""
    require_scorer(name)
    match name:
        case "math_verify":
            return math_verify_scorer(pool)
        case "dapo" | "dapo_strict":
            return DapoScorer(strict=name == "dapo_strict")
        case "gsm8k":
            return Gsm8kScorer()
        case _:
            return PoolScorer(name, pool)
