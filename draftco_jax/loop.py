"""The RL step, in the order in which data moves.

    prompts -> generate (propose, verify, commit) -> score -> pack -> update (policy, taps, draft) -> publish

Each stage below is one named call; `types.py` has the records that pass between them, `run.py` the set-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.checkpoint import Checkpointer
from draftco_jax.config import RunConfig
from draftco_jax.data.packing import pack
from draftco_jax.decoding.cost_table import CostTable, Setting
from draftco_jax.decoding.stats import accepted_length_by_length, length_edges, speculation_stats
from draftco_jax.drafts.catalog import family_of
from draftco_jax.errors import UserError
from draftco_jax.evaluation import build_request
from draftco_jax.losses.advantages import zero_variance_fraction
from draftco_jax.losses.shaping import kept_answers
from draftco_jax.metrics import MetricsWriter, Progress, read_metrics, read_summary, write_summary
from draftco_jax.profiling import StageClock
from draftco_jax.report import write_report
from draftco_jax.report.write import REPORT_FILE
from draftco_jax.rewards.scoring import score_all
from draftco_jax.rollout.speculation import COSTS_FILE, costs_of_run
from draftco_jax.run import DRAFT_FOLDER, Run, check_directory, claim_directory, resume_data, set_up, start_or_resume
from draftco_jax.summary import summarise_run
from draftco_jax.training.algorithm import advantages_of
from draftco_jax.training.update import TrainState, draft_updates
from draftco_jax.types import PackedBatch, PolicyVersion, Prompt, Rollouts, ScoredRollouts, StepReport
from draftco_jax.weight_sync import Published

_ALARM = "rollout/speculation_alarm"


def train(cfg: RunConfig, run_dir: str | Path, *, resume: bool = False) -> dict[str, Any]:
    """Train, leave everything in the run directory, return the summary. A finished run is left as it is."""
    run_dir, started = Path(run_dir), time.perf_counter()
    check_directory(cfg, run_dir, resume)
    if (run_dir / REPORT_FILE).is_file() and (finished := read_summary(run_dir)):
        return finished
    run, models = set_up(cfg)  # before anything is written: a config that cannot be set up leaves no run directory
    claim_directory(cfg, run_dir)
    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpointer(run_dir, cfg.checkpoint.keep))
        state = start_or_resume(run, models, checkpoints, resume)
        del models  # the first update takes their memory
        first = int(state.step)
        # Step 0 is the evaluation before training; with no finished checkpoint it is measured again.
        if first > 0:
            check_metrics(run_dir, first)
        writer = stack.enter_context(MetricsWriter(run_dir, (first or -1) if resume else None))
        progress = stack.enter_context(Progress(cfg.steps, done_steps=first))
        weights = publish(run, state)
        for note in (*run.task.notes, *run.evaluator.notes):
            progress.note(note)
        if first == 0:
            progress.stage("first evaluation (compiles the rollout program)")
            writer.write(StepReport(0, evaluate(run, weights)))
        if run.speculation is not None:
            progress.stage("measuring what rounds cost")
            if first > 0 and not (run_dir / COSTS_FILE).is_file():
                raise UserError(
                    f"run_dir={run_dir} lacks {COSTS_FILE}, by which it chose its draft lengths; put the file back, or "
                    "start over in another run directory"
                )
            run.speculation.costs = costs_of_run(run_dir, *round_costs(run, weights))
        progress.stage("training")
        batch, alarmed = None, False
        for step in range(first + 1, cfg.steps + 1):
            state, weights, batch, report = train_step(run, state, weights, step)
            writer.write(report)
            progress.update(step, report.metrics)
            check_finite(report)
            alarmed = alarmed or sound_alarm(report, progress)
            if _due(step, cfg.checkpoint.every_steps) or step == cfg.steps:
                checkpoints.save(state, run.key, resume_data(run))
        export_draft(run, state, run_dir)
        if batch is None:  # resumed after the last step: the timed update needs some batch
            batch = make_batch(run, weights, next(run.prompts), cfg.steps)
        summary = summarise_run(run, state, weights, batch, read_metrics(run_dir), progress.stage)
        (run_dir / REPORT_FILE).unlink(missing_ok=True)  # one of the unfinished run: with a summary it means finished
        write_summary(run_dir, summary | {"wall_seconds": time.perf_counter() - started})
    write_report(run_dir)
    return read_summary(run_dir)


def check_metrics(run_dir: Path, first: int) -> None:
    """A resumed run needs the lines of every step before it, or its summary would start in the middle."""
    steps = [int(line["step"]) for line in read_metrics(run_dir)]
    missing = sorted(set(range(first + 1)) - set(steps))
    if missing:
        raise UserError(
            f"run_dir={run_dir}: metrics.jsonl lacks step {missing[0]}, but the checkpoint is of step {first}; "
            "put the file back, or start over in another run directory"
        )


def check_finite(report: StepReport) -> None:
    """Stop before a broken policy or draft is saved over a good checkpoint; a draft of NaN never recovers either."""
    for part in ("policy", "draft"):
        norm = report.metrics.get(f"{part}/gradient_norm", 0.0)  # none where no draft is trained
        if not np.isfinite(norm):
            raise UserError(
                f"step {report.step}: {part}/gradient_norm={norm} must be finite; the run stopped before it saved "
                f"this step: lower {part}_optimizer.learning_rate, or resume from the checkpoint before it"
            )


def sound_alarm(report: StepReport, progress: Progress) -> bool:
    """Say that speculation has stopped helping, if it has; whether that was said."""
    if not report.metrics.get(_ALARM):
        return False
    progress.note(
        f"step {report.step}: accepted length {report.metrics['rollout/accepted_length']:.2f} is below "
        "accepted_length_alarm; the output is still exact, but drafting no longer pays: pre-train the draft on the "
        "policy's own rollouts (draftco pretrain-draft), raise draft_optimizer.learning_rate, or use speculation=off"
    )
    return True


def train_step(
    run: Run, state: TrainState, weights: Published, step: int
) -> tuple[TrainState, Published, PackedBatch, StepReport]:
    """One step: rollouts with the published weights, an update, and the next publish.

    The update takes the memory of `state`: what is returned replaces it.
    """
    clock = StageClock()
    prompts = next(run.prompts)
    with clock.stage("generate"):
        rollouts, control_metrics = generate(run, weights, prompts, step)
    with clock.stage("score"):
        scored = score_rollouts(run, prompts, rollouts, weights.version)
        batch = pack_rollouts(run, scored)
    due = draft_due(run, step, rollouts)
    updates = draft_updates(state) if due else None
    with clock.stage("update"):
        update = run.rest if due is False else run.update
        state, update_metrics = jax.block_until_ready(update(state, batch, *_update_inputs(run)))
    with clock.stage("publish"):
        weights = publish(run, state)
    metrics = _rollout_metrics(scored, clock.seconds["generate"], run) | _on_host(update_metrics)
    metrics |= {} if due is None else {"draft/trained": float(due)}
    metrics |= control_metrics | _learning_rates(run, step, updates) | {"policy_version": float(scored.version.step)}
    if _due(step, run.cfg.evaluation.every_steps) or step == run.cfg.steps:
        metrics |= evaluate(run, weights)
    times = {f"time_seconds/{name}": seconds for name, seconds in clock.seconds.items()}
    times["time_seconds/step"] = sum(clock.seconds.values())
    return state, weights, batch, StepReport(step, metrics | times)


def draft_due(run: Run, step: int, rollouts: Rollouts) -> bool | None:
    """Whether the draft trains in this step; None where there is none to train."""
    if not run.cotrained:
        return None
    return run.cfg.draft_schedule.due(step, speculation_stats(rollouts).accepted_length)


def generate(run: Run, weights: Published, prompts: Sequence[Prompt], step: int) -> tuple[Rollouts, dict[str, float]]:
    """Roll out every prompt G times, on the host when it returns; what chose the draft lengths says how it went."""
    samples, metrics = run.cfg.rollout.samples_per_prompt, {}
    request = build_request(prompts, samples, run.engine.shape, run.step_key(step), run.history)
    if run.speculation is None:
        rollouts = run.engine.generate(weights.policy, weights.draft, request, run.draft_length, run.slots)
    else:
        assert run.slots is not None
        served = run.engine.serve(weights.policy, weights.draft, request, run.slots, run.speculation.control)
        rollouts, metrics = served.rollouts, run.speculation.after(served)
    rollouts = jax.device_get(rollouts)
    if run.history is not None:
        run.history.add(prompts, rollouts)
    return rollouts, metrics


def round_costs(run: Run, weights: Published) -> tuple[Setting, Callable[[Setting], CostTable]]:
    """What decides how long a round takes, and how to measure it."""
    shape, slots, device = run.engine.shape, run.slots, jax.devices()[0]
    assert slots is not None and weights.draft is not None
    setting = {
        "device": device.device_kind,
        "slots": slots.slots,
        "prompt_capacity": shape.prompt_capacity,
        "max_new_tokens": shape.max_new_tokens,
        "policy_parameters": sum(x.size for x in jax.tree.leaves(weights.policy)),
        "draft_parameters": sum(x.size for x in jax.tree.leaves(weights.draft)),
    }
    prompts = tuple(run.task.problem(0) for _ in range(slots.slots))
    context = build_request(prompts, 1, shape, run.speed_key, run.history).context
    return setting, lambda setting: run.engine.measure_rounds(weights.policy, weights.draft, context, slots, setting)


def score_rollouts(run: Run, prompts: Sequence[Prompt], rollouts: Rollouts, version: PolicyVersion) -> ScoredRollouts:
    """Attach rewards."""
    scores = score_all(run.task, prompts, rollouts, run.task.tokenizer, run.cfg.rollout.samples_per_prompt)
    return ScoredRollouts(rollouts, tuple(prompts), jnp.asarray(scores.rewards), version, scores.metrics())


def pack_rollouts(run: Run, scored: ScoredRollouts) -> PackedBatch:
    """Advantages, then training rows, where the update wants them: as many as sequences, so that they always fit."""
    advantages, _ = _advantages(run, scored)
    rows, row_tokens = scored.rollouts.tokens.shape
    kept = None
    if run.cfg.algorithm.overlong_filter:
        kept = np.asarray(kept_answers(jnp.asarray(scored.rollouts.finished)))
    batch = pack(scored, np.asarray(advantages), row_tokens, rows, kept=kept)
    return run.layout.place_batch(batch, run.spec.draft_cfg)


def _advantages(run: Run, scored: ScoredRollouts) -> tuple[jax.Array, jax.Array]:
    """Advantages, and the rewards they were made of."""
    rewards = jnp.asarray(scored.rewards)
    tokens = np.asarray(scored.rollouts.lengths) - np.asarray(scored.rollouts.prompt_lengths)
    return advantages_of(
        run.cfg.algorithm,
        rewards,
        jnp.asarray(tokens.reshape(rewards.shape), jnp.int32),
        max_response_tokens=run.engine.shape.max_new_tokens,
    )


def make_batch(run: Run, weights: Published, prompts: Sequence[Prompt], step: int) -> PackedBatch:
    """Generate, score and pack in one go."""
    rollouts, _ = generate(run, weights, prompts, step)
    return pack_rollouts(run, score_rollouts(run, prompts, rollouts, weights.version))


def publish(run: Run, state: TrainState) -> Published:
    """Policy and draft to the rollout layout under one version."""
    return run.published(state, state.draft if run.cotrained else run.kept.draft)


def export_draft(run: Run, state: TrainState, run_dir: Path) -> None:
    """Leave a co-trained draft in its family's published layout: to be served, or trained further."""
    if not run.cotrained:
        return
    assert run.cfg.draft is not None and run.spec.draft_graph is not None and state.draft is not None
    save = family_of(run.cfg.draft).save
    assert save is not None, "what is trained has weights, which its family can write"
    save(run_dir / DRAFT_FOLDER, run.cfg.draft, run.spec.draft_graph, state.draft)


def evaluate(run: Run, weights: Published) -> dict[str, float]:
    """Pass rate and accepted length on the held-out prompts."""
    result = run.evaluator.run(
        run.engine,
        weights.policy,
        weights.draft,
        run.evaluation_key,
        draft_length=run.draft_length,
        history=run.history,
    )
    metrics = {"eval/pass_rate": result.pass_rate, "eval/prompts": float(result.prompts)}
    metrics |= {f"eval/{name}": value for name, value in result.at_k.items()}
    if result.accepted_length is not None:
        metrics["eval/accepted_length"] = result.accepted_length
    return metrics


def _update_inputs(run: Run) -> tuple[Any, Any, Any]:
    """lambda, the reference policy of the penalty, and the draft that is evaluated without being trained."""
    return jnp.float32(run.cfg.draft_loss_weight), run.reference, run.twin


def _rollout_metrics(scored: ScoredRollouts, seconds: float, run: Run) -> dict[str, float]:
    rollouts, rewards = scored.rollouts, np.asarray(scored.rewards)
    response_tokens = np.asarray(rollouts.lengths) - np.asarray(rollouts.prompt_lengths)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "rollout/tokens": float(response_tokens.sum()),
        "rollout/response_tokens_mean": float(response_tokens.mean()),
        "rollout/truncated_fraction": float(1.0 - np.asarray(rollouts.finished).mean()),
        "rollout/tokens_per_second": float(response_tokens.sum() / seconds),
    }
    metrics |= scored.reward_metrics
    algorithm = run.cfg.algorithm
    if algorithm.reward_range is not None or algorithm.overlong_buffer > 0:
        metrics["reward/shaped_mean"] = float(_advantages(run, scored)[1].mean())
    if run.cfg.algorithm.group_baseline:  # elsewhere a group whose rewards are equal teaches as any other
        metrics["reward/zero_variance_groups_fraction"] = float(zero_variance_fraction(jnp.asarray(rewards)))
    stats = speculation_stats(rollouts)
    if stats.experts_touched is not None:
        metrics["rollout/experts_touched_per_forward"] = stats.experts_touched
    if stats.acceptance_rate is not None:
        metrics["rollout/acceptance_rate"] = stats.acceptance_rate
    if stats.accepted_length is not None and stats.accepted_length_papers is not None:
        metrics["rollout/proposed_per_round"] = stats.proposed / stats.rounds
        metrics["rollout/rounds"] = float(stats.rounds)
        metrics["rollout/accepted_length"] = stats.accepted_length
        metrics[_ALARM] = float(stats.accepted_length < run.cfg.accepted_length_alarm)
        metrics["rollout/accepted_length_papers"] = stats.accepted_length_papers
        for position, rate in enumerate(stats.acceptance_rate_by_position, start=1):
            metrics[f"rollout/acceptance_rate_position_{position}"] = rate
        edges = length_edges(run.engine.shape.max_new_tokens)
        for name, length in accepted_length_by_length(rollouts, edges).items():
            metrics[f"rollout/accepted_length_of_responses_{name}"] = length
    return metrics


def _learning_rates(run: Run, step: int, updates: int | None) -> dict[str, float]:
    """Rates the step's update used, optax counting from 0: `updates` of the draft before it, None where it rests."""
    rates = {"policy/learning_rate": float(run.policy_schedule(step - 1))}
    if updates is not None:
        rates["draft/learning_rate"] = float(run.draft_schedule(updates))
    return rates


def _on_host(metrics: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
