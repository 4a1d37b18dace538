"""`draftco plan --draw-schedule`: a pipeline schedule, drawn, and the room it needs.

Inputs are those of a virtual stage that wait for its backward; there is one more place on every stage, for work that is
not there. Mailbox depths are slots for the taps of a virtual stage: on the last stage if the draft trains there, on the
stage that makes them if it trains on all stages (`pipeline.mailbox`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from draftco_jax.errors import UserError
from draftco_jax.pipeline.drawing import draw_svg, draw_text, title
from draftco_jax.pipeline.mailbox import Placement, mailbox_depth
from draftco_jax.pipeline.schedule import Schedule, ScheduleName, Work, make_schedule


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """A schedule and what it needs."""

    schedule: Schedule
    mailbox_depths: dict[int, dict[str, int]]
    """Of each virtual stage with taps, by placement of the draft."""

    def lines(self) -> list[str]:
        """The drawing and a few figures."""
        kept = self.schedule.saved_inputs.tolist()
        found = [
            title(self.schedule),
            draw_text(self.schedule),
            f"Inputs kept, by stage: {', '.join(map(str, kept))}",
        ]
        depths = self.mailbox_depths
        if depths:
            slots = {place: ", ".join(str(depth[place]) for depth in depths.values()) for place in get_args(Placement)}
            found.append(
                f"Mailbox slots of virtual stages {', '.join(map(str, depths))}: {slots['last_stage']} with the draft "
                f"on the last stage, {slots['all_stages']} with the draft on all stages"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it, with the tables: for each tick and stage [microbatch, chunk, slot], or null."""
        schedule = self.schedule
        return {
            "schedule": schedule.name,
            "stages": schedule.stages,
            "chunks": schedule.chunks,
            "microbatches": schedule.microbatches,
            "ticks": schedule.ticks,
            "bubble_share": schedule.bubble_share,
            "saved_inputs": schedule.saved_inputs.tolist(),
            "mailbox_depths": {str(k): depth for k, depth in self.mailbox_depths.items()},
            "phases": [phase._asdict() for phase in schedule.phases],
            "forward": _rows(schedule.forward),
            "backward": _rows(schedule.backward),
        }

    def write_svg(self, path: Path) -> None:
        """The drawing as a picture."""
        try:
            path.write_text(draw_svg(self.schedule))
        except OSError as error:
            raise UserError(f"--svg {path} cannot be written: {error.strerror}") from error


def plan_schedule(
    name: ScheduleName,
    *,
    stages: int,
    chunks: int,
    microbatches: int,
    tap_stages: Sequence[int] = (),
    tensor_ranks: int = 1,
) -> ScheduleReport:
    """Make a schedule and find what it needs; what cannot be scheduled is a UserError.

    Args:
        name: of the schedule.
        stages: S.
        chunks: of a stage.
        microbatches: of an update.
        tap_stages: virtual stages that make taps.
        tensor_ranks: over which a draft on all stages is dealt out.
    """
    if tensor_ranks < 1:
        raise UserError(f"--tensor {tensor_ranks} must be >= 1, the ranks of the tensor axis; leave it out for 1")
    try:
        schedule = make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)
        depths = {
            k: {place: mailbox_depth(schedule, k, place, tensor_ranks) for place in get_args(Placement)}
            for k in tap_stages
        }
    except ValueError as error:
        raise UserError(str(error)) from error
    return ScheduleReport(schedule=schedule, mailbox_depths=depths)


def parse_stages(text: str) -> list[int]:
    """Numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"--tap-stages {text} must be numbers separated by commas; for example 0,1,2") from error


def _rows(work: Work) -> list[list[list[int] | None]]:
    ticks, stages = work.active.shape
    cell = lambda t, s: [int(table[t, s]) for table in work[:3]] if work.active[t, s] else None  # noqa: E731
    return [[cell(t, s) for s in range(stages)] for t in range(ticks)]
