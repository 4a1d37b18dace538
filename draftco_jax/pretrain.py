"""Train a draft for a policy before any run, on the policy's own answers to prompts of the task it will serve.

    own rollouts -> packed rows -> steps on the draft's loss [-> steps on the adaptation's loss] -> draft/

In-domain answers of the policy itself are the initialisation that arXiv 2604.26779 recommends; the second phase on
total variation is Bebop's (arXiv 2606.12370). The policy does not change. Everything a step uses is a function of the
config and the step's number, so a resumed training needs the state of the draft and its optimizer only. The rollouts
are kept in the directory; without that file a resume makes them again, and refuses to go on with others.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

from draftco_jax.checkpoint import Checkpointer
from draftco_jax.drafts.base import TrainingContext
from draftco_jax.drafts.catalog import family_of
from draftco_jax.errors import UserError
from draftco_jax.loop import check_metrics
from draftco_jax.metrics import MetricsWriter, Progress, read_metrics, read_summary, write_summary
from draftco_jax.models.functional import Params
from draftco_jax.models.transformer import count_parameters
from draftco_jax.pretrain_config import Phase, PretrainConfig
from draftco_jax.pretrain_setup import Pretraining, prepare, rollouts_of, set_up
from draftco_jax.report.figure_style import to_png
from draftco_jax.report.plots_pretrain import held_out_accepted_length
from draftco_jax.report.run_data import load_run
from draftco_jax.run import DRAFT_FOLDER, check_directory, claim_directory
from draftco_jax.training.optimizer import learning_rate_schedule, make_optimizer
from draftco_jax.training.pretrain_draft import PretrainSpec, draft_of, init_state, make_mass_outside, make_step
from draftco_jax.training.update import TrainState
from draftco_jax.types import StepReport

FIGURE_FILE = "accepted_length.png"
_MASS_TOKENS = 2**13
"""So many give the mean well enough, and the forwards of a large policy over all of them would take long."""


def pretrain(cfg: PretrainConfig, run_dir: str | Path, *, resume: bool = False) -> dict[str, Any]:
    """Train, leave everything in the directory, return the summary. A finished training is left as it is.

    The draft that is written is that of the last step; the summary also says at which step the held-out accepted length
    was best.
    """
    run_dir, started = Path(run_dir), time.perf_counter()
    check_directory(cfg, run_dir, resume)
    if finished := read_summary(run_dir):
        return finished
    setting, loaded = set_up(cfg)  # before anything is written: a config that cannot be set up leaves no directory
    claim_directory(cfg, run_dir)
    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpointer(run_dir, cfg.checkpoint.keep))
        first = (checkpoints.latest_step or 0) if resume else 0
        if first > 0:
            check_metrics(run_dir, first)
        writer = stack.enter_context(MetricsWriter(run_dir, (first or -1) if resume else None))
        progress = stack.enter_context(Progress(cfg.total_steps, done_steps=first, title="pretrain-draft"))
        progress.stage("the policy's own rollouts")
        run, start = prepare(setting, loaded, rollouts_of(setting, run_dir))
        state = start_or_resume(run, start, checkpoints, first)
        del loaded, start  # the first step takes their memory
        if first == 0:
            progress.stage("first evaluation (compiles the rollout program)")
            writer.write(StepReport(0, first_metrics(run, draft_of(state))))
        progress.stage("training")
        for phase in cfg.phases:
            state = train_phase(run, phase, state, checkpoints, writer, progress)
        summary = finish(run, state, run_dir)
        write_summary(run_dir, summary | {"wall_seconds": time.perf_counter() - started})
    return read_summary(run_dir)


def train_phase(
    run: Pretraining,
    phase: Phase,
    state: TrainState,
    checkpoints: Checkpointer,
    writer: MetricsWriter,
    progress: Progress,
) -> TrainState:
    """The steps of a phase that are still to be taken; its first one starts with a fresh optimizer.

    They take the memory of `state`: what is returned replaces it.
    """
    cfg, done = run.cfg, int(state.step)
    if done >= phase.last_step:
        return state
    optimizer = make_optimizer(phase.optimizer, phase.steps)
    if done == phase.first_step - 1:
        state = state._replace(draft_optimizer=optimizer.init(draft_of(state)))
    step_fn = make_step(spec_of(run, phase), optimizer)
    rate, rows = learning_rate_schedule(phase.optimizer, phase.steps), run.data.tokens.shape[0]
    for step in range(done + 1, phase.last_step + 1):
        begun = time.perf_counter()
        index = rows_of_step(rows, cfg.batch_rows, step, cfg.seed)
        batch = jax.tree.map(lambda array, index=index: jnp.asarray(array[index]), run.data)
        state, found = step_fn(state, run.setting.policy, batch)
        metrics = {name: float(value) for name, value in jax.device_get(found).items()}
        # optax counts from 0.
        metrics["draft/learning_rate"] = float(jnp.asarray(rate(step - phase.first_step)))
        metrics |= {"phase": float(phase.number), "time_seconds/step": time.perf_counter() - begun}
        _check_finite(step, metrics)
        if _due(step, cfg.evaluation.every_steps) or step == phase.last_step:
            metrics |= run.accepted_length(draft_of(state))
        writer.write(StepReport(step, metrics))
        _show(progress, step, metrics)
        if _due(step, cfg.checkpoint.every_steps) or step == cfg.total_steps:
            checkpoints.save(state, run.setting.key, {"starting": run.starting})
    return state


def rows_of_step(rows: int, size: int, step: int, seed: int) -> Int64[np.ndarray, " R"]:
    """Rows of step `step`, counted from 1: an epoch walks a permutation of its own, and leaves out what is left over.

    A function of (seed, step) only. Over several epochs each row is left out as often as any other.
    """
    epoch, place = divmod(step - 1, rows // size)
    order = np.random.default_rng((seed, epoch)).permutation(rows)
    return order[place * size : (place + 1) * size].astype(np.int64)


def start_or_resume(run: Pretraining, start: Params, checkpoints: Checkpointer, first: int) -> TrainState:
    """The state of the checkpoint of step `first`, or step 0, made of the arrays of `start`."""
    phase = run.cfg.phases[0]
    state = init_state(start, make_optimizer(phase.optimizer, phase.steps))
    if first == 0:
        return state
    restored = checkpoints.restore(first, state, run.setting.key)
    for part, number in run.starting.items():
        if restored.data["starting"][part] != number:
            raise UserError(
                f"the {part} are not those that checkpoint step {first} was trained with; put the files back, or "
                "choose another run directory"
            )
    return restored.state


def first_metrics(run: Pretraining, start: Params) -> dict[str, float]:
    """Step 0: the draft before training, a drawn one beside it, and what a reduced vocabulary leaves out."""
    metrics = run.accepted_length(start)
    metrics["eval/untrained_accepted_length"] = run.accepted_length(run.untrained())["eval/accepted_length"]
    if run.kept is not None:
        metrics["draft/mass_outside_vocabulary"] = mass_outside(run)
    return metrics


def mass_outside(run: Pretraining) -> float:
    """The policy's mass outside the draft vocabulary, mean over its own tokens in the first `_MASS_TOKENS`."""
    assert run.kept is not None
    cfg, size, rows = run.cfg, run.cfg.batch_rows, run.data.tokens.shape[0]
    measure = make_mass_outside(run.setting.policy_graph, run.kept, cfg.rollout.sampling, cfg.chunk_tokens)
    # Whole batches only, so that one program is compiled: rows left over at the end are not counted.
    most = max(1, _MASS_TOKENS // run.data.tokens[:size].size) * size
    starts = range(0, min(rows - size + 1, most), size)
    batches = (jax.tree.map(lambda a, i=i: jnp.asarray(a[i : i + size]), run.data) for i in starts)
    sums = np.array([jax.device_get(measure(run.setting.policy, batch)) for batch in batches], np.float64)
    return float(sums[:, 0].sum() / sums[:, 1].sum())


def finish(run: Pretraining, state: TrainState, run_dir: Path) -> dict[str, Any]:
    """Write the draft in its family's layout and the figure; return the headline numbers."""
    cfg, family = run.cfg, family_of(run.cfg.draft)
    assert family.save is not None
    family.save(run_dir / DRAFT_FOLDER, cfg.draft, run.draft_graph, draft_of(state))
    adapted_from = cfg.steps if cfg.adaptation else None
    drawn = held_out_accepted_length(load_run(run_dir), cfg.draft_length, adapted_from)
    (run_dir / FIGURE_FILE).write_bytes(to_png(drawn.figure))
    return summarise(run, count_parameters(draft_of(state)), read_metrics(run_dir))


def summarise(run: Pretraining, draft_parameters: int, lines: list[dict[str, float]]) -> dict[str, Any]:
    """Accepted lengths of the whole training and of its phases, and what they were made with."""
    lengths = {int(line["step"]): line["eval/accepted_length"] for line in lines if "eval/accepted_length" in line}

    def between(first: int, last: int) -> dict[str, float]:
        inside = {step: length for step, length in lengths.items() if first <= step <= last}
        best = max(inside, key=lambda step: inside[step])
        return {"start": inside[first], "best": inside[best], "best_step": best, "end": inside[last]}

    cfg, labels = run.cfg, np.asarray(run.data.label_mask)
    outside = lines[0].get("draft/mass_outside_vocabulary")
    return {
        "family": family_of(cfg.draft).name,
        "draft_parameters": draft_parameters,
        "draft_length": cfg.draft_length,
        "accepted_length": {"untrained": lines[0]["eval/untrained_accepted_length"]} | between(0, cfg.total_steps),
        "phases": [
            {
                "first_step": phase.first_step,
                "last_step": phase.last_step,
                "accepted_length": between(phase.first_step - 1, phase.last_step),
            }
            for phase in cfg.phases
        ],
        "rollout_tokens": int(labels.sum()),
        "epochs": cfg.total_steps / (labels.shape[0] // cfg.batch_rows),
        "mass_outside_vocabulary": outside,
        "acceptance_ceiling": None if outside is None else 1.0 - outside,
        "training_seconds": sum(line.get("time_seconds/step", 0.0) for line in lines),
    }


def spec_of(run: Pretraining, phase: Phase) -> PretrainSpec:
    """What the steps of a phase are compiled with."""
    cfg = run.cfg
    return PretrainSpec(
        policy_graph=run.setting.policy_graph,
        draft_cfg=phase.draft,
        kept=run.kept,
        context=TrainingContext(cfg.rollout.sampling, cfg.chunk_tokens, cfg.draft_length),
        draft_dtype=cfg.draft_compute.dtype,
        seed=cfg.seed,
    )


def _check_finite(step: int, metrics: dict[str, float]) -> None:
    """Stop before a broken draft is saved over a good checkpoint."""
    for name in ("draft/loss", "draft/gradient_norm"):
        if not np.isfinite(metrics[name]):
            raise UserError(
                f"step {step}: {name}={metrics[name]} must be finite; the training stopped before it saved this step: "
                "lower the optimizer's learning_rate in another run directory"
            )


def _show(progress: Progress, step: int, metrics: dict[str, float]) -> None:
    """The newest held-out accepted length stands where a run shows that of its rollouts."""
    length = metrics.get("eval/accepted_length")
    progress.update(step, {} if length is None else {"rollout/accepted_length": length})


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
