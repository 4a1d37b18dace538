"""The headline numbers of a finished run, measured at its end on the held-out prompts and on the clock."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from draftco_jax.models.functional import Params
from draftco_jax.models.transformer import count_parameters
from draftco_jax.round_profile import profile_round
from draftco_jax.run import Run
from draftco_jax.speed import PLAIN, rollout_speed, step_speed
from draftco_jax.training.update import TrainState
from draftco_jax.types import PackedBatch
from draftco_jax.weight_sync import Published

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def summarise_run(
    run: Run,
    state: TrainState,
    weights: Published,
    batch: PackedBatch,
    metrics: Sequence[Mapping[str, float]],
    stage: Callable[[str], None],
) -> dict[str, Any]:
    """Everything that `summary.json` holds, the wall time apart. Timed updates take the memory of `state`."""
    cfg, last = run.cfg, metrics[-1]
    first = next(line for line in metrics if line["step"] == 0)
    steps = [line for line in metrics if line["step"] > 0]
    summary: dict[str, Any] = {
        "speculation": cfg.speculation,
        "steps": cfg.steps,
        "draft_length": run.draft_length,
        "policy_parameters": count_parameters(run.kept.policy_shapes),
        "pass_rate_start": first["eval/pass_rate"],
        "pass_rate_end": last["eval/pass_rate"],
        "eval_prompts": cfg.evaluation.prompts,
        "generator_trainer_kl_max": _largest(steps, "agreement/kl_k3"),
        "generator_trainer_logprob_diff_max": _largest(steps, "agreement/logprob_diff_max"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "hardware": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "device": str(jax.devices()[0].device_kind),
            "devices": cfg.mesh.devices,
        },
    }
    if run.kept.draft is None:
        return summary
    summary |= {
        "draft_parameters": count_parameters(run.kept.draft),
        "accepted_length_start": first.get("eval/accepted_length"),
        "accepted_length_end": last.get("eval/accepted_length"),
    }
    if run.twin is not None:  # other drafts have no weights that training could have moved
        stage("accepted length of the twin and of an untrained draft")
        summary |= {
            "accepted_length_frozen_end": _accepted_length(run, state, run.kept.draft),
            "accepted_length_untrained": _accepted_length(run, state, run.untrained_draft()),
        }
    if cfg.speed.repetitions > 0:
        stage("timing plain and speculative rollouts in turn")
        summary |= _speed(run, state, weights, batch)
    return summary


def _largest(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Largest value of all steps; NaN if any is, which Python's max hides."""
    return float(np.max([line[name] for line in steps]))


def _accepted_length(run: Run, state: TrainState, draft: Params) -> float | None:
    """Accepted length of another draft with the final policy, on the held-out prompts."""
    weights = run.published(state, draft)
    return run.evaluator.run(
        run.engine,
        weights.policy,
        weights.draft,
        run.evaluation_key,
        draft_length=run.draft_length,
        history=run.history,
    ).accepted_length


def _speed(run: Run, state: TrainState, weights: Published, batch: PackedBatch) -> dict[str, Any]:
    """Rollout speed by batch and drafted length, and whole-step speed.

    The drafted length is chosen on one set of turns and its speedup measured on another: the best of several noisy
    figures would flatter itself.
    """
    speed = run.cfg.speed
    table = [row for size in speed.batches for row in rollout_speed(run, weights, size, speed.draft_lengths)]
    size = speed.batches[0]
    candidates = [row for row in table if row["batch"] == size and row["draft_length"] != PLAIN]
    chosen = max(candidates, key=lambda row: row["speedup"])["draft_length"]
    plain, best = rollout_speed(run, weights, size, (chosen,), first_turn=speed.repetitions + 1)
    steps = step_speed(run, state, weights, batch)
    parts = profile_round(run, weights, size, chosen)
    return {
        "tokens_per_second_plain": plain["tokens_per_second"],
        "tokens_per_second_speculative": best["tokens_per_second"],
        "rollout_speedup": best["speedup"],
        "rollout_speedup_draft_length": chosen,
        "end_to_end_speedup": steps["end_to_end_speedup"],
        "draft_update_overhead": steps.get("draft_update_overhead"),
        "speed": {
            "table": table,
            "steps": steps,
            "round_parts_milliseconds": parts,
            "limits": _limits(plain, best, steps, parts, run),
        },
    }


def _limits(
    plain: Mapping[str, Any], best: Mapping[str, Any], steps: Mapping[str, float], parts: Mapping[str, float], run: Run
) -> str:
    """What the measured numbers say about the limit, in words; each figure is one of the tables'."""
    rows = run.cfg.rollout.prompts_per_step * run.cfg.rollout.samples_per_prompt
    if not best["accepted_length"]:
        return "No request had a verify round: every response ended at its first token, so there was nothing to draft."
    cost = best["round_milliseconds"] / plain["round_milliseconds"]
    drafted = best["draft_length"]
    tree = run.engine.shape.tree_of(drafted)
    block = f"{drafted + 1} tokens" if tree is None else f"the {tree.drafted + 1} nodes of a tree"
    return (
        f"Batch {plain['batch']}, prefill included: plain decoding takes {plain['round_milliseconds']:.3f} ms per "
        f"token; with {drafted} drafted tokens a verify round takes {best['round_milliseconds']:.3f} ms, as long as "
        f"{cost:.2f} plain tokens, and commits {best['accepted_length']:.2f}. Its parts, each timed alone: policy over "
        f"{block} {parts['policy_block']:.3f} ms (over one token {parts['policy_1_token']:.3f}), drawing "
        f"the drafts {parts['draft_propose']:.3f}, draft over the verified tokens {parts['draft_absorb']:.3f}; the "
        f"rest is rejection, bookkeeping, prefill and dispatch. Training batch of {rows} sequences: rollouts run at "
        f"{steps['training_batch_rollout_speedup']:.2f}x of plain with {run.draft_length} drafted tokens. Speculation "
        "trades arithmetic for passes over the weights; it gains where a pass over the weights costs more than the "
        "arithmetic of a few tokens, that is with larger policies at small batch, and loses where a few tokens cost a "
        "few times one."
    )
