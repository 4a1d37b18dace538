"""Policy and draft out of a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from draftco_jax.checkpoint import Checkpointer, Restored
from draftco_jax.config import RunConfig, config_registry, with_later_settings
from draftco_jax.config_io import from_json
from draftco_jax.convert.output import carry_over, cast_tree, write_draft, write_policy, write_tokenizer
from draftco_jax.convert.wishes import DTYPES, Converted, Wishes
from draftco_jax.drafts.catalog import family_of
from draftco_jax.environments.catalog import build_task
from draftco_jax.errors import UserError
from draftco_jax.models.functional import Params
from draftco_jax.starting_weights import Models, load_models
from draftco_jax.training.optimizer import make_optimizer
from draftco_jax.training.train_layout import make_layout
from draftco_jax.training.update import Optimizers, init_state

POLICY_FOLDER, DRAFT_FOLDER = "policy", "draft"


def convert_run(run_dir: Path, raw: Mapping[str, Any], out: Path, wishes: Wishes, found: Converted) -> None:
    """Write the policy of a run's checkpoint and, where one was trained, its draft."""
    cfg = from_json(RunConfig, with_later_settings(raw), config_registry())
    trained = cfg.speculation == "cotrained" and cfg.draft is not None
    if wishes.kind == "draft" and not trained:
        raise UserError(f"kind=draft: {run_dir} trained no draft (speculation={cfg.speculation}); leave kind out")
    models, (step, restored) = _restore(cfg, run_dir, wishes.step, trained)
    found.notes.append(f"checkpoint of step {step}")
    if wishes.kind != "draft":
        folder, tokenizer = out / POLICY_FOLDER, build_task(cfg.task, cfg.seed).tokenizer
        params, dtype = _cast(restored.state.policy, wishes, found)
        write_policy(folder, cfg.policy, params, wishes.max_shard_bytes)
        carry_over({}, folder, dtype)
        write_tokenizer(folder, tokenizer)
        found.written["policy"] = folder
    if trained and wishes.kind != "policy":
        assert cfg.draft is not None and models.draft_graph is not None and restored.state.draft is not None
        _check_map(models, cfg, run_dir, restored)
        folder, (params, dtype) = out / DRAFT_FOLDER, _cast(restored.state.draft, wishes, found)
        write_draft(folder, family_of(cfg.draft), cfg.draft, models.draft_graph, params, wishes.max_shard_bytes)
        carry_over({}, folder, dtype)
        found.written["draft"] = folder


def _restore(cfg: RunConfig, run_dir: Path, step: int | None, trained: bool) -> tuple[Models, tuple[int, Restored]]:
    """The state of a finished checkpoint, and the models it is of; the starting policy and the data are not needed."""
    checkpoints = run_dir / "checkpoints"
    there = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    steps = sorted(int(name) for name in there if name.isdigit())
    if not steps:
        raise UserError(f"{run_dir} holds no checkpoint; continue the run with --resume until it has saved one")
    if step is not None and step not in steps:
        raise UserError(f"step={step} is not a checkpoint of {run_dir}; it has {', '.join(map(str, steps))}")
    # Drawn weights have the run's own tree and dtypes. The draft's checkpoint also holds its vocabulary map.
    drawn = replace(cfg, policy_checkpoint=None, speculation="cotrained" if trained else "off")
    key = jax.random.key(cfg.seed)
    models = load_models(drawn, key)
    optimizers = Optimizers(
        policy=make_optimizer(cfg.policy_optimizer, cfg.steps),
        draft=make_optimizer(cfg.draft_optimizer, cfg.steps) if trained else None,
    )
    # Without its mesh: a checkpoint is also read where there are fewer devices.
    layout = make_layout(cfg.mesh, cfg.policy, cfg.policy_compute, on_devices=False)
    state = init_state(layout.stacked(models.policy), models.draft, optimizers)
    with Checkpointer(run_dir, keep=cfg.checkpoint.keep) as saved:
        chosen = saved.latest_step if step is None else step
        if chosen is None:
            raise UserError(f"{run_dir} holds no finished checkpoint; continue the run with --resume")
        restored = saved.restore(chosen, state, key)
    policy = layout.gathered(restored.state.policy)
    return models, (chosen, restored._replace(state=restored.state._replace(policy=policy)))


def _cast(params: Params, wishes: Wishes, found: Converted) -> tuple[Params, str]:
    """In the dtype asked for, else in the run's own, or float32 where it has several (which is said), and its name."""
    own = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
    name = wishes.dtype or (own[0] if len(own) == 1 else "float32")
    if wishes.dtype is None and len(own) > 1:
        found.notes.append(f"the run mixes {', '.join(own)}: written as float32; choose a dtype for less")
    return cast_tree(params, DTYPES[name]), name


def _check_map(models: Models, cfg: RunConfig, run_dir: Path, restored: Restored) -> None:
    """A reduced vocabulary is not in the run's checkpoint: it must still be the one that the draft started with."""
    assert models.draft_graph is not None
    changed = models.fingerprints["draft"] != restored.data["starting_weights"]["draft"]
    if models.draft_graph.constants and changed:
        raise UserError(
            f"draft_checkpoint={cfg.draft_checkpoint} no longer holds the draft that {run_dir} started from, so its "
            "vocabulary map is not known; put the files back"
        )
