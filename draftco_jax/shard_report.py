"""What each device holds of a policy under a layout: counts and bytes by component, worked out without any weights.

Shapes and logical axes come from the modules (built abstractly), splits from the table of `distributed.sharding`, so
that what is reported is what the update would place. Layers are dealt to stages in order, as evenly as their number
allows; the embedding is on the first stage, final norm and head on the last, a tied table on both. Reported is the
heaviest stage.

Bytes of a device: parameters in their dtype, gradients float32, optimizer state of Adam (two moments float32, and with
bfloat16 parameters a float32 copy of each). Activations, caches and buffers of collectives are not in it.

    draftco shards qwen3-235b-a22b tensor=4 stage=4 context=2 data=2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path as FilePath
from typing import Any, Literal

from flax import nnx

from draftco_jax.distributed.axes import MeshAxis
from draftco_jax.distributed.sharding import TRAIN, Rules, Stated, local_shape, partition_spec, stated_parameters
from draftco_jax.errors import UserError
from draftco_jax.models.compute import ComputeConfig
from draftco_jax.models.gpt_oss import GptOssConfig
from draftco_jax.models.hf_weights import load_config
from draftco_jax.models.nemotron_h import NemotronHConfig
from draftco_jax.models.qwen3 import Qwen3Config
from draftco_jax.models.qwen3_5_moe import Qwen35MoeConfig
from draftco_jax.models.qwen3_moe import Qwen3MoeConfig
from draftco_jax.models.transformer import DecoderConfig

FloatName = Literal["bfloat16", "float32"]
Path = tuple[Any, ...]

COMPONENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embedding and head", ("vocab",)),
    ("experts", ("expert",)),
    ("attention", ("heads", "kv_heads")),
    ("recurrent mixers", ("mixer", "mixer_heads")),
    ("dense and shared MLPs", ("mlp",)),
    ("routers", ("router",)),
)
"""Which arrays are counted together, by a logical axis that they have; others are norms and gates."""
REST = "norms and gates"

SPREAD_EXPERTS: Rules = {**TRAIN, "expert": (MeshAxis.DATA, MeshAxis.CONTEXT, MeshAxis.EXPERT, MeshAxis.TENSOR)}
"""Experts over all devices of a stage, as large mixtures are trained: whole experts on each, none of them cut."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published size and the layout it is reported for by default."""

    config: Callable[[], DecoderConfig]
    sizes: Mapping[str, int]
    rules: Rules = field(default_factory=lambda: SPREAD_EXPERTS)


PUBLISHED: dict[str, Published] = {
    "qwen3-8b": Published(config=Qwen3Config.qwen3_8b, sizes={"tensor": 2, "stage": 2, "context": 2}),
    "qwen3.5-35b-a3b": Published(
        config=Qwen35MoeConfig.qwen35_35b_a3b, sizes={"tensor": 2, "stage": 2, "context": 2, "data": 2}
    ),
    "nemotron3-30b-a3b": Published(
        config=NemotronHConfig.nemotron3_nano_30b, sizes={"tensor": 2, "stage": 2, "context": 2, "data": 2}
    ),
    "qwen3.5-122b-a10b": Published(
        config=Qwen35MoeConfig.qwen35_122b_a10b, sizes={"tensor": 4, "stage": 4, "context": 2, "data": 2}
    ),
    "gpt-oss-120b": Published(
        config=GptOssConfig.gpt_oss_120b, sizes={"tensor": 4, "stage": 4, "context": 2, "data": 2}
    ),
    "qwen3-235b-a22b": Published(
        config=Qwen3MoeConfig.qwen3_235b_a22b, sizes={"tensor": 4, "stage": 4, "context": 2, "data": 2}
    ),
}
"""Tensor, stage and context sizes of arXiv 2609.07108; its expert parallelism of 8 and 16 is tensor x context x data 2.
The last is not in that paper: the layout of its largest models."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Of one component, or of all."""

    parameters: int
    """In the whole model."""
    local: int
    """On a device of the heaviest stage."""
    parameter_bytes: int
    """The rest: of such a device."""
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def bytes(self) -> int:
        """Of parameters, gradients and optimizer."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """What a device holds."""

    sizes: dict[str, int]
    dtype: str
    stage: int
    """The heaviest, counted from 0."""
    layers: tuple[int, ...]
    """Of each stage."""
    components: dict[str, Held]

    @property
    def devices(self) -> int:
        """In the mesh."""
        return prod(self.sizes.values())

    @property
    def total(self) -> Held:
        """All components together."""
        names = Held.__dataclass_fields__
        return Held(**{name: sum(getattr(held, name) for held in self.components.values()) for name in names})

    def table(self) -> str:
        """As text, a line for each component; GiB of a device."""
        gib = 2**30
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        head = f"{self.devices} devices: {mesh}; layers of the stages {self.layers}, the heaviest is stage {self.stage}"
        lines = [
            head,
            f"{'':24}{'parameters':>18}{'a device':>16}{self.dtype:>12}{'gradients':>11}{'Adam':>8}{'GiB':>8}",
        ]
        for name, held in [*self.components.items(), ("all", self.total)]:
            lines.append(
                f"{name:24}{held.parameters:>18,}{held.local:>16,}{held.parameter_bytes / gib:>12.2f}"
                f"{held.gradient_bytes / gib:>11.2f}{held.optimizer_bytes / gib:>8.2f}{held.bytes / gib:>8.2f}"
            )
        return "\n".join(lines)


def shard_report(
    cfg: DecoderConfig, sizes: Mapping[str, int], rules: Rules = SPREAD_EXPERTS, *, dtype: FloatName = "bfloat16"
) -> ShardReport:
    """What a device holds of this policy on a mesh of these sizes, under this table.

    Raises:
        ValueError: an unknown mesh axis, fewer layers than stages, or a dim that the table does not let be split.
    """
    unknown = sorted(set(sizes) - set(MeshAxis))
    if unknown:
        raise ValueError(f"axes={unknown} must be among {[str(axis) for axis in MeshAxis]}; rename them")
    stages = sizes.get(MeshAxis.STAGE, 1)
    if not 1 <= stages <= cfg.num_hidden_layers:
        raise ValueError(f"stage={stages} must be in 1..{cfg.num_hidden_layers}, the layers of the policy; lower it")
    stated = by_layer(cfg)
    layers = deal(cfg.num_hidden_layers, stages)
    pieces = {
        path: prod(local_shape(one.shape, partition_spec(path, one, rules, sizes), sizes))
        for path, one in stated.items()
    }
    held = [[path for path in stated if stage in stages_of(path, layers, cfg)] for stage in range(stages)]
    heaviest = max(range(stages), key=lambda stage: sum(pieces[path] for path in held[stage]))
    width = {"bfloat16": 2, "float32": 4}[dtype]
    components = {}
    for name in (*(name for name, _ in COMPONENTS), REST):
        own = [path for path, one in stated.items() if component_of(one) == name]
        local = sum(pieces[path] for path in own if path in set(held[heaviest]))
        if own:
            components[name] = Held(
                parameters=sum(prod(stated[path].shape) for path in own),
                local=local,
                parameter_bytes=width * local,
                gradient_bytes=4 * local,
                optimizer_bytes=(12 if dtype == "bfloat16" else 8) * local,
            )
    return ShardReport(sizes=dict(sizes), dtype=dtype, stage=heaviest, layers=layers, components=components)


def by_layer(cfg: DecoderConfig) -> dict[Path, Stated]:
    """All parameters, layers one by one. Built with alike layers stacked, which is one layer of each kind to trace."""
    module = nnx.eval_shape(lambda: cfg.build(nnx.Rngs(0), ComputeConfig(scan_layers=True)))
    found: dict[Path, Stated] = {}
    for path, one in stated_parameters(module).items():
        if path[0] != "runs":
            found[path] = one
            continue
        single = replace(one, shape=one.shape[1:], logical_axes=one.logical_axes[1:])
        found |= {("layers", layer, *path[3:]): single for layer in cfg.runs[path[1]].layers_at(path[2])}
    return found


def deal(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, the first ones have one more."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def stages_of(path: Path, layers: Sequence[int], cfg: DecoderConfig) -> tuple[int, ...]:
    """Stages that hold the parameter at a tree path."""
    last = len(layers) - 1
    if path[0] == "layers":
        ends = [sum(layers[: stage + 1]) for stage in range(len(layers))]
        return (next(stage for stage, end in enumerate(ends) if int(path[1]) < end),)
    if path[0] == "embed_tokens":
        return tuple(sorted({0, last})) if cfg.tie_word_embeddings else (0,)
    return (last,)


def component_of(stated: Stated) -> str:
    """Its name in `COMPONENTS`, by its logical axes."""
    axes = set(stated.logical_axes)
    return next((name for name, some in COMPONENTS if axes & set(some)), REST)


def report_of(name: str, axes: Sequence[str], dtype: FloatName = "bfloat16") -> ShardReport:
    """The report for a name of `PUBLISHED` or a model folder, and AXIS=SIZE ... (default: that of `PUBLISHED`)."""
    known = PUBLISHED.get(name)
    if known is None and not (FilePath(name) / "config.json").is_file():
        raise UserError(f"model={name!r} must be a folder with a config.json, or one of: {', '.join(PUBLISHED)}")
    sizes = dict(known.sizes) if known is not None and not axes else {}
    for argument in axes:
        axis, equals, size = argument.partition("=")
        if not (equals and axis in set(MeshAxis) and size.isdecimal() and int(size) > 0):
            raise UserError(f"{argument!r} must be AXIS=SIZE with an axis of {', '.join(map(str, MeshAxis))}")
        if axis in sizes:
            raise UserError(f"{argument!r}: {axis} must be given once; leave the other one out")
        sizes[axis] = int(size)
    cfg = load_config(FilePath(name)) if known is None else known.config()
    try:
        return shard_report(cfg, sizes, SPREAD_EXPERTS if known is None else known.rules, dtype=dtype)
    except ValueError as error:
        raise UserError(str(error)) from error
