"""How the result of a conversion is to be, and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from draftco_jax.drafts.recognise import family_with_files
from draftco_jax.errors import UserError

DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
SHARD_BYTES = 5_000_000_000
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(kw_only=True)
class Converted:
    """What was written where, and what a reader should know about it."""

    written: dict[str, Path] = field(default_factory=dict)
    """policy, draft -> folder."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How the result is to be."""

    dtype: str | None = None
    """One of `DTYPES`; None: that of the source, or float32 where it mixes several."""
    kind: str | None = None
    """policy or draft, where the source holds both; None: what it is, and both of a run."""
    max_shard_bytes: int = SHARD_BYTES
    draft_family: str | None = None
    """Family of a draft folder; None: told by its files."""
    step: int | None = None
    """Checkpoint of a run; None: the newest."""

    def __post_init__(self) -> None:
        """Refuse what is not known before anything is read."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype} must be one of {', '.join(DTYPES)}; leave it out to keep the source's")
        if self.kind not in (None, "policy", "draft"):
            raise UserError(f"kind={self.kind} must be policy or draft; leave it out to go by the source")
        if self.max_shard_bytes < 1:
            raise UserError(f"max_shard_size={self.max_shard_bytes} must be at least 1 byte; 5GB is customary")
        if self.draft_family is not None:
            family_with_files(self.draft_family)
            if self.kind == "policy":
                raise UserError(f"draft_family={self.draft_family} goes with kind=draft, not policy; leave one out")


def parse_size(text: str) -> int:
    """Bytes of a text such as 5GB, 500MB or 1GiB; a number alone is bytes."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].upper() or "B"
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise UserError(f"max_shard_size={text} must be a number with a unit, one of {', '.join(_UNITS)}") from error
    return size
