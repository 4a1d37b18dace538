"""`draftco bench decode`: how fast policies of several sizes decode, plainly, with a draft, and beside transformers.

The larger policies are the shipped one grown (`models.growth`): the same function in a larger body, so the draft's
acceptance is that of the shipped pair, and matrices cost what dense ones of their size cost. Nothing here says how well
a draft would predict a policy that knows more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftco_jax.bench_decode.cells import SAMPLINGS, measure_cell
from draftco_jax.bench_decode.machine import describe_machine, load_average
from draftco_jax.bench_decode.overhead import measure_overhead
from draftco_jax.bench_decode.pairs import DIGITS, LADDER, shipped_pair
from draftco_jax.bench_decode.peer import Peer, missing


@dataclass(frozen=True, kw_only=True)
class BenchDecodeConfig:
    """What is compared."""

    policies: tuple[str, ...] = ("0.4M", "10M", "50M")
    """Rungs of `pairs.LADDER`, from small to large."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Requests of a timed call."""
    draft_lengths: tuple[int, ...] = (3, 5, 7)
    """k that are tried beside plain decoding."""
    repetitions: int = 5
    """Timed turns; medians are quoted."""
    choosing_turns: int = 3
    """Turns before them, in which k is chosen."""
    peer: bool = True
    """Measure transformers too, where it is installed."""
    step_matmul: Literal["xla", "skinny"] = "xla"
    """skinny: with the optional kernel (`pallas_kernels.skinny_matmul`), for plain decoding too."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that measure nothing."""
        unknown = [name for name in self.policies if name not in LADDER]
        if unknown or not self.policies:
            raise ValueError(f"policies={self.policies} must name some of {', '.join(LADDER)}; use 0.4M,10M,50M")
        for name in ("batches", "draft_lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={values} must be numbers >= 1; leave it out")
        for name in ("repetitions", "choosing_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; use 5 and 3")

    @classmethod
    def fast(cls) -> BenchDecodeConfig:
        """Whether it runs at all: one small grown policy, one turn."""
        return cls(policies=("tiny",), batches=(2,), draft_lengths=(3,), repetitions=1, choosing_turns=1)


def bench_decode(cfg: BenchDecodeConfig, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All figures; a dict of plain values."""
    load, why = load_average(), "left out by peer=false" if not cfg.peer else missing()
    stage("loading")
    shipped = shipped_pair(cfg.step_matmul)
    cells: list[dict[str, Any]] = []
    sizes: dict[str, Any] = {}
    overhead: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        assistant = Peer(shipped.save(Path(folder) / "shipped")) if why is None else None
        for name in cfg.policies:
            stage(f"growing the {name} policy")
            pair = shipped.grown(name)
            sizes[name] = pair.describe()
            peer = assistant
            if assistant is not None and pair is not shipped:
                peer = Peer(pair.save(Path(folder) / name), assistant)
            for batch in cfg.batches:
                for sampling in SAMPLINGS:
                    stage(f"{name}, batch {batch}, {sampling.replace('_', ' ')}")
                    cells.append(measure_cell(cfg, pair, sampling, batch, peer))
            if name == cfg.policies[-1]:
                stage(f"what a round of the {name} policy is made of")
                found = [cell for cell in cells if cell["policy"] == name]
                overhead = measure_overhead(cfg, pair, found)
    return (
        {
            "digits": DIGITS,
            "step_matmul": cfg.step_matmul,
            "sizes": sizes,
            "cells": cells,
            "overhead": overhead,
            "overhead_share": overhead["share"],
        }
        | _headlines(cfg, cells, why)
        | describe_machine(load)
    )


def _headlines(cfg: BenchDecodeConfig, cells: list[dict[str, Any]], why: str | None) -> dict[str, Any]:
    """The cells by policy, batch and sampling, and their extremes."""

    def nested(key: str) -> dict[str, Any]:
        return {
            name: {
                str(batch): {c["sampling"]: c[key] for c in cells if (c["policy"], c["batch"]) == (name, batch)}
                for batch in cfg.batches
            }
            for name in cfg.policies
        }

    ratios = {
        name: {
            str(c["batch"]): c["over_transformers"] for c in cells if c["policy"] == name and c["sampling"] == "greedy"
        }
        for name in cfg.policies
    }
    by_batch = None
    if why is None:
        by_batch = {str(batch): min(ratios[name][str(batch)] for name in cfg.policies) for batch in cfg.batches}
    return {
        "speedup": nested("speedup"),
        "accepted_length": nested("accepted_length"),
        "draft_length": nested("draft_length"),
        "worst_over_plain": min(cell["speedup"] for cell in cells),
        "over_transformers": by_batch,
        "over_transformers_by_policy": ratios if why is None else None,
        "over_transformers_reason": why,
    }
