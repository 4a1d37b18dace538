"""Pipeline parallelism: which stage works on what and when, as tables made and checked on the host."""

from draftco_jax.pipeline.schedule import Phase, Schedule, ScheduleName, Work, check_schedule, make_schedule

__all__ = ["Phase", "Schedule", "ScheduleName", "Work", "check_schedule", "make_schedule"]
