"""The policy's own texts and the drafts that learn them, by the warm-up trainer (`pretrain`) in a given time.

Steps of a training are fixed before it starts, since its learning rate falls over them: two steps are timed first.

    steps = seconds allowed / seconds of a step
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draftco_jax.bench_text.settings import BenchTextConfig
from draftco_jax.config import CheckpointConfig, EvaluationConfig
from draftco_jax.config_io import to_json
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.dflash.config import DFlashConfig
from draftco_jax.drafts.eagle3.config import Eagle3Config
from draftco_jax.environments.word_problems import WordProblemsConfig
from draftco_jax.metrics import write_text_whole
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.hf_weights import load_config
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.pretrain import pretrain, rows_of_step, spec_of
from draftco_jax.pretrain_config import OwnRolloutsConfig, PretrainConfig
from draftco_jax.pretrain_setup import ROLLOUTS_FILE, keep_rollouts, own_rollouts, prepare, rollouts_of, set_up
from draftco_jax.run import DRAFT_FOLDER, claim_directory
from draftco_jax.text.tokenizer import Tokenizer
from draftco_jax.training.optimizer import OptimizerConfig, make_optimizer
from draftco_jax.training.pretrain_draft import init_state, make_step
from draftco_jax.types import PackedBatch

_PLAN_FILE = "plan.json"
_TIMED_STEPS = 2
_ANCHORS = 32
"""Of a text that DFlash trains on in one step."""
_MEASURED = ("batches", "samplings", "timed_tokens", "calls", "repetitions", "choosing_turns", "peer", "step_matmul")


def task_of(cfg: BenchTextConfig) -> WordProblemsConfig:
    """The prompts as a task."""
    return WordProblemsConfig(
        train=cfg.prompts,
        held_out=cfg.held_out,
        model_dir=cfg.policy,
        max_prompt_tokens=cfg.max_prompt_tokens,
        max_response_tokens=cfg.max_new_tokens,
    )


def write_texts(cfg: BenchTextConfig, problems: int, folder: Path) -> dict[str, Any]:
    """Let the policy answer prompts 0, 1, ... until the time is over, once; what was written, in figures."""
    plan = folder / _PLAN_FILE
    if plan.is_file():
        return json.loads(plan.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    size = min(cfg.rollout_batch, problems)
    setting, _ = set_up(recipe(cfg, cfg.drafts[0], {"sequences": problems // size * size, "texts_of_a_row": 1}, 1))
    calls, started = 1, time.perf_counter()

    def enough(done: int) -> bool:
        nonlocal calls
        over = time.perf_counter() - started > cfg.seconds_of_rollouts
        calls = done if over else done + 1
        return over

    data = own_rollouts(setting, enough)
    seconds = time.perf_counter() - started
    keep_rollouts(folder / ROLLOUTS_FILE, data)
    tokens = int(np.asarray(data.label_mask).sum())
    found = {
        "sequences": calls * size,
        "rows": int(data.tokens.shape[0]),
        "texts_of_a_row": int(np.max(data.segment_ids)),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second_with_compiling": tokens / seconds,
    }
    write_text_whole(plan, json.dumps(found, indent=2) + "\n")
    return found


def train_draft(
    cfg: BenchTextConfig, family: str, texts: dict[str, Any], folder: Path, stage: Callable[[str], None]
) -> dict[str, Any]:
    """Train one draft on the texts in `folder`, or go on with it; where it is and its figures."""
    run_dir, plan = folder / family, folder / f"{family}-{_PLAN_FILE}"
    if not plan.is_file():
        stage(f"{family}: timing a step")
        seconds = _seconds_of_a_step(recipe(cfg, family, texts, _TIMED_STEPS + 1), folder)
        steps = max(1, int(cfg.seconds_of_a_draft / seconds))
        write_text_whole(plan, json.dumps({"steps": steps, "seconds_of_a_step": seconds}) + "\n")
    planned = json.loads(plan.read_text())
    run = recipe(cfg, family, texts, planned["steps"])
    claim_directory(run, run_dir)
    if not (run_dir / ROLLOUTS_FILE).exists():
        (run_dir / ROLLOUTS_FILE).symlink_to((folder / ROLLOUTS_FILE).resolve())
    stage(f"{family}: {planned['steps']} steps of {planned['seconds_of_a_step']:.2f} s")
    summary = pretrain(run, run_dir, resume=True)
    keys = ("draft_parameters", "accepted_length", "epochs", "mass_outside_vocabulary", "training_seconds")
    return {"folder": str(run_dir / DRAFT_FOLDER)} | planned | {key: summary[key] for key in keys}


def recipe(cfg: BenchTextConfig, family: str, texts: dict[str, Any], steps: int) -> PretrainConfig:
    """The training of one draft on texts that `write_texts` tells of."""
    policy, sequences = load_config(cfg.policy), texts["sequences"]
    return PretrainConfig(
        steps=steps,
        task=task_of(cfg),
        policy=policy,
        policy_checkpoint=cfg.policy,
        policy_compute=ComputeConfig(scan_layers=True),  # compiles in seconds at any depth
        draft=_draft(cfg, family, policy, texts["texts_of_a_row"]),
        draft_length=max(cfg.draft_lengths),
        rollout=OwnRolloutsConfig(
            sequences=sequences,
            sequences_per_call=min(cfg.rollout_batch, sequences),
            max_new_tokens=cfg.max_new_tokens,
        ),
        batch_rows=cfg.batch_rows,
        optimizer=OptimizerConfig(
            learning_rate=cfg.learning_rate, schedule="cosine", warmup_steps=min(10, max(1, steps // 10))
        ),
        evaluation=EvaluationConfig(prompts=cfg.evaluation_prompts),
        checkpoint=CheckpointConfig(every_steps=50),
        chunk_tokens=512,  # of a large vocabulary: the logits of so many tokens exist at a time
        seed=cfg.seed,
    )


def _draft(cfg: BenchTextConfig, family: str, policy: DecoderConfig, texts_of_a_row: int) -> DraftConfig:
    if family == "eagle3":
        return Eagle3Config.for_target(
            policy, draft_vocab_size=min(cfg.draft_vocab_size, policy.vocab_size), passes=cfg.passes
        )
    return DFlashConfig.for_target(
        policy,
        mask_token_id=mask_token_of(Tokenizer.load(cfg.policy), policy.vocab_size),
        block_size=cfg.dflash_block,
        num_hidden_layers=cfg.dflash_layers,
        num_anchors=_ANCHORS,
        row_anchors=_ANCHORS * texts_of_a_row,
    )


def mask_token_of(tokenizer: Tokenizer, vocab_size: int) -> int:
    """An id that no text of the policy uses: a row beyond the tokenizer's, or its last control token without a job."""
    if vocab_size > tokenizer.vocab_size:
        return vocab_size - 1
    busy = set(tokenizer.special_tokens.values())
    idle = [i for i, token in tokenizer.added_tokens.items() if token.special and token.content not in busy]
    return max(idle, default=vocab_size - 1)


def _seconds_of_a_step(cfg: PretrainConfig, folder: Path) -> float:
    """Median of a few steps after one that compiles."""
    setting, loaded = set_up(cfg)
    run, start = prepare(setting, loaded, rollouts_of(setting, folder))
    phase = cfg.phases[0]
    optimizer = make_optimizer(phase.optimizer, phase.steps)
    state, step = init_state(start, optimizer), make_step(spec_of(run, phase), optimizer)
    seconds = []
    for number in range(1, _TIMED_STEPS + 2):
        index = rows_of_step(run.data.tokens.shape[0], cfg.batch_rows, number, cfg.seed)
        begun = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, setting.policy, _rows(run.data, index)))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def _rows(data: PackedBatch, index: np.ndarray) -> PackedBatch:
    return jax.tree.map(lambda array: jnp.asarray(array[index]), data)


def learnt_settings(cfg: BenchTextConfig) -> dict[str, Any]:
    """What texts and drafts depend on; how they are measured may change from one start to the next."""
    settings = {name: value for name, value in to_json(cfg).items() if name not in _MEASURED}
    files = {name: value for name in ("policy", "prompts", "held_out") if (value := getattr(cfg, name)) is not None}
    return settings | {f"content of {name}": _content(Path(value)) for name, value in files.items()}


def _content(path: Path) -> str:
    """Digest of a file, or of the configs and weights in a folder: other weights may come to lie under an old name."""
    kinds = ("*.json", "*.safetensors")
    files = [path] if path.is_file() else sorted(file for kind in kinds for file in path.glob(kind))
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()
