"""How an update goes through the stages: one value that a run compiles in."""

from __future__ import annotations

from dataclasses import dataclass

from draftco_jax.distributed.axes import MeshAxis
from draftco_jax.pipeline.layout import StageLayout
from draftco_jax.pipeline.schedule import ScheduleName, make_schedule
from draftco_jax.pipeline.stages import HeadPlacement
from draftco_jax.pipeline.tap_channel import Baseline, Placement, TapMode, TapPlan


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """How the update goes through the stages. Compiled in."""

    layout: StageLayout
    microbatches: int
    """M, of the rows of a device."""
    schedule: ScheduleName = "1f1b"
    draft_placement: Placement = "all_stages"
    head_placement: HeadPlacement = "all_stages"
    """Where the policy's head and loss are computed: a part of the tokens on every stage, or all on the last."""
    tap_mode: TapMode | Baseline = "direct"
    stamps: bool = False
    """Check the number of each micro-batch's features where they are used (`pipeline/wrong_stamps`)."""
    stage_axis: str = MeshAxis.STAGE

    def __post_init__(self) -> None:
        """Refuse no micro-batches."""
        if self.microbatches < 1:
            raise ValueError(f"microbatches={self.microbatches} must be >= 1; as many as stages, or more")

    @property
    def padded(self) -> int:
        """M with those that hold nothing: groups of as many as there are stages."""
        stages = self.layout.stages
        return -(-self.microbatches // stages) * stages

    def plan(self, tap_layers: tuple[int, ...], *, tensor_axis: str | None = None, tensor_ranks: int = 1) -> TapPlan:
        """Schedule and route of the features; the tensor axis, over whose ranks a draft on all stages is dealt out."""
        layout = self.layout
        schedule = make_schedule(self.schedule, stages=layout.stages, chunks=layout.chunks, microbatches=self.padded)
        dealt = tensor_ranks > 1 and self.draft_placement == "all_stages"
        return TapPlan(
            layout,
            schedule,
            tap_layers,
            self.draft_placement,
            self.tap_mode,
            self.stamps,
            tensor_axis=tensor_axis if dealt else None,
            tensor_ranks=tensor_ranks if dealt else 1,
        )
