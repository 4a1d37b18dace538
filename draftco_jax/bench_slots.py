"""`draftco bench slots`: what continuous batching costs and gains beside static batches, and a step by length of text.

    even      responses that end by themselves, all about as long: a static batch wastes nothing
    uneven    responses of limited lengths, most short and a few long: a static batch waits for its longest, and is made
              for so many tokens and no more

The same requests go through S slots in one call, or in batches of S one after another, taking turns; tokens a second
count what was asked for. Policies are those of `draftco bench decode`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.bench_decode.machine import describe_machine, load_average
from draftco_jax.bench_decode.pairs import LADDER, Pair, shipped_pair
from draftco_jax.decoding.engine import Engine, EngineShape, Request, no_context, request_keys
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.profiling import compare, median_ratio
from draftco_jax.types import Rollouts

KINDS = ("even", "uneven")
_MEAN_OF_UNEVEN = 16
_MOST_OF_UNEVEN = 96
_POSITIONS = 512  # of the shipped policy, and of what it grows to


@dataclass(frozen=True, kw_only=True)
class BenchSlotsConfig:
    """What is compared."""

    policies: tuple[str, ...] = ("0.4M", "10M")
    """Rungs of `bench_decode.pairs.LADDER`."""
    slots: int = 32
    """Slots, and rows of a static batch."""
    batches: int = 4
    """Static batches that the requests fill."""
    draft_lengths: tuple[int, ...] = (0, 4)
    """k of all rounds; 0: plain decoding."""
    repetitions: int = 7
    """Timed turns; medians are quoted."""
    lengths: tuple[int, ...] = (16, 64, 128, 256, 448)
    """Tokens of text before the timed steps, in one program whose capacity holds the longest."""
    steps: int = 32
    """Timed steps of each length."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that measure nothing."""
        unknown = [name for name in self.policies if name not in LADDER]
        if unknown or not self.policies:
            raise ValueError(f"policies={self.policies} must name some of {', '.join(LADDER)}; use 0.4M,10M")
        for name in ("slots", "batches", "repetitions", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; leave it out")
        if not self.lengths or min(self.lengths) < 1 or max(self.lengths) + self.steps + 1 > _POSITIONS:
            raise ValueError(
                f"lengths={self.lengths} must be numbers >= 1, each with room for steps={self.steps} tokens and one "
                f"more in the {_POSITIONS} positions of the policy; leave them out"
            )
        if not self.draft_lengths or min(self.draft_lengths) < 0:
            raise ValueError(f"draft_lengths={self.draft_lengths} must be numbers >= 0; use 0,4")

    @classmethod
    def fast(cls) -> BenchSlotsConfig:
        """Whether it runs at all."""
        return cls(policies=("0.4M",), slots=2, batches=2, draft_lengths=(3,), repetitions=1, lengths=(4, 20), steps=2)


def bench_slots(cfg: BenchSlotsConfig, stage: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All figures; a dict of plain values."""
    load, shipped = load_average(), shipped_pair()
    cells: list[dict[str, Any]] = []
    for name in cfg.policies:
        pair = shipped.grown(name)
        for kind in KINDS:
            for k in cfg.draft_lengths:
                stage(f"{name}, {kind} responses, k = {k}")
                cells.append({"policy": name, "kind": kind, "draft_length": k} | _measure(cfg, pair, kind, k))
    stage("a step by length of text")
    steps = step_by_length(cfg, shipped)
    over = {kind: {c["policy"]: {} for c in cells} for kind in KINDS}
    for cell in cells:
        over[cell["kind"]][cell["policy"]][str(cell["draft_length"])] = cell["slots_over_static"]
    settings = {name: value for name, value in asdict(cfg).items() if name != "policies"}
    return {
        "settings": settings,
        "cells": cells,
        "slots_over_static": over,
        "step_by_length": steps,
    } | describe_machine(load)


def _measure(cfg: BenchSlotsConfig, pair: Pair, kind: str, k: int) -> dict[str, Any]:
    """Both ways with the same requests."""
    weights, draft = pair.published, pair.published.draft if k else None
    requests = [turn[0] for turn in pair.turns(cfg.slots, 0, cfg.batches, jax.random.key(cfg.seed))]
    queue: Request = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *requests)
    if kind == "even":
        engine, limits = pair.engine(SamplingConfig()), None
        static = [engine] * cfg.batches
    else:
        limits = uneven_limits(cfg.slots * cfg.batches, cfg.seed)
        # Nothing but the limit ends these: what the policy writes behind its answer is of no interest here.
        made = {n: _without_stops(pair, n) for n in {_MOST_OF_UNEVEN, *longest_of_batches(limits, cfg.batches)}}
        engine, static = made[_MOST_OF_UNEVEN], [made[n] for n in longest_of_batches(limits, cfg.batches)]
        queue = queue._replace(max_tokens=jnp.asarray(limits, jnp.int32))
    found: dict[str, list[Rollouts]] = {}

    def keep(name: str, rollouts: list[Rollouts]) -> list[Rollouts]:
        found[name] = rollouts
        return rollouts

    calls = {
        "static": lambda: keep(
            "static", [e.generate(weights.policy, draft, r, k) for e, r in zip(static, requests, strict=True)]
        ),
        "slots": lambda: keep("slots", [engine.generate(weights.policy, draft, queue, k, slots=cfg.slots)]),
    }
    seconds = compare(calls, cfg.repetitions)
    tokens = {name: asked_tokens(rollouts, limits) for name, rollouts in found.items()}
    rates = {name: [tokens[name] / s for s in seconds[name]] for name in calls}
    return {
        "slots_over_static": median_ratio(rates["slots"], rates["static"]),
        "tokens": tokens,
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
    }


def _without_stops(pair: Pair, max_new_tokens: int) -> Engine:
    shape = replace(pair.shape, max_new_tokens=max_new_tokens, stop_ids=())
    return Engine(*pair.graphs, shape=shape, sampling=SamplingConfig())


def longest_of_batches(limits: np.ndarray, batches: int) -> list[int]:
    """What each static batch waits for."""
    return [int(longest) for longest in limits.reshape(batches, -1).max(axis=1)]


def uneven_limits(count: int, seed: int) -> np.ndarray:
    """i32[count]: exponential of mean 16, from 1 to 96."""
    drawn = np.random.default_rng(seed).exponential(_MEAN_OF_UNEVEN, count)
    return np.clip(np.ceil(drawn), 1, _MOST_OF_UNEVEN).astype(np.int32)


def asked_tokens(rollouts: list[Rollouts], limits: np.ndarray | None) -> int:
    """Tokens of all responses, each up to its limit."""
    written = np.concatenate([np.asarray(r.lengths) - np.asarray(r.prompt_lengths) for r in rollouts])
    return int(written.sum() if limits is None else np.minimum(written, limits).sum())


def step_by_length(cfg: BenchSlotsConfig, pair: Pair) -> list[dict[str, float]]:
    """Milliseconds of a plain step behind texts of each length, all in programs of one capacity.

    A turn is a call of `steps` tokens and one of a single token; their difference is the steps'.
    """
    capacity, rows = max(cfg.lengths), 8
    shape = EngineShape(prompt_capacity=capacity, max_new_tokens=cfg.steps + 1, stop_ids=(), pad_id=0)
    slots = SlotShape(slots=rows, walk=64, chunk=capacity, read_rows=rows)
    engine = Engine(pair.graphs[0], None, shape=shape, sampling=SamplingConfig())
    prompts = jax.random.randint(jax.random.key(cfg.seed), (rows, capacity), 2, pair.policy_cfg.vocab_size)
    keys = request_keys(jax.random.key(cfg.seed + 1), rows)

    def call(length: int, tokens: int) -> Callable[[], Rollouts]:
        lengths, limits = jnp.full((rows,), length, jnp.int32), jnp.full((rows,), tokens, jnp.int32)
        request = Request(prompts.astype(jnp.int32), lengths, keys, no_context(rows), limits)
        return lambda: engine.generate(pair.published.policy, None, request, 0, slots=slots)

    calls = {(n, t): call(n, t) for n in cfg.lengths for t in (1, cfg.steps + 1)}
    seconds = compare({f"{n} {t}": c for (n, t), c in calls.items()}, cfg.repetitions)
    found = []
    for n in cfg.lengths:
        pairs = zip(seconds[f"{n} {cfg.steps + 1}"], seconds[f"{n} 1"], strict=True)
        found.append({"length": n, "milliseconds": 1e3 * statistics.median(a - b for a, b in pairs) / cfg.steps})
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'policy':8} {'responses':10} {'k':>3} {'static':>9} {'slots':>9} {'slots / static':>15}   tokens/s"]
    for cell in found["cells"]:
        speed = cell["tokens_per_second"]
        lines.append(
            f"{cell['policy']:8} {cell['kind']:10} {cell['draft_length']:>3} {speed['static']:>9.0f} "
            f"{speed['slots']:>9.0f} {cell['slots_over_static']:>14.2f}x"
        )
    steps = ", ".join(f"{row['length']}: {row['milliseconds']:.2f} ms" for row in found["step_by_length"])
    lines.append(f"A plain step of 8 rows of the 0.4M policy by tokens before it: {steps}")
    return "\n".join(lines)


def last_line(found: dict[str, Any]) -> str:
    """What to remember."""
    best = max(found["cells"], key=lambda cell: cell["slots_over_static"])
    worst = min(found["cells"], key=lambda cell: cell["slots_over_static"])
    tell = lambda c: f"{c['slots_over_static']:.2f}x ({c['policy']}, {c['kind']}, k = {c['draft_length']})"  # noqa: E731
    return f"Slots over static batches: at best {tell(best)}, at worst {tell(worst)}"
