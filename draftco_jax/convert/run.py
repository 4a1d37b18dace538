"""Policy and draft out of a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from draftco_jax.checkpoint import Checkpointer, Restored, fingerprint
from draftco_jax.config import RunConfig, config_registry
from draftco_jax.config_io import from_json
from draftco_jax.convert.output import carry_over, cast_tree, write_draft, write_policy, write_tokenizer
from draftco_jax.convert.wishes import DTYPES, Converted, Wishes
from draftco_jax.drafts.catalog import family_of
from draftco_jax.environments.catalog import build_task
from draftco_jax.errors import UserError
from draftco_jax.models.functional import ModelGraph, abstract_params, initialise
from draftco_jax.run import load_trained_draft
from draftco_jax.training.optimizer import make_optimizer
from draftco_jax.training.update import Optimizers, init_state

POLICY_FOLDER, DRAFT_FOLDER = "policy", "draft"


def convert_run(run_dir: Path, raw: Mapping[str, Any], out: Path, wishes: Wishes, found: Converted) -> None:
    """Write the policy of a run's checkpoint and, where one was trained, its draft."""
    cfg = from_json(RunConfig, raw, config_registry())
    trained = cfg.speculation == "cotrained" and cfg.draft is not None
    if wishes.kind == "draft" and not trained:
        raise UserError(f"kind=draft: {run_dir} trained no draft (speculation={cfg.speculation}); leave kind out")
    step, restored = _restore(cfg, run_dir, wishes.step, trained)
    found.notes.append(f"checkpoint of step {step}")
    dtype = DTYPES[wishes.dtype or "float32"]
    if wishes.kind != "draft":
        folder, tokenizer = out / POLICY_FOLDER, build_task(cfg.task, cfg.seed).tokenizer
        write_policy(folder, cfg.policy, cast_tree(restored.state.policy, dtype), wishes.max_shard_bytes)
        carry_over({}, folder, str(dtype))
        write_tokenizer(folder, tokenizer)
        found.written["policy"] = folder
    if trained and wishes.kind != "policy":
        assert cfg.draft is not None and restored.state.draft is not None
        graph, folder = _draft_graph(cfg, run_dir, restored), out / DRAFT_FOLDER
        params = cast_tree(restored.state.draft, dtype)
        write_draft(folder, family_of(cfg.draft), cfg.draft, graph, params, wishes.max_shard_bytes)
        found.written["draft"] = folder


def _restore(cfg: RunConfig, run_dir: Path, step: int | None, trained: bool) -> tuple[int, Restored]:
    """The state of a finished checkpoint. Neither the starting weights nor the data are needed for it."""
    checkpoints = run_dir / "checkpoints"
    there = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    steps = sorted(int(name) for name in there if name.isdigit())
    if not steps:
        raise UserError(f"{run_dir} holds no checkpoint; continue the run with --resume until it has saved one")
    if step is not None and step not in steps:
        raise UserError(f"step={step} is not a checkpoint of {run_dir}; it has {', '.join(map(str, steps))}")
    zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
    draft = zeros(abstract_params(cfg.draft.build)) if trained and cfg.draft is not None else None
    optimizers = Optimizers(
        policy=make_optimizer(cfg.policy_optimizer, cfg.steps),
        draft=make_optimizer(cfg.draft_optimizer, cfg.steps) if trained else None,
    )
    state = init_state(zeros(abstract_params(cfg.policy.build)), draft, optimizers)
    with Checkpointer(run_dir, keep=cfg.checkpoint.keep) as saved:
        chosen = saved.latest_step if step is None else step
        if chosen is None:
            raise UserError(f"{run_dir} holds no finished checkpoint; continue the run with --resume")
        return chosen, saved.restore(chosen, state, jax.random.key(cfg.seed))


def _draft_graph(cfg: RunConfig, run_dir: Path, restored: Restored) -> ModelGraph:
    """Structure of the trained draft with the vocabulary map that it started with."""
    assert cfg.draft is not None
    if cfg.draft_checkpoint is None:
        return initialise(cfg.draft.build, jax.random.key(0))[0]
    graph, start = load_trained_draft(cfg.draft, cfg.draft_checkpoint)
    number = fingerprint({"weights": start, "map": graph.constants})
    if graph.constants and number != restored.data["starting_weights"]["draft"]:
        raise UserError(
            f"draft_checkpoint={cfg.draft_checkpoint} no longer holds the draft that {run_dir} started from, so its "
            "vocabulary map is not known; put the files back"
        )
    return graph
