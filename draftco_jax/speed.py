"""The speed comparison at the end of a run: what speculation and draft training cost and gain here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.decoding.stats import speculation_stats
from draftco_jax.evaluation import build_request
from draftco_jax.profiling import compare, median_ratio, summarise
from draftco_jax.run import Run
from draftco_jax.training.update import Optimizers, TrainState, init_state, make_update
from draftco_jax.types import PackedBatch
from draftco_jax.weight_sync import Published

_PLAIN = 0


def rollout_speed(run: Run, weights: Published, batch: int) -> list[dict[str, Any]]:
    """Tokens per second of plain decoding and of each drafted length at one batch size, taken in turn."""
    lengths = (_PLAIN, *run.cfg.speed.draft_lengths)
    prompts = tuple(run.task.problem(i) for i in range(batch))
    # A different key each turn: a speed that holds for one lucky sample only is no speed.
    requests = [
        build_request(prompts, 1, run.engine.shape, jax.random.fold_in(run.speed_key, turn))
        for turn in range(run.cfg.speed.repetitions + 1)
    ]
    results: dict[int, list[Any]] = {length: [] for length in lengths}

    def call(length: int) -> Callable[[], Any]:
        def generate() -> Any:
            rollouts = run.engine.generate(weights.policy, weights.draft, requests[len(results[length])], length)
            results[length].append(rollouts)
            return rollouts

        return generate

    seconds = compare({str(length): call(length) for length in lengths}, run.cfg.speed.repetitions)
    rows = []
    for length in lengths:
        timed = results[length][1:]  # the first call compiled
        tokens = [int(np.sum(np.asarray(r.lengths) - np.asarray(r.prompt_lengths))) for r in timed]
        rates = [t / s for t, s in zip(tokens, seconds[str(length)], strict=True)]
        stats = [speculation_stats(r) for r in timed]
        rounds = sum(s.rounds for s in stats)
        steps = [
            int(np.max(np.asarray(r.rounds))) if length else int(np.max(r.lengths - r.prompt_lengths)) for r in timed
        ]
        timing = summarise(rates)
        rows.append(
            {
                "batch": batch,
                "draft_length": length,
                "tokens_per_second": timing.median,
                "low": timing.low,
                "high": timing.high,
                "accepted_length": sum(s.committed for s in stats) / rounds if rounds else None,
                "round_milliseconds": 1e3 * summarise(seconds[str(length)]).median / float(np.median(steps)),
                "speedup": median_ratio(rates, plain_rates)
                if (plain_rates := _rates(results, seconds, _PLAIN))
                else 1.0,
            }
        )
    return rows


def _rates(results: dict[int, list[Any]], seconds: dict[str, list[float]], length: int) -> list[float]:
    tokens = [float(np.sum(np.asarray(r.lengths) - np.asarray(r.prompt_lengths))) for r in results[length][1:]]
    return [t / s for t, s in zip(tokens, seconds[str(length)], strict=True)]


def step_speed(run: Run, state: TrainState, weights: Published, batch: PackedBatch) -> dict[str, float]:
    """What a whole training step costs with and without speculation and draft, at the run's own batch size.

    end_to_end_speedup = (plain generate + policy-only update) / (speculative generate + joint update), each the median
    of calls taken in turn on the same prompts; scoring and publishing are the same in both and cancel on this scale.
    draft_update_overhead = joint update / policy-only update - 1.
    """
    cfg = run.cfg
    prompts = tuple(run.task.problem(i) for i in range(cfg.rollout.prompts_per_step))
    request = build_request(prompts, cfg.rollout.samples_per_prompt, run.engine.shape, run.speed_key)
    weight, frozen = jnp.float32(cfg.draft_loss_weight), run.models.draft if run.cotrained else None
    policy_only = Optimizers(run.optimizers.policy, None)
    update_plain = make_update(run.spec, None, policy_only)
    state_plain = init_state(state.policy, None, policy_only)
    calls: dict[str, Callable[[], Any]] = {
        "generate_plain": lambda: run.engine.generate(weights.policy, None, request, 0),
        "generate_speculative": lambda: run.engine.generate(weights.policy, weights.draft, request, run.draft_length),
        "update_plain": lambda: update_plain(state_plain, batch, weight),
        "update_joint": lambda: run.update(state, batch, weight, None, None),
        "update_twin": lambda: run.update(state, batch, weight, None, frozen),
    }
    seconds = compare(calls, max(3, cfg.speed.repetitions // 3))
    plain = [a + b for a, b in zip(seconds["generate_plain"], seconds["update_plain"], strict=True)]
    joint = [a + b for a, b in zip(seconds["generate_speculative"], seconds["update_joint"], strict=True)]
    return {
        "end_to_end_speedup": median_ratio(plain, joint),
        "draft_update_overhead": median_ratio(seconds["update_joint"], seconds["update_plain"]) - 1.0,
        "frozen_twin_overhead": median_ratio(seconds["update_twin"], seconds["update_plain"])
        - median_ratio(seconds["update_joint"], seconds["update_plain"]),
        "training_batch_rollout_speedup": median_ratio(seconds["generate_plain"], seconds["generate_speculative"]),
    }
