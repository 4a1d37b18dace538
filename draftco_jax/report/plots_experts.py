"""The plot of a policy with experts: how evenly they are used, how many a forward reads, whether choices were kept."""

from __future__ import annotations

from draftco_jax.report.figure_style import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILLION,
    Drawn,
    LeftOut,
    draw_line,
    legend_below,
    new_figure,
    over_steps,
)
from draftco_jax.report.run_data import RunData

LOADS = (
    ("experts/load_max", "busiest expert, load / mean load", VERMILLION),
    ("experts/load_min", "least used expert, load / mean load", BLUE),
)
TOUCHED = "rollout/experts_touched_per_forward"
CHANGED = "experts/replay_changed_fraction"


def use_of_experts(run: RunData) -> Drawn | LeftOut:
    """Loads over the mean load; experts touched in a forward of the rollouts; replayed choices that would differ."""
    if not run.has(LOADS[0][0]):
        return LeftOut("Use of experts: the policy of this run has none, or takes no update.")
    others = [(name, label, colour) for name, label, colour in _SINGLE if run.has(name)]
    figure, (loads, *panels) = new_figure(1 + len(others))
    for name, label, colour in LOADS:
        draw_line(loads, run.series(name), label, colour)
    loads.axhline(1.0, color=GREY, linestyle=":", linewidth=1.4, label="all alike")
    over_steps(loads, "load")
    for axes, (name, label, colour) in zip(panels, others, strict=True):
        draw_line(axes, run.series(name), label, colour)
        over_steps(axes, "experts" if name == TOUCHED else "fraction")
    for axes in (loads, *panels):
        axes.label_outer()
    legend_below(figure, [loads, *panels], columns=1)
    return Drawn(figure, _CAPTION + (_REPLAY if run.has(CHANGED) else ""))


_SINGLE = (
    (TOUCHED, "experts touched in a forward of the rollouts", GREEN),
    (CHANGED, "replayed choices that the trainer would not make", PURPLE),
)
_CAPTION = (
    "Loads: tokens sent to an expert over the mean of all experts, of a step's trained rows, mean over layers. "
    "Touched: different experts that a forward of the rollouts reads in a layer, over the whole batch. A verify round "
    "of several tokens touches more than a single token does: that is why drafts gain less on such policies. "
)
_REPLAY = (
    "Replayed: the update uses the routing of the rollouts; the fraction says how often the trainer's own router "
    "would have chosen otherwise."
)
