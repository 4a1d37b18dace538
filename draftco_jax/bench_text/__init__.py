"""`draftco bench text`: drafts that learn a published policy's own texts in minutes, and what they gain on held-out
prompts.

    prompts to learn from -> the policy's texts -> an EAGLE-3 and a DFlash draft -> cells on held-out prompts

The cells are those of `bench decode`. Everything that is made lies in a folder: texts, drafts with their checkpoints,
and each cell when it is done, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftco_jax.bench_decode.cells import measure_cell
from draftco_jax.bench_decode.machine import describe_machine, load_average
from draftco_jax.bench_decode.peer import Peer, missing
from draftco_jax.bench_text.pair import TextPair
from draftco_jax.bench_text.settings import BenchTextConfig
from draftco_jax.bench_text.training import learnt_settings, task_of, train_draft, write_texts
from draftco_jax.config_io import to_json
from draftco_jax.decoding.engine import EngineShape
from draftco_jax.environments.base import Task
from draftco_jax.environments.catalog import build_task
from draftco_jax.errors import UserError
from draftco_jax.generate import load_model
from draftco_jax.metrics import write_text_whole

__all__ = ["BenchTextConfig", "bench_text"]

_SETTINGS_FILE, _CELLS_FILE = "settings.json", "cells.json"
Stage = Callable[[str], None]


def bench_text(cfg: BenchTextConfig, folder: Path, stage: Stage = lambda text: None) -> dict[str, Any]:
    """All figures; a dict of plain values. What is made on the way is kept in `folder`, and used again from there.

    Raises:
        UserError: files are missing or not what they should be, or the folder is of other settings.
    """
    load, why = load_average(), "left out by peer=false" if not cfg.peer else missing()
    train, held_out = (build_task(task_of(cfg), cfg.seed, split) for split in ("train", "held_out"))
    _check_prompts(cfg, train, held_out)
    _claim(cfg, folder)
    stage(f"the policy's own texts, {cfg.seconds_of_rollouts:.0f} s")
    texts = write_texts(cfg, train.num_problems or 0, folder)
    drafts = {family: train_draft(cfg, family, texts, folder, stage) for family in cfg.drafts}
    peer = None if why is not None else Peer(Path(cfg.policy))
    cells: list[dict[str, Any]] = []
    for number, family in enumerate(cfg.drafts):
        cells += _cells(cfg, family, drafts[family]["folder"], held_out, folder, (peer if number == 0 else None), stage)
    return {
        "settings": to_json(cfg),
        "step_matmul": cfg.step_matmul,
        "texts": texts,
        "drafts": drafts,
        "cells": cells,
        "timed_prompts": _timed(cfg, held_out),
        "worst_over_plain": min(cell["speedup"] for cell in cells),
        "over_transformers": {
            str(cell["batch"]): cell["over_transformers"] for cell in cells if cell["over_transformers"] is not None
        },
        "over_transformers_reason": why,
    } | describe_machine(load)


def _check_prompts(cfg: BenchTextConfig, train: Task, held_out: Task) -> None:
    """Enough for the evaluation, and none that drafts learn from."""
    questions = [{task.problem(i).text for i in range(task.num_problems or 0)} for task in (train, held_out)]
    if common := questions[0] & questions[1]:
        raise UserError(
            f"held_out={cfg.held_out} shares {len(common)} questions with prompts={cfg.prompts}, which drafts learn "
            "from; take them out of one file, or leave held_out out"
        )
    there = held_out.num_problems or 0
    if there < cfg.evaluation_prompts:
        raise UserError(
            f"evaluation_prompts={cfg.evaluation_prompts} must be <= {there}, the held-out problems whose prompts have "
            f"at most max_prompt_tokens={cfg.max_prompt_tokens}; lower it or raise the other"
        )


def _claim(cfg: BenchTextConfig, folder: Path) -> None:
    """Make the folder that of these settings, as far as what is learnt depends on them."""
    path, mine = folder / _SETTINGS_FILE, learnt_settings(cfg)
    if path.is_file():
        held = json.loads(path.read_text())
        other = [f"{name}={held.get(name)!r}" for name in mine if held.get(name) != mine[name]]
        if other:
            raise UserError(f"run_dir={folder} is of other settings ({', '.join(other)}); choose another folder")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"run_dir={folder} exists and is not of this command; choose a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, json.dumps(mine, indent=2) + "\n")


def _cells(
    cfg: BenchTextConfig, family: str, draft: str, held_out: Task, folder: Path, peer: Peer | None, stage: Stage
) -> list[dict[str, Any]]:
    """Cells of a draft at all batches and ways of sampling; those that were measured before on the same kind of machine
    with the same versions are kept, with their date."""
    path = folder / f"{family}-{_CELLS_FILE}"
    done: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    settings = json.dumps(to_json(cfg), sort_keys=True)
    done = {key: kept for key, kept in done.items() if kept["settings"] == settings and _measured_alike(kept["cell"])}
    wanted = [(batch, sampling) for batch in cfg.batches for sampling in cfg.samplings]
    if any(_key(*cell) not in done for cell in wanted):
        pair = _pair(cfg, family, draft, held_out)
        for batch, sampling in wanted:
            if _key(batch, sampling) in done:
                continue
            stage(f"{family}, batch {batch}, {sampling.replace('_', ' ')}")
            load = load_average()
            cell = measure_cell(cfg, pair, sampling, batch, peer) | {"measured": describe_machine(load)}
            done[_key(batch, sampling)] = {"settings": settings, "cell": cell}
            write_text_whole(path, json.dumps(done, indent=2) + "\n")
    return [done[_key(*cell)]["cell"] for cell in wanted]


def _measured_alike(cell: dict[str, Any]) -> bool:
    then, now = cell["measured"], describe_machine(None)
    return then["versions"] == now["versions"] and all(
        then["hardware"][name] == now["hardware"][name] for name in ("processor", "cores", "device")
    )


def _key(batch: int, sampling: str) -> str:
    return f"{sampling}-{batch}"


def _timed(cfg: BenchTextConfig, held_out: Task) -> dict[str, int]:
    """Which held-out prompts the cells take: those after the evaluation's where there are enough. Turns go round where
    there are fewer `distinct` ones than `asked`."""
    asked = max(cfg.batches) * (cfg.choosing_turns + cfg.repetitions) * math.ceil(cfg.calls / max(cfg.batches))
    there = held_out.num_problems or 0
    first = cfg.evaluation_prompts if there >= cfg.evaluation_prompts + asked else 0
    return {"first": first, "distinct": min(there - first, asked), "asked": asked}


def _pair(cfg: BenchTextConfig, family: str, draft: str, held_out: Task) -> TextPair:
    """The draft with its policy, on the held-out prompts after those of the evaluation where there are enough."""
    model = load_model(Path(cfg.policy), draft, step_matmul=cfg.step_matmul)
    timed = _timed(cfg, held_out)
    prompts = [held_out.problem(i) for i in range(timed["first"], timed["first"] + timed["distinct"])]
    shape = EngineShape(
        prompt_capacity=held_out.max_prompt_tokens,
        max_new_tokens=cfg.timed_tokens,
        stop_ids=model.stop_ids,
        pad_id=model.tokenizer.pad_id,
    )
    return TextPair(family, model, prompts, shape, cfg.calls)
