"""The speed comparison at the end of a run: what speculation and draft training cost and gain here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.decoding.engine import Request
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.evaluation import build_request
from draftco_jax.models.functional import Params
from draftco_jax.profiling import compare, median_ratio, summarise
from draftco_jax.run import Run
from draftco_jax.training.update import Optimizers, TrainState
from draftco_jax.types import PackedBatch, Rollouts
from draftco_jax.weight_sync import Published

PLAIN = 0
"""Drafted length of plain decoding."""

CALLS_PER_TURN = 8
"""A generate call of a small policy takes about 2 ms. Timed one by one, in turn with other programs, each call would
begin with cold caches, which no rollout of many prompts does."""


def rollout_speed(
    run: Run, weights: Published, batch: int, lengths: Sequence[int], *, first_turn: int = 0
) -> list[dict[str, Any]]:
    """Speed of plain decoding and of each drafted length at one batch size, taken in turn; one row each.

    A turn is CALLS_PER_TURN whole generate calls, prefill included, one after another. Every call has other held-out
    prompts and other keys, the same for all lengths; `first_turn` chooses where in their sequence to begin. `speedup`
    is the median over turns of (tokens per second) / (tokens per second of plain decoding in the same turn).
    """
    lengths, repetitions = (PLAIN, *lengths), run.cfg.speed.repetitions
    turns = [_turn_requests(run, batch, first_turn + turn) for turn in range(repetitions + 1)]
    results: dict[int, list[list[Rollouts]]] = {length: [] for length in lengths}

    def call(length: int) -> Callable[[], list[Rollouts]]:
        def turn() -> list[Rollouts]:
            requests = turns[len(results[length])]
            results[length].append(
                [run.engine.generate(weights.policy, weights.draft, request, length) for request in requests]
            )
            return results[length][-1]

        return turn

    seconds = compare({str(length): call(length) for length in lengths}, repetitions)
    timed = {length: jax.device_get(results[length][1:]) for length in lengths}  # the first turn compiled
    rates = {
        length: [_new_tokens(turn) / s for turn, s in zip(timed[length], seconds[str(length)], strict=True)]
        for length in lengths
    }
    return [
        {"batch": batch, "draft_length": length, "speedup": median_ratio(rates[length], rates[PLAIN])}
        | _row(length, timed[length], rates[length], seconds[str(length)])
        for length in lengths
    ]


def _turn_requests(run: Run, batch: int, turn: int) -> list[Request]:
    prompts, requests = run.evaluator.prompts, []
    for number in range(turn * CALLS_PER_TURN, (turn + 1) * CALLS_PER_TURN):
        chosen = tuple(prompts[(number * batch + i) % len(prompts)] for i in range(batch))
        requests.append(
            build_request(chosen, 1, run.engine.shape, jax.random.fold_in(run.speed_key, number), run.history)
        )
    return requests


def _row(length: int, timed: Sequence[Sequence[Rollouts]], rates: list[float], seconds: list[float]) -> dict[str, Any]:
    """Milliseconds are those of a whole call over its rounds (tokens, in plain decoding) of the longest request."""
    calls = [rollouts for turn in timed for rollouts in turn]
    stats = [speculation_stats(r) for r in calls]
    rounds = sum(s.rounds for s in stats)
    steps = [int(np.max(r.rounds if length else r.lengths - r.prompt_lengths)) for r in calls]
    timing = summarise(rates)
    return {
        "tokens_per_second": timing.median,
        "low": timing.low,
        "high": timing.high,
        # A request that stops at its first token has no verify round.
        "accepted_length": sum(s.committed for s in stats) / rounds if rounds else None,
        "round_milliseconds": 1e3 * sum(seconds) / sum(steps) if sum(steps) else None,
    }


def _new_tokens(turn: Sequence[Rollouts]) -> float:
    return float(sum(np.sum(rollouts.lengths - rollouts.prompt_lengths) for rollouts in turn))


def step_speed(run: Run, state: TrainState, weights: Published, batch: PackedBatch) -> dict[str, float]:
    """What a whole training step costs with and without speculation and draft, at the run's own batch size.

    All are medians over turns of ratios within a turn, on the same prompts and the same batch:

        end_to_end_speedup = (plain generate + policy-only update) / (speculative generate + the run's update)
        draft_update_overhead = joint update / policy-only update - 1
        frozen_twin_overhead = (joint update with the twin - joint update) / policy-only update

    The run's update is counted without the frozen twin, which is there for the report only. Scoring and publishing are
    the same on both sides and left out. A run in slots is timed in slots, with `draft_length` in all rounds; the
    update is one that trains the draft, whatever the schedule. Overheads are given where a draft is trained. Each timed
    update takes the memory of the state before it, the first one that of `state`.
    """
    cfg = run.cfg
    prompts = tuple(run.task.problem(i) for i in range(cfg.rollout.prompts_per_step))
    request = build_request(prompts, cfg.rollout.samples_per_prompt, run.engine.shape, run.speed_key, run.history)
    updates = _Updates(run, state, batch)
    calls: dict[str, Callable[[], Any]] = {
        "generate_plain": lambda: run.engine.generate(weights.policy, None, request, PLAIN, _slots(run, PLAIN)),
        "generate_speculative": lambda: run.engine.generate(
            weights.policy, weights.draft, request, run.draft_length, _slots(run, run.draft_length)
        ),
        "update_plain": updates.plain,
    }
    if run.cotrained:
        calls["update_joint"] = lambda: updates.joint(None)
        calls["update_twin"] = lambda: updates.joint(run.twin)
    seconds = compare(calls, max(5, cfg.speed.repetitions // 3))
    update = seconds["update_joint" if run.cotrained else "update_plain"]
    plain = [a + b for a, b in zip(seconds["generate_plain"], seconds["update_plain"], strict=True)]
    speculative = [a + b for a, b in zip(seconds["generate_speculative"], update, strict=True)]
    figures = {
        "end_to_end_speedup": median_ratio(plain, speculative),
        "training_batch_rollout_speedup": median_ratio(seconds["generate_plain"], seconds["generate_speculative"]),
    }
    if run.cotrained:
        twin = [a - b for a, b in zip(seconds["update_twin"], seconds["update_joint"], strict=True)]
        figures["draft_update_overhead"] = median_ratio(seconds["update_joint"], seconds["update_plain"]) - 1.0
        figures["frozen_twin_overhead"] = median_ratio(twin, seconds["update_plain"])
    return figures


def _slots(run: Run, length: int) -> SlotShape | None:
    """The run's slots with one draft length."""
    return None if run.slots is None else replace(run.slots, draft_lengths=(length,), rule=None)


class _Updates:
    """Updates one after another on one batch, each in the memory of the state before it, as in the run."""

    def __init__(self, run: Run, state: TrainState, batch: PackedBatch) -> None:
        policy_only = Optimizers(run.optimizers.policy, None)
        self._plain = run.layout.make_update(replace(run.spec, draft_graph=None, draft_cfg=None), policy_only)
        self._joint, self._state, self._batch = run.update, state, batch
        self._weight, self._reference = jnp.float32(run.cfg.draft_loss_weight), run.reference

    def plain(self) -> Any:
        """Of the policy alone; the draft waits."""
        waiting = {"draft": self._state.draft, "draft_optimizer": self._state.draft_optimizer}
        alone = self._state._replace(draft=None, draft_optimizer=None)
        new, metrics = self._plain(alone, self._batch, self._weight, self._reference, None)
        self._state = new._replace(**waiting)
        return new, metrics

    def joint(self, twin: Params | None) -> Any:
        """The run's own, with a frozen twin or without."""
        self._state, metrics = self._joint(self._state, self._batch, self._weight, self._reference, twin)
        return self._state, metrics
