"""Set up a run: directory, models, engine, data, optimizers, and the state to start or resume from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from draftco_jax.checkpoint import Checkpointer
from draftco_jax.config import RunConfig, with_later_settings
from draftco_jax.config_io import diff, to_json
from draftco_jax.data.prompts import PromptBatches
from draftco_jax.decoding.engine import Engine, EngineShape
from draftco_jax.decoding.sharded import Devices
from draftco_jax.decoding.slots import SlotShape
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import family_of
from draftco_jax.environments.base import Task
from draftco_jax.environments.catalog import build_task
from draftco_jax.errors import UserError
from draftco_jax.evaluation import Evaluator
from draftco_jax.metrics import write_text_whole
from draftco_jax.models.functional import ModelGraph, Params, initialise
from draftco_jax.pretrain_config import AnyConfig
from draftco_jax.rollout.history import RolloutHistory
from draftco_jax.rollout.speculation import SpeculationControl
from draftco_jax.starting_weights import Kept, Models, keep, load_models
from draftco_jax.training.objective import ObjectiveSpec
from draftco_jax.training.optimizer import learning_rate_schedule, make_optimizer
from draftco_jax.training.train_layout import TrainLayout, make_layout
from draftco_jax.training.update import Optimizers, TrainState, UpdateFn
from draftco_jax.types import PolicyVersion
from draftco_jax.weight_sync import Published, Publisher

CONFIG_FILE = "config.json"
DRAFT_FOLDER = "draft"
"""The trained draft in its family's published layout."""

# Purposes of the run's root key; a step uses fold_in(root, step), and steps are far below these. `starting_weights.py`
# has the first two.
_EVALUATION_KEY, _UNTRAINED_KEY, _SPEED_KEY, _CONTROL_KEY = (2**31 + i for i in range(2, 6))


@dataclass(frozen=True)
class Run:
    """Everything the loop uses, apart from the state that changes."""

    cfg: RunConfig
    key: Array
    task: Task
    kept: Kept
    layout: TrainLayout
    publisher: Publisher
    engine: Engine
    optimizers: Optimizers
    spec: ObjectiveSpec
    update: UpdateFn
    """The new state takes the memory of the old one, which cannot be read any more."""
    rest: UpdateFn
    """The same of the policy alone: the draft and its optimizer stay as they are."""
    prompts: PromptBatches
    evaluator: Evaluator
    history: RolloutHistory | None
    """Earlier rollouts, for a draft that copies from them."""
    speculation: SpeculationControl | None
    """What chooses draft lengths; None where they are always the same."""

    @property
    def slots(self) -> SlotShape | None:
        """Of the rollouts; None where all sequences of a step are decoded at once."""
        rollout, k = self.cfg.rollout, self.draft_length
        if rollout.slots is None:
            return None
        lengths = (k,) if rollout.rule is None else rollout.rule.lengths
        return SlotShape(slots=rollout.slots, draft_lengths=lengths, rule=rollout.rule)

    @property
    def draft_length(self) -> int:
        """Drafted tokens per round; 0 in the arm without speculation."""
        return self.cfg.draft_length if self.cfg.speculation != "off" else 0

    @property
    def reference(self) -> Params | None:
        """The policy that the KL penalty pulls towards; None where there is no penalty."""
        return self.kept.reference

    @property
    def twin(self) -> Params | None:
        """The draft before the first step, evaluated in every update; None where there is nothing to train."""
        return self.kept.draft if self.spec.draft_cfg is not None else None

    def published(self, state: TrainState, draft: Params | None) -> Published:
        """The policy of a state, and a draft, in the rollout layout under the version of that state, on the devices of
        the rollouts."""
        draft = None if draft is None else self.layout.everywhere(draft)
        weights = self.publisher.publish(state.policy, draft, PolicyVersion(int(state.step)))
        if self.cfg.rollout.devices == "mesh":
            return weights
        on_one = lambda model: replace(model, params=self.layout.on_one_device(model.params))  # noqa: E731
        stamped = weights.stamped_draft
        return Published(on_one(weights.stamped_policy), None if stamped is None else on_one(stamped))

    @property
    def rollout_graphs(self) -> tuple[ModelGraph, ModelGraph | None]:
        """Structures of the models that are published."""
        return self.publisher.rollout_graphs(self.layout.shapes(self.kept.policy_shapes), self.kept.draft)

    @property
    def cotrained(self) -> bool:
        """Whether the update trains the draft."""
        return self.cfg.speculation == "cotrained"

    def step_key(self, step: int) -> Array:
        """Key of a step's rollouts."""
        return jax.random.fold_in(self.key, step)

    @property
    def evaluation_key(self) -> Array:
        """The same in every evaluation, so that two evaluations differ by the weights only."""
        return jax.random.fold_in(self.key, _EVALUATION_KEY)

    @property
    def speed_key(self) -> Array:
        """Key of the timed rollouts."""
        return jax.random.fold_in(self.key, _SPEED_KEY)

    def policy_schedule(self, updates: int) -> float:
        """Learning rate of the policy after so many updates."""
        return float(jnp.asarray(learning_rate_schedule(self.cfg.policy_optimizer, self.cfg.steps)(updates)))

    def draft_schedule(self, updates: int) -> float:
        """Learning rate of the draft after so many updates."""
        total = self.cfg.draft_schedule.updates(self.cfg.steps)
        return float(jnp.asarray(learning_rate_schedule(self.cfg.draft_optimizer, total)(updates)))

    def untrained_draft(self) -> Params:
        """A draft with freshly drawn weights, to compare with."""
        assert self.cfg.draft is not None
        return initialise(self.cfg.draft.build, jax.random.fold_in(self.key, _UNTRAINED_KEY))[1]


def check_directory(cfg: AnyConfig, run_dir: Path, resume: bool) -> None:
    """Refuse a directory that holds something else; touches nothing."""
    path, wanted = run_dir / CONFIG_FILE, to_json(cfg)
    try:
        held_before = path.is_file()
    except OSError as error:  # a name that is too long
        raise UserError(f"run_dir={run_dir} cannot be used ({error.strerror}); choose another directory") from error
    if held_before:
        try:
            held = json.loads(path.read_text())
        except ValueError as error:  # not JSON, or not text
            raise UserError(f"{path} is not JSON ({error}); choose another run directory") from error
        changes = diff(with_later_settings(held) if isinstance(held, dict) else held, wanted)
        if changes:
            raise UserError(
                f"run_dir={run_dir} holds a run of another config ({'; '.join(changes[:3])}); "
                "choose another run directory, or resume with the settings it was started with"
            )
        if not resume:
            raise UserError(f"run_dir={run_dir} already holds this run; add --resume, or choose another run directory")
        return
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"run_dir={run_dir} exists and is not a run; choose a new or empty directory")


def claim_directory(cfg: AnyConfig, run_dir: Path) -> None:
    """Make the directory this config's own."""
    if not (run_dir / CONFIG_FILE).is_file():
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_dir={run_dir} cannot be made ({error.strerror}); choose another directory") from error
        write_text_whole(run_dir / CONFIG_FILE, json.dumps(to_json(cfg), indent=2) + "\n")


def build_tasks(cfg: AnyConfig, name: str, prompts: int) -> tuple[Task, Task]:
    """Both splits of the task, which must suit the policy and hold the `prompts` that the setting `name` asks for."""
    task = build_task(cfg.task, cfg.seed)
    if task.tokenizer.vocab_size > cfg.policy.vocab_size:
        raise UserError(
            f"policy.vocab_size={cfg.policy.vocab_size} must be >= {task.tokenizer.vocab_size}, the size of the task's "
            "tokenizer; choose a policy made for this task"
        )
    held_out = build_task(cfg.task, cfg.seed, "held_out")
    for source, what, count in (
        (held_out, "evaluation.prompts", cfg.evaluation.prompts),
        (task, name, prompts),
    ):
        if source.num_problems is not None and source.num_problems < count:
            raise UserError(f"{what}={count} must be <= {source.num_problems}, the task's problems; lower it")
    return task, held_out


def set_up(cfg: RunConfig) -> tuple[Run, Models]:
    """Build everything but the state, and read or draw the weights that `start_or_resume` makes one of."""
    key = jax.random.key(cfg.seed)
    if cfg.speculation == "cotrained" and cfg.draft is not None:
        family_of(cfg.draft).check_layout(cfg.draft)  # now, and not when the trained draft is to be written
    layout = make_layout(cfg.mesh, cfg.policy, cfg.policy_compute)
    task, held_out = build_tasks(cfg, "rollout.prompts_per_step", cfg.rollout.prompts_per_step)
    models = load_models(cfg, key)
    policy_graph = layout.graph if layout.mesh is not None else models.policy_graph
    publisher = Publisher(
        policy_graph,
        models.draft_graph,
        cfg.draft_compute.dtype,
        mesh=layout.mesh,
        packed=layout.packed,
        over_mesh=cfg.rollout.devices == "mesh",
    )
    graphs = publisher.rollout_graphs(layout.shapes(models.policy), models.draft)
    engine = Engine(
        *graphs,
        shape=replace(
            engine_shape(cfg, task),
            record_experts=cfg.rollout.record_experts,
            verify_budget=cfg.verify_budget,
            verification=cfg.verification,
            tree=None if cfg.tree is None else cfg.tree.build(),
        ),
        sampling=cfg.rollout.sampling,
        draft_dtype=cfg.draft_compute.dtype,
        devices=_rollout_devices(cfg, layout),
    )
    spec = ObjectiveSpec(
        policy_graph=policy_graph,
        draft_graph=models.draft_graph,
        draft_cfg=_trained_draft(cfg),
        algorithm=cfg.algorithm,
        sampling=cfg.rollout.sampling,
        chunk_tokens=cfg.chunk_tokens,
        draft_length=cfg.draft_length,
        seed=cfg.seed,
        packed=layout.packed,
        pipeline=layout.pipeline,
        shard_optimizer_state=cfg.mesh.shard_optimizer_state,
        draft_dtype=cfg.draft_compute.dtype,
    )
    optimizers = Optimizers(
        policy=make_optimizer(cfg.policy_optimizer, cfg.steps),
        draft=make_optimizer(cfg.draft_optimizer, cfg.draft_schedule.updates(cfg.steps))
        if cfg.speculation == "cotrained"
        else None,
    )
    run = Run(
        cfg=cfg,
        key=key,
        task=task,
        kept=keep(models, layout, reference=cfg.algorithm.kl_coefficient > 0),
        layout=layout,
        publisher=publisher,
        engine=engine,
        optimizers=optimizers,
        spec=spec,
        update=layout.make_update(spec, optimizers),
        rest=layout.make_rest(spec, optimizers),
        prompts=PromptBatches(task, cfg.rollout.prompts_per_step, cfg.seed),
        evaluator=Evaluator(held_out, cfg.evaluation.prompts, cfg.evaluation.samples_per_prompt),
        history=_history(cfg),
        speculation=_speculation(cfg, key),
    )
    return run, models


def _rollout_devices(cfg: RunConfig, layout: TrainLayout) -> Devices | None:
    if cfg.rollout.devices == "one":
        return None
    assert layout.mesh is not None, "a config that asks for it has one"
    return Devices(layout.mesh, layout.packed)


def _speculation(cfg: RunConfig, key: Array) -> SpeculationControl | None:
    rule = cfg.rollout.rule
    return None if rule is None else SpeculationControl(rule, jax.random.fold_in(key, _CONTROL_KEY))


def _trained_draft(cfg: RunConfig) -> DraftConfig | None:
    """The draft whose loss the update computes, for the draft itself or for its frozen twin."""
    return cfg.draft if cfg.speculation != "off" and cfg.draft is not None and family_of(cfg.draft).trained else None


def _history(cfg: RunConfig) -> RolloutHistory | None:
    """A memory where the draft copies texts: of earlier rollouts, or (room 0) of the siblings of its batch only."""
    if cfg.speculation == "off" or cfg.draft is None or family_of(cfg.draft).trained:
        return None
    return RolloutHistory(*cfg.draft.memory)


def start_or_resume(run: Run, models: Models, checkpoints: Checkpointer, resume: bool) -> TrainState:
    """The state of the newest finished checkpoint where there is one and `resume` asks for it, else step 0.

    That of step 0 is made of the arrays of `models`, which the first update takes.
    """
    draft = models.draft if run.cotrained else None
    step = checkpoints.latest_step if resume else None
    if step is None:
        return run.layout.start(models.policy, draft, run.optimizers, run.spec)
    restored = checkpoints.restore(
        step, run.layout.start_shapes(models.policy, draft, run.optimizers, run.spec), run.key
    )
    if not bool((jax.random.key_data(restored.key) == jax.random.key_data(run.key)).all()):
        raise UserError(
            f"checkpoint step {step} was made with another random key; resume with the seed it was made with"
        )
    for part, number in run.kept.fingerprints.items():
        if restored.data["starting_weights"][part] != number:
            raise UserError(
                f"{part}_checkpoint={getattr(run.cfg, f'{part}_checkpoint')} no longer holds the weights this run "
                "started from; put them back, or choose another run directory"
            )
    run.prompts.set_state(restored.data["prompts"])
    if run.history is not None:
        run.history.set_state(restored.data["history"])
    if run.speculation is not None:
        run.speculation.set_state(restored.data["speculation"])
    return restored.state


def resume_data(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps beside the state: the data position, and which weights the run started from."""
    data = {"prompts": run.prompts.get_state(), "starting_weights": run.kept.fingerprints}
    kept = {"history": run.history, "speculation": run.speculation}
    return data | {name: part.get_state() for name, part in kept.items() if part is not None}


def engine_shape(cfg: AnyConfig, task: Task) -> EngineShape:
    """Room for the task's prompts and for the answers that the config allows."""
    new_tokens = cfg.rollout.max_new_tokens or task.max_response_tokens
    needed = task.max_prompt_tokens + new_tokens + cfg.draft_length
    if needed > cfg.policy.max_position_embeddings:
        raise UserError(
            f"rollout.max_new_tokens={new_tokens} with prompts of {task.max_prompt_tokens} tokens and draft_length="
            f"{cfg.draft_length} needs a cache of {needed} tokens, which must be <= policy.max_position_embeddings="
            f"{cfg.policy.max_position_embeddings}; lower max_new_tokens"
        )
    if isinstance(cfg, RunConfig) and (buffer := cfg.algorithm.overlong_buffer) > new_tokens:
        raise UserError(
            f"algorithm.overlong_buffer={buffer} must be <= {new_tokens}, the longest response; a fifth of it in DAPO"
        )
    return EngineShape(
        prompt_capacity=task.max_prompt_tokens,
        max_new_tokens=new_tokens,
        stop_ids=task.stop_ids,
        pad_id=task.tokenizer.pad_id,
    )
