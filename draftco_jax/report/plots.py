"""The list of the report's plots, in reading order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from draftco_jax.report import plots_draft, plots_experts, plots_learning, plots_speed
from draftco_jax.report.figure_style import Drawn, LeftOut
from draftco_jax.report.run_data import RunData


class Plot(NamedTuple):
    """One plot: its file name, its title, and the function that draws it or says why it cannot."""

    name: str
    title: str
    draw: Callable[[RunData], Drawn | LeftOut]


PLOTS = (
    Plot("reward_pass_rate", "Reward and pass rate", plots_learning.reward_and_pass_rate),
    Plot("accepted_length", "Accepted length", plots_draft.accepted_length),
    Plot("acceptance_by_position", "Acceptance by position", plots_draft.acceptance_by_position),
    Plot("entropy_mismatch", "Accepted length: entropy part and mismatch part", plots_draft.entropy_and_mismatch),
    Plot("speed", "Plain and speculative decoding", plots_speed.plain_and_speculative),
    Plot("tokens_per_second", "Rollout speed", plots_speed.tokens_per_second),
    Plot("step_time", "Where a step's time goes", plots_speed.step_time_split),
    Plot("agreement", "Generator against trainer", plots_learning.agreement),
    Plot("entropy_length", "Entropy and response length", plots_learning.entropy_and_length),
    Plot("draft_loss", "Draft loss", plots_draft.draft_loss),
    Plot("gradient_norms", "Gradient norms", plots_learning.gradient_norms),
    Plot("experts", "Use of experts", plots_experts.use_of_experts),
)
