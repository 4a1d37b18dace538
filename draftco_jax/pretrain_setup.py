"""Set up the pre-training of a draft: models, the policy's own rollouts, vocabulary map, engine."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from draftco_jax.checkpoint import fingerprint
from draftco_jax.context_parallel import WHOLE_ROWS
from draftco_jax.data.packing import pack
from draftco_jax.decoding.engine import Engine
from draftco_jax.drafts.catalog import family_of
from draftco_jax.drafts.vocabulary import CONSTANT, Vocabularies, graph_with_map, kept_ids
from draftco_jax.environments.base import Task
from draftco_jax.errors import UserError
from draftco_jax.evaluation import Evaluator, build_request
from draftco_jax.models.compute import cast_params
from draftco_jax.models.functional import ModelGraph, Params, initialise
from draftco_jax.pretrain_config import PretrainConfig
from draftco_jax.rewards.scoring import score
from draftco_jax.run import build_tasks, engine_shape
from draftco_jax.starting_weights import load_target, load_trained_draft
from draftco_jax.training.pretrain_draft import keep_rows, token_counts
from draftco_jax.types import PackedBatch, PolicyVersion, ScoredRollouts
from draftco_jax.weight_sync import Publisher

Loaded = tuple[ModelGraph, Params]
"""The draft of `draft_checkpoint`."""

ROLLOUTS_FILE = "rollouts.npz"

# Purposes of the root key, as in a run where both have them.
_DRAFT_KEY, _EVALUATION_KEY, _UNTRAINED_KEY, _ROLLOUT_KEY = (2**31 + i for i in (1, 2, 3, 5))


@dataclass(frozen=True)
class Setting:
    """What is there before anything is generated or written."""

    cfg: PretrainConfig
    key: Array
    task: Task
    policy_graph: ModelGraph
    policy: Params
    evaluator: Evaluator

    def purpose(self, number: int) -> Array:
        """Key of one purpose."""
        return jax.random.fold_in(self.key, number)


@dataclass(frozen=True)
class Pretraining:
    """Everything the steps use, apart from the state that changes."""

    setting: Setting
    data: PackedBatch
    draft_graph: ModelGraph
    starting: dict[str, int]
    """One number each for rollouts, policy, and the draft before the first step."""
    publisher: Publisher
    engine: Engine

    @property
    def cfg(self) -> PretrainConfig:
        """The config."""
        return self.setting.cfg

    @property
    def kept(self) -> Int32[np.ndarray, " W"] | None:
        """Target ids of a reduced vocabulary."""
        return self.draft_graph.constants.get(CONSTANT)

    def accepted_length(self, draft: Params) -> dict[str, float]:
        """Held-out accepted length of a draft, and the acceptance of each drafted position."""
        setting, k = self.setting, self.cfg.draft_length
        weights = self.publisher.publish(setting.policy, draft, PolicyVersion(0))
        key = setting.purpose(_EVALUATION_KEY)
        found = setting.evaluator.run(self.engine, weights.policy, weights.draft, key, draft_length=k)
        if found.accepted_length is None:
            raise UserError(
                f"evaluation.prompts={found.prompts} gave answers of one token only, so no draft was ever verified; "
                "use a policy and a task with longer answers"
            )
        rates = found.speculation.acceptance_rate_by_position
        by_position = {f"eval/acceptance_rate_position_{i}": rate for i, rate in enumerate(rates, start=1)}
        return {"eval/accepted_length": found.accepted_length} | by_position

    def untrained(self) -> Params:
        """Freshly drawn weights, to compare with."""
        return initialise(self.cfg.draft.build, self.setting.purpose(_UNTRAINED_KEY))[1]


def set_up(cfg: PretrainConfig) -> tuple[Setting, Loaded | None]:
    """Read what the config names, and refuse what cannot work. The draft comes apart: training does not keep it."""
    key = jax.random.key(cfg.seed)
    family_of(cfg.draft).check_layout(cfg.draft)  # now, and not when the trained draft is to be written
    prompts = cfg.rollout.sequences // cfg.rollout.samples_per_prompt
    task, held_out = build_tasks(cfg, "rollout.sequences / rollout.samples_per_prompt", prompts)
    engine_shape(cfg, task)
    graph, policy = load_target(cfg, key)
    loaded = load_trained_draft(cfg.draft, cfg.draft_checkpoint) if cfg.draft_checkpoint else None
    evaluator = Evaluator(held_out, cfg.evaluation.prompts, cfg.evaluation.samples_per_prompt)
    return Setting(cfg, key, task, graph, policy, evaluator), loaded


def own_rollouts(setting: Setting, enough: Callable[[int], bool] = lambda calls: False) -> PackedBatch:
    """The policy's answers to prompts 0, 1, ... of the train split, packed: numpy rows, as many as hold anything.

    `enough`, told how many calls are done, may end it before all sequences are there.
    """
    cfg, policy_only = setting.cfg, Publisher(setting.policy_graph, None)
    shape, group = engine_shape(cfg, setting.task), cfg.rollout.samples_per_prompt
    sampling, size = cfg.rollout.sampling, cfg.rollout.sequences_per_call
    engine = Engine(*policy_only.rollout_graphs(setting.policy, None), shape=shape, sampling=sampling)
    weights = policy_only.publish(setting.policy, None, PolicyVersion(0))
    parts: list[PackedBatch] = []
    for call in range(cfg.rollout.sequences // size):
        if call and enough(call):
            break
        first = call * size // group
        prompts = tuple(setting.task.problem(first + i) for i in range(size // group))
        request = build_request(prompts, group, shape, jax.random.fold_in(setting.purpose(_ROLLOUT_KEY), call))
        rollouts = jax.device_get(engine.generate(weights.policy, None, request))
        # Some losses weigh answers by their reward.
        rewards = score(setting.task, prompts, rollouts, setting.task.tokenizer, group)
        scored = ScoredRollouts(rollouts, prompts, rewards, PolicyVersion(0))
        packed = pack(scored, np.zeros_like(rewards), rollouts.tokens.shape[1], size)
        used = np.asarray(packed.segment_ids).any(axis=1)
        parts.append(jax.tree.map(lambda array, used=used: np.asarray(array)[used], packed))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def rollouts_of(setting: Setting, run_dir: Path) -> PackedBatch:
    """The rollouts kept in the directory, or new ones that are kept there."""
    path = run_dir / ROLLOUTS_FILE
    if path.is_file():
        try:
            with path.open("rb") as file, np.load(file) as held:  # closed here: numpy leaves a file it refuses open
                return PackedBatch(*(held[name] for name in PackedBatch._fields if name != "experts"))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} cannot be read ({error}); delete it, the rollouts are then made again") from error
    data = own_rollouts(setting)
    keep_rollouts(path, data)
    return data


def keep_rollouts(path: Path, data: PackedBatch) -> None:
    """Write the rollouts of a training, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    arrays: dict[str, Any] = {name: array for name, array in data._asdict().items() if array is not None}
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def prepare(setting: Setting, loaded: Loaded | None, data: PackedBatch) -> tuple[Pretraining, Params]:
    """What the steps use (the draft's vocabulary map, the engine that evaluates it), and the draft to start from."""
    cfg, rows = setting.cfg, data.tokens.shape[0]
    if rows < cfg.batch_rows:
        raise UserError(f"batch_rows={cfg.batch_rows} must be <= {rows}, the packed rows of all rollouts; lower it")
    family_of(cfg.draft).check_batch(data, cfg.draft, WHOLE_ROWS)
    graph, start = loaded or _fresh_draft(setting, data)
    start, dtype = cast_params(start, cfg.draft_compute.parameter_dtype), cfg.draft_compute.dtype
    publisher = Publisher(setting.policy_graph, graph, dtype)
    graphs = publisher.rollout_graphs(setting.policy, start)
    shape = engine_shape(cfg, setting.task)
    engine = Engine(*graphs, shape=shape, sampling=cfg.rollout.sampling, draft_dtype=dtype)
    starting = {"rollouts": fingerprint(data), "policy": fingerprint(setting.policy), "draft": fingerprint(start)}
    return Pretraining(setting, data, graph, starting, publisher, engine), start


def _fresh_draft(setting: Setting, data: PackedBatch) -> tuple[ModelGraph, Params]:
    """Drawn weights with what the family takes from the policy; a reduced vocabulary keeps the commonest tokens."""
    cfg, policy = setting.cfg, setting.policy
    graph, draft = initialise(cfg.draft.build, setting.purpose(_DRAFT_KEY))
    kept = None
    if isinstance(cfg.draft, Vocabularies) and cfg.draft.draft_vocab_size < cfg.draft.vocab_size:
        kept = kept_ids(token_counts(data, cfg.draft.vocab_size), cfg.draft.draft_vocab_size)
        graph = graph_with_map(cfg.draft, kept)
    return graph, family_of(cfg.draft).from_policy(draft, keep_rows(policy, kept))
