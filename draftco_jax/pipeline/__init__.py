"""Pipeline parallelism: schedules, stages, and the tap channel that brings features to where the draft trains.

schedule      which stage works on what and when, tables made and checked on the host
layout        which layers lie on which stage, and the parameter tree of stages
staged        the policy cut so: the same blocks, a chunk at a time
stages        the ticks: forwards, backwards, hops, the head
tap_channel   features from source stages to the draft
spec          all choices of a run as one value
mailbox, slack, timeline, orders, drawing: models on the host, plots
"""

from draftco_jax.pipeline.layout import StageLayout, from_stages, split_layers, to_stages
from draftco_jax.pipeline.schedule import Phase, Schedule, ScheduleName, Work, check_schedule, make_schedule
from draftco_jax.pipeline.spec import PipelineSpec
from draftco_jax.pipeline.staged import StagedDecoder

__all__ = [
    "Phase",
    "PipelineSpec",
    "Schedule",
    "ScheduleName",
    "StageLayout",
    "StagedDecoder",
    "Work",
    "check_schedule",
    "from_stages",
    "make_schedule",
    "split_layers",
    "to_stages",
]
