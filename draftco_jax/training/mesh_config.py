"""Config of the mesh that a run's updates go over, and what it means for rows, attention and stages.

All sizes 1 is one device. Rows of a batch are split over data and expert, tokens of a row over context, layers over
stage, weights over tensor and (a mixture's) over the axes of `experts_over`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from draftco_jax.context_parallel import PackedRows
from draftco_jax.context_parallel.branch import TrunkMode
from draftco_jax.distributed.axes import MeshAxis
from draftco_jax.models.transformer import DecoderConfig
from draftco_jax.pipeline.layout import split_layers
from draftco_jax.pipeline.schedule import ScheduleName
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.stages import HeadPlacement
from draftco_jax.pipeline.tap_channel import Placement, TapMode

ExpertAxis = Literal["data", "context", "expert", "tensor"]

_ONLY_EXPERT: tuple[ExpertAxis, ...] = ("expert",)
_NAMES = {
    "schedule": ScheduleName,
    "draft_placement": Placement,
    "head_placement": HeadPlacement,
    "tap_mode": TapMode,
    "trunk_mode": TrunkMode,
}


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices that an update is spread over; rollouts run on one of them, or with `rollout.devices=mesh` over all."""

    data: int = 1
    """Devices that rows are split over."""
    stage: int = 1
    """Stages that layers are split over, one stretch after the other."""
    context: int = 1
    """Devices that the tokens of a row are split over."""
    expert: int = 1
    """More devices that rows are split over, and the experts of a mixture."""
    tensor: int = 1
    """Devices that heads, hidden widths and the vocabulary are split over."""
    experts_over: tuple[ExpertAxis, ...] = _ONLY_EXPERT
    """Axes that the experts of a mixture are split over, major first."""
    chunks: int = 1
    """V: stretches of layers that a stage holds; more than one is an interleaved schedule."""
    microbatches: int | None = None
    """M: groups that the rows of a device go through the stages in; none: stage x tensor, so that each device of both
    trains the draft on one. Without stages, gradients are summed over so many groups one after the other."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each of the stage x chunks stretches; none: as even as can be."""
    schedule: ScheduleName = "1f1b"
    draft_placement: Placement = "all_stages"
    """Where the draft trains: dealt out over stages and tensor ranks, or all of it on the last stage."""
    head_placement: HeadPlacement = "all_stages"
    """Where the policy's loss is made: a part of the tokens on every stage, or all of them on the last."""
    tap_mode: TapMode = "direct"
    """When features are sent to the draft: in the tick that made them (direct), in the one before their use (hold), or
    after the pipeline (post)."""
    stripe: int | None = None
    """Tokens of a stripe of the striped layout of a row; none: zigzag."""
    trunk_mode: TrunkMode = "replay"
    """How keys and values that a draft reads more than once are served."""
    shard_optimizer_state: bool = True
    """Split moments and float32 copies over data, where there is any; false: they lie as the parameters."""

    def __post_init__(self) -> None:
        """Refuse sizes, counts and names that mean nothing."""
        for name in (*map(str, MeshAxis), "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1; 1 leaves it out")
        for name in ("microbatches", "stripe"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be >= 1; use none for the default")
        for name, known in _NAMES.items():
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name}={getattr(self, name)} must be one of {', '.join(get_args(known))}")
        self._check_used()
        axes = self.experts_over
        if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(get_args(ExpertAxis)):
            raise ValueError(
                f"experts_over={','.join(axes)} must be different axes of {', '.join(get_args(ExpertAxis))}; "
                "'expert' is the default"
            )

    def _check_used(self) -> None:
        """Refuse choices that nothing on this mesh reads."""
        whole = "with context=1: rows are whole; raise context"
        if self.stripe is not None and self.context == 1:
            raise ValueError(f"stripe={self.stripe} must be none {whole}")
        if self.stage == 1 and (self.chunks > 1 or self.layers_per_stage is not None):
            raise ValueError(
                f"chunks={self.chunks} must be 1 and layers_per_stage={self.layers_per_stage} none with stage=1; "
                "raise stage"
            )
        alone = f"with stage=1 and microbatches={self.microbatches}: no pipeline; raise stage or microbatches"
        first = "with stage=1: there is no other stage; raise stage"
        for name, read, why in (
            ("schedule", self.staged, alone),
            ("draft_placement", self.staged, alone),
            ("tap_mode", self.staged, alone),
            ("head_placement", self.stage > 1, first),
            ("trunk_mode", self.context > 1, whole),
        ):
            default = type(self).__dataclass_fields__[name].default
            if not read and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)} must be {default} {why}")

    @property
    def staged(self) -> bool:
        """Whether the update goes through a pipeline, if only of one stage."""
        return self.stage > 1 or (self.microbatches or 1) > 1

    @property
    def sizes(self) -> dict[str, int]:
        """Of the axes of the mesh; empty: one device and no mesh."""
        wanted = {str(axis): int(getattr(self, axis)) for axis in MeshAxis}
        return {axis: size for axis, size in wanted.items() if size > 1 or (axis == MeshAxis.STAGE and self.staged)}

    @property
    def devices(self) -> int:
        """How many it takes."""
        return prod(self.sizes.values())

    @property
    def micro_batches(self) -> int:
        """M."""
        return self.microbatches or (self.stage * self.tensor if self.stage > 1 else 1)

    @property
    def row_groups(self) -> int:
        """What the number of rows must be a multiple of: each device has M groups of equal size."""
        return self.data * self.expert * self.micro_batches

    def row_tokens(self, tokens: int, label_reach: int) -> int:
        """Tokens of rows that hold so many, padded: ranks share them evenly, in pieces that hold what labels reach."""
        if self.context == 1:
            return tokens
        unit = 2 * self.context if self.stripe is None else self.context * self.stripe
        needed = max(tokens, 2 * self.context * label_reach if self.stripe is None else tokens)
        return -(-needed // unit) * unit

    def packed(self) -> PackedRows:
        """How rows are spread."""
        sizes = self.sizes
        present = tuple(str(axis) for axis in self.experts_over if axis in sizes)
        return PackedRows(
            ranks=self.context,
            context_axis=MeshAxis.CONTEXT.value if self.context > 1 else None,
            row_axes=tuple(axis.value for axis in (MeshAxis.DATA, MeshAxis.EXPERT) if axis in sizes),
            stripe=self.stripe,
            trunk_mode=self.trunk_mode,
            tensor_axis=MeshAxis.TENSOR.value if self.tensor > 1 else None,
            expert_axis=present or None,
        )

    def pipeline(self, policy: DecoderConfig) -> PipelineSpec | None:
        """How the layers of this policy go through the stages; None without any."""
        if not self.staged:
            return None
        return PipelineSpec(
            layout=split_layers(
                policy.layer_kinds, stages=self.stage, chunks=self.chunks, counts=self.layers_per_stage
            ),
            microbatches=self.micro_batches,
            schedule=self.schedule,
            draft_placement=self.draft_placement,
            head_placement=self.head_placement,
            tap_mode=self.tap_mode,
        )

    def check_policy(self, policy: DecoderConfig) -> None:
        """Refuse what this policy cannot be split into; heads and widths are looked at when a run is set up."""
        layers = policy.num_hidden_layers
        if self.stage * self.chunks > layers:
            raise ValueError(
                f"mesh.stage={self.stage} x mesh.chunks={self.chunks} must be <= {layers}, the layers of the policy; "
                "use fewer"
            )
        counts = self.layers_per_stage
        if counts is not None and (len(counts) != self.stage * self.chunks or min(counts) < 1 or sum(counts) != layers):
            raise ValueError(
                f"mesh.layers_per_stage={','.join(map(str, counts))} must be {self.stage * self.chunks} numbers >= 1, "
                f"one for each stage and chunk, that add up to {layers}, the layers of the policy; use none for an "
                "even split"
            )
        if policy.mixture is None and (self.expert > 1 or self.experts_over != _ONLY_EXPERT):
            raise ValueError(
                f"mesh.expert={self.expert} must be 1 and mesh.experts_over={','.join(self.experts_over)} be left out "
                f"with policy={type(policy).__name__}, which has no experts; use mesh.data"
            )
