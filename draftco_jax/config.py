"""The config of a run: composes the components' own configs and checks what only a whole run can know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from draftco_jax.config_io import apply_overrides, load_python_config, to_json
from draftco_jax.decoding.speculation_control import Bandit, Budget, CostModel, FixedLength
from draftco_jax.drafts.base import DraftConfig
from draftco_jax.drafts.catalog import draft_configs, family_of
from draftco_jax.drafts.self_int8.config import SelfInt8Config
from draftco_jax.environments.catalog import TaskConfig
from draftco_jax.errors import UserError
from draftco_jax.models.compute import ComputeConfig, DtypeConfig
from draftco_jax.models.families import policy_configs
from draftco_jax.models.token_tree import TreeConfig
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.numerics.sampling import SamplingConfig
from draftco_jax.training.algorithm import GrpoConfig
from draftco_jax.training.mesh_config import MeshConfig
from draftco_jax.training.optimizer import OptimizerConfig

SHIPPED = "shipped:"
_ASSETS = Path(__file__).parent / "assets"


def config_registry() -> tuple[type, ...]:
    """Config classes that may stand where a field names a base class, for reading a saved config back."""
    return (*draft_configs(), *policy_configs())


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What a step generates."""

    prompts_per_step: int
    samples_per_prompt: int
    """G, the group size."""
    max_new_tokens: int | None = None
    """Response limit in tokens; none: what the task's full answers need."""
    sampling: SamplingConfig = SamplingConfig()
    record_experts: bool = False
    """Router replay: keep the experts that the generator sent each token to, and train with these. Takes 2 bytes a
    token, layer and chosen expert. For policies with experts only."""
    slots: int | None = None
    """Sequences that are decoded at the same time; the others wait and get the place of one that has ended. none: all
    of a step at once. The texts are the same, up to rounding."""
    rule: FixedLength | CostModel | Budget | Bandit | None = None
    """Chooses the draft length of each round in slots, from `lengths`, the longest of which is `draft_length`; with 0
    among them speculation is off where it does not pay. Costs are measured when the run starts and kept with it. none:
    always `draft_length`."""
    devices: Literal["one", "mesh"] = "one"
    """mesh: sequences go over all axes of the run's mesh but tensor, and heads and widths of the policy over that; a
    publish gathers nothing on one device. one: one device generates, with all of the weights. The texts are the same,
    up to rounding."""

    def __post_init__(self) -> None:
        """Refuse empty steps and limits."""
        for name in ("prompts_per_step", "samples_per_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; 32 prompts x 8 samples suit the demo")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be >= 1; use none for the task's own limit")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots={self.slots} must be >= 1; use none to decode all sequences of a step at once")
        if self.rule is not None and self.slots is None:
            raise ValueError("slots=none must be a number where rule chooses draft lengths; give slots, or rule=none")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: before the first step, at the end, and every so many steps."""

    prompts: int = 256
    every_steps: int = 0
    """0: only at the start and at the end."""
    samples_per_prompt: int = 1
    """Responses to each prompt: with more than one also pass@k, and maj@k where the task reads answers out of them."""

    def __post_init__(self) -> None:
        """Refuse empty evaluations."""
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} must be >= 1; 256 gives +- 0.06 at 95 %")
        if self.every_steps < 0:
            raise ValueError(f"every_steps={self.every_steps} must be >= 0; 0 evaluates at the start and at the end")
        if self.samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={self.samples_per_prompt} must be >= 1; 1 gives the pass rate")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often the run is made resumable."""

    every_steps: int = 10
    """The last step is always saved; 0: only that one."""
    keep: int = 2

    def __post_init__(self) -> None:
        """Refuse intervals that save nothing sensible."""
        if self.every_steps < 0:
            raise ValueError(f"every_steps={self.every_steps} must be >= 0; 0 saves the last step only")
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} must be >= 1, or there is nothing to resume from; 2 is usual")


@dataclass(frozen=True, kw_only=True)
class DraftScheduleConfig:
    """In which steps the draft trains; the others leave it and its optimizer as they are and spend nothing on it."""

    every_steps: int = 1
    """N: in steps N, 2 N, ..."""
    until_step: int | None = None
    """The last step it may train in, that of the first epoch say; none: it trains to the end."""
    below_accepted_length: float | None = None
    """Only where the step's own rollouts committed fewer tokens a round than this: a draft that still fits the policy
    is left alone until the policy has moved away from it. none: however many."""

    def __post_init__(self) -> None:
        """Refuse schedules in which it never trains."""
        for name in ("every_steps", "until_step"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be >= 1; use speculation=frozen for a draft that never trains")
        limit = self.below_accepted_length
        if limit is not None and not limit > 1.0:
            raise ValueError(
                f"below_accepted_length={limit} must be > 1, a round commits at least one token; use "
                "speculation=frozen for a draft that never trains"
            )

    def updates(self, steps: int) -> int:
        """How many of so many steps train it, at most."""
        return min(steps, self.until_step or steps) // self.every_steps

    def due(self, step: int, accepted_length: float | None) -> bool:
        """Whether the draft trains in this step, the first of which is 1.

        Args:
            step: of the run.
            accepted_length: tokens committed a round in the step's rollouts; None where there was no round.
        """
        limit = self.below_accepted_length
        fits = limit is not None and accepted_length is not None and accepted_length >= limit
        return step % self.every_steps == 0 and (self.until_step is None or step <= self.until_step) and not fits


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """The speed comparison at the end of a run: plain and speculative in turn, in one process, compiled before."""

    batches: tuple[int, ...] = (1,)
    draft_lengths: tuple[int, ...] = (1, 2, 4)
    repetitions: int = 15
    """Timed calls per setting; the median is quoted. 0: no comparison."""

    def __post_init__(self) -> None:
        """Refuse settings that measure nothing."""
        if self.repetitions < 0:
            raise ValueError(f"repetitions={self.repetitions} must be >= 0; 0 leaves the comparison out")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches={self.batches} must be batch sizes >= 1; give e.g. 1,8")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise ValueError(f"draft_lengths={self.draft_lengths} must be lengths >= 1; give e.g. 1,2,4")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run depends on. Two runs of one config on one machine give the same metrics, timings apart."""

    steps: int
    task: TaskConfig
    policy: DecoderConfig
    policy_checkpoint: str | None
    """Folder in Hugging Face layout, `shipped:NAME`, or none for random weights."""
    policy_compute: ComputeConfig = ComputeConfig()
    """Dtypes of the policy, and how its layers are gone through. A bfloat16 run reports by how much the generator's and
    the trainer's log-probs differ (`agreement/...`), as any run does."""
    rollout: RolloutConfig
    policy_optimizer: OptimizerConfig
    algorithm: GrpoConfig = GrpoConfig()
    speculation: Literal["off", "frozen", "cotrained"] = "cotrained"
    """off: plain decoding, no draft. frozen: the draft never changes. cotrained: it trains inside the update."""
    draft: DraftConfig | None = None
    """Config of any family in the catalog."""
    draft_checkpoint: str | None = None
    """Folder in the family's official layout, `shipped:NAME`, or none for fresh weights."""
    draft_compute: DtypeConfig = DtypeConfig()
    """Dtypes of the draft; they need not be the policy's."""
    draft_length: int = 4
    """k: tokens proposed per verify round."""
    verify_budget: int | None = None
    """Drafted tokens verified in one step over the whole batch, those most likely to be accepted; none: all. The law of
    the output stays the policy's. What is saved is experts that are not read: a policy without any gains nothing."""
    verification: Literal["token", "block", "tree"] = "token"
    """token: drafts are judged one after another. block: all of a round together, which accepts no fewer of them in
    expectation, with other texts of the same law. tree: several candidates for a place, whose law is the same too."""
    tree: TreeConfig | None = None
    """Shape of the candidates with verification=tree, as many widths as draft_length; none otherwise."""
    draft_loss_weight: float = 1.0
    """lambda of L_RL + lambda * L_draft; the policy's trajectory does not depend on it."""
    draft_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """Its steps are the updates that train the draft, as many as `draft_schedule` may ask for."""
    draft_schedule: DraftScheduleConfig = DraftScheduleConfig()
    """In which steps the draft trains, with speculation=cotrained."""
    accepted_length_alarm: float = 1.1
    """A step whose rollouts commit fewer tokens a round than this is marked in the metrics, and the first one is told:
    speculation is lossless, so a draft that has become useless shows in nothing else. 1 switches the alarm off."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    speed: SpeedConfig = SpeedConfig()
    chunk_tokens: int = 4096
    """Tokens whose logits exist at one time in the update."""
    mesh: MeshConfig = MeshConfig()
    """Devices that an update is spread over, and rollouts where `rollout.devices` says so."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Run the checks that need more than one component."""
        _check_positive(self)
        _check_group_size(self)
        _check_training_law(self)
        _check_draft(self)
        _check_tree(self)
        _check_experts(self)
        _check_mesh(self)


def _check_positive(cfg: RunConfig) -> None:
    if cfg.draft_schedule != DraftScheduleConfig() and cfg.speculation != "cotrained":
        raise ValueError(
            f"draft_schedule must be left out with speculation={cfg.speculation}, which trains no draft; or use "
            "speculation=cotrained"
        )
    limit, most = cfg.draft_schedule.below_accepted_length, cfg.draft_length + 1
    if limit is not None and limit > most:
        raise ValueError(
            f"draft_schedule.below_accepted_length={limit} must be <= {most}, the most that draft_length="
            f"{cfg.draft_length} commits a round; use none to train always"
        )
    if cfg.steps >= 1 and not cfg.draft_schedule.updates(cfg.steps):
        raise ValueError(
            f"draft_schedule must train the draft in one of steps={cfg.steps}, but every_steps="
            f"{cfg.draft_schedule.every_steps} and until_step={cfg.draft_schedule.until_step} leave none; use "
            "speculation=frozen for a draft that never trains"
        )
    if not 0 <= cfg.seed < 2**32:
        raise ValueError(f"seed={cfg.seed} must be in 0..{2**32 - 1}; choose another number")
    for name in ("steps", "draft_length", "chunk_tokens"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"{name}={getattr(cfg, name)} must be >= 1; use speculation=off to switch drafting off")
    if cfg.verify_budget is not None and cfg.verify_budget < 1:
        raise ValueError(
            f"verify_budget={cfg.verify_budget} must be >= 1; use none to verify all drafts, or speculation=off"
        )
    if cfg.accepted_length_alarm < 1:
        raise ValueError(
            f"accepted_length_alarm={cfg.accepted_length_alarm} must be >= 1, a round commits at least one token; "
            "1 switches the alarm off"
        )
    if cfg.draft_loss_weight < 0:
        raise ValueError(f"draft_loss_weight={cfg.draft_loss_weight} must be >= 0; 0 leaves the draft untrained")


def _check_group_size(cfg: RunConfig) -> None:
    algorithm, group = cfg.algorithm, cfg.rollout.samples_per_prompt
    if group < 3 and algorithm.leave_one_out and algorithm.sample_std:
        raise ValueError(
            f"rollout.samples_per_prompt={group} must be >= 3 with algorithm.leave_one_out=True and "
            "algorithm.sample_std=True: one other sample has no spread; raise it"
        )
    if group < 2 and algorithm.group_baseline:
        raise ValueError(
            f"rollout.samples_per_prompt={group} must be >= 2 with algorithm.std_normalise={algorithm.std_normalise}, "
            f"algorithm.leave_one_out={algorithm.leave_one_out}: one sample has neither spread nor others; raise it"
        )


def _check_training_law(cfg: RunConfig) -> None:
    sampling = cfg.rollout.sampling
    if sampling.greedy or sampling.top_k == 1:
        raise ValueError(
            f"rollout.sampling.temperature={sampling.temperature} must be > 0 and top_k={sampling.top_k} must not be 1 "
            "in training: all samples of a group would be equal; use temperature 1.0 and top_k 0"
        )


def _check_draft(cfg: RunConfig) -> None:
    if cfg.speculation == "off":
        if cfg.rollout.rule is not None:
            raise ValueError("rollout.rule must be none with speculation=off, which drafts nothing; leave it out")
        return
    if cfg.draft is None:
        raise ValueError(
            f"draft=None with speculation={cfg.speculation} must be a draft config; give one, or speculation=off"
        )
    rule = cfg.rollout.rule
    if rule is not None and rule.lengths[-1] != cfg.draft_length:
        raise ValueError(
            f"rollout.rule.lengths={rule.lengths} must end with draft_length={cfg.draft_length}; change one of them"
        )
    family, longest = family_of(cfg.draft), cfg.draft.max_draft_length
    cfg.draft.check_target(cfg.policy)
    cfg.draft.check_run(from_checkpoint=cfg.draft_checkpoint is not None)
    if cfg.speculation == "cotrained" and not family.trained:
        raise ValueError(
            f"speculation=cotrained needs a draft with weights to train, but draft is {family.name}; use "
            "speculation=frozen"
        )
    if cfg.draft_checkpoint is not None and family.load is None:
        raise ValueError(f"draft_checkpoint={cfg.draft_checkpoint} must be none: {family.name} drafts have no weights")
    timed = cfg.speed.draft_lengths if cfg.speed.repetitions else ()
    for name, lengths in (("draft_length", (cfg.draft_length,)), ("speed.draft_lengths", timed)):
        if longest is not None and max(lengths, default=0) > longest:
            raise ValueError(
                f"{name}={max(lengths)} must be <= {longest}, the most this {family.name} draft proposes in a round; "
                "lower it, or use a draft of a larger block"
            )


def _check_tree(cfg: RunConfig) -> None:
    if cfg.tree is None:
        if cfg.verification == "tree":
            raise ValueError(
                "tree=None must be a TreeConfig with verification=tree; give one in the config file, or verify token "
                "or block"
            )
        return
    if cfg.verification != "tree":
        raise ValueError(f"tree={cfg.tree} must be none with verification={cfg.verification}; use verification=tree")
    if len(cfg.tree.widths) != cfg.draft_length:
        raise ValueError(
            f"tree.widths={cfg.tree.widths} must be as many as draft_length={cfg.draft_length}; change one of them"
        )
    timed = max(cfg.speed.draft_lengths) if cfg.speed.repetitions else 0
    for name, value, rule, refused in (
        ("speculation", cfg.speculation, "frozen or cotrained", cfg.speculation == "off"),
        ("rollout.slots", cfg.rollout.slots, "none", cfg.rollout.slots is not None),
        ("rollout.devices", cfg.rollout.devices, "one", cfg.rollout.devices != "one"),
        ("verify_budget", cfg.verify_budget, "none", cfg.verify_budget is not None),
        ("policy", type(cfg.policy).__name__, "without recurrent layers", cfg.policy.recurrent),
        ("speed.draft_lengths", cfg.speed.draft_lengths, f"<= {cfg.draft_length}", timed > cfg.draft_length),
    ):
        if refused:
            raise ValueError(f"{name}={value} must be {rule} with verification=tree; change one of them")


def _check_experts(cfg: RunConfig) -> None:
    for name, asked, off in (
        ("rollout.record_experts", cfg.rollout.record_experts, False),
        ("algorithm.router_balance_coefficient", cfg.algorithm.router_balance_coefficient, 0.0),
    ):
        if asked and cfg.policy.mixture is None:
            raise ValueError(
                f"{name}={asked} must be {off} with policy={type(cfg.policy).__name__}, which has no experts"
            )


def _check_mesh(cfg: RunConfig) -> None:
    cfg.mesh.check_policy(cfg.policy)
    _check_sequence_losses(cfg)
    _check_rollout_devices(cfg)
    stripe = cfg.mesh.stripe
    if stripe is None or cfg.speculation == "off" or cfg.draft is None or not family_of(cfg.draft).trained:
        return
    if stripe < cfg.draft.label_reach:
        raise ValueError(
            f"mesh.stripe={stripe} must be >= {cfg.draft.label_reach}, the tokens that the draft's labels reach ahead; "
            "raise it, or use none"
        )


def _check_sequence_losses(cfg: RunConfig) -> None:
    """A stage makes the loss of a micro-batch under a condition, where only whole rows can be looked at."""
    algorithm, mesh = cfg.algorithm, cfg.mesh
    if not algorithm.by_sequence or not mesh.staged:
        return
    named = (
        f"algorithm.policy_loss={algorithm.policy_loss}, correction={algorithm.correction}, "
        f"sequence_error_limit={algorithm.sequence_error_limit}, which look at whole sequences"
    )
    if mesh.context > 1:
        raise ValueError(
            f"mesh.context={mesh.context} must be 1 with mesh.stage={mesh.stage}, mesh.microbatches="
            f"{mesh.microbatches} and {named}; drop one of the axes"
        )
    if mesh.stage > 1 and mesh.head_placement != "last_stage":
        raise ValueError(f"mesh.head_placement={mesh.head_placement} must be last_stage with {named}; set it")


def _check_rollout_devices(cfg: RunConfig) -> None:
    """What rollouts over several devices do not have."""
    rollout, mesh = cfg.rollout, cfg.mesh
    if rollout.devices == "one":
        return
    if mesh.devices == 1:
        raise ValueError(
            "rollout.devices=mesh must be one where the mesh has one device; raise mesh.data or mesh.tensor"
        )
    shards = mesh.devices // mesh.tensor
    if mesh.tensor > 1 and cfg.speculation != "off" and isinstance(cfg.draft, SelfInt8Config):
        raise ValueError(
            f"mesh.tensor={mesh.tensor} must be 1 with rollout.devices=mesh and draft=SelfInt8Config, which is made of "
            "whole weights; change it, or use rollout.devices=one"
        )
    for name, value, off, why in (
        ("rollout.rule", rollout.rule, None, "a rule looks at the rounds of all sequences"),
        ("verify_budget", cfg.verify_budget if shards > 1 else None, None, "a budget is shared by all sequences"),
        ("speed.repetitions", cfg.speed.repetitions, 0, "rounds are timed on one device"),
    ):
        if value != off:
            raise ValueError(
                f"{name}={value} must be {'none' if off is None else off} with rollout.devices=mesh: {why}; change it, "
                "or use rollout.devices=one"
            )
    if rollout.slots is not None and rollout.slots % shards:
        raise ValueError(
            f"rollout.slots={rollout.slots} must be a multiple of {shards}, the devices that share the sequences with "
            f"rollout.devices=mesh; use {-(-rollout.slots // shards) * shards}"
        )


_LATER: dict[str, tuple[type, tuple[str, ...]]] = {
    "SamplingConfig": (SamplingConfig, ("min_p",)),
    "ComputeConfig": (ComputeConfig, ("step_matmul",)),
    "EvaluationConfig": (EvaluationConfig, ("samples_per_prompt",)),
    "GrpoConfig": (
        GrpoConfig,
        (
            *("sample_std", "group_baseline", "batch_normalise", "policy_loss", "dual_clip", "aggregation"),
            *("fixed_length", "kl_estimator", "kl_in", "entropy_coefficient", "correction", "correction_low"),
            *("correction_high", "sequence_error_limit", "reward_range", "overlong_buffer", "overlong_penalty"),
            "overlong_filter",
        ),
    ),
    "RolloutConfig": (RolloutConfig, ("slots", "rule", "devices")),
    "RunConfig": (RunConfig, ("mesh", "verification", "tree", "draft_schedule")),
}
"""Settings that there are saved configs without. Their defaults are what such a config meant; a setting that is added
gets a line here, and a default under which nothing changes."""


def with_later_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config with the settings that came after it, at the values it then had without a name (`_LATER`)."""

    def filled(node: Any) -> Any:
        if isinstance(node, list):
            return [filled(element) for element in node]
        if not isinstance(node, Mapping):
            return node
        cls, names = _LATER.get(str(node.get("type")), (None, ()))
        defaults = {} if cls is None else {field.name: field.default for field in fields(cls) if field.name in names}
        later = {name: to_json(value) if is_dataclass(value) else value for name, value in defaults.items()}
        return later | {name: filled(value) for name, value in node.items()}

    return filled(saved)


def resolve_checkpoint(name: str) -> Path:
    """Folder of a checkpoint given by path or as `shipped:NAME`."""
    if not name.startswith(SHIPPED):
        return Path(name)
    folder = _ASSETS / name.removeprefix(SHIPPED)
    if not folder.is_dir():
        known = sorted(f"{SHIPPED}{p.parent.relative_to(_ASSETS)}" for p in _ASSETS.glob("**/config.json"))
        raise UserError(f"checkpoint {name} is not shipped; shipped: {', '.join(known)}")
    return folder


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, apply `a.b=value` overrides, check the whole."""
    return apply_overrides(load_python_config(Path(path), RunConfig), overrides)
