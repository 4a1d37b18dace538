"""The plot of a pre-training: how the held-out accepted length grows."""

from __future__ import annotations

from draftco_jax.report.figure_style import (
    COTRAINED,
    FROZEN,
    GREY,
    VERMILLION,
    Drawn,
    draw_line,
    legend_below,
    new_figure,
    over_steps,
)
from draftco_jax.report.plots_draft import TAU
from draftco_jax.report.run_data import RunData


def held_out_accepted_length(run: RunData, draft_length: int, adapted_from: int | None) -> Drawn:
    """Held-out accepted length and tau_prob of the training batches over the steps of both phases.

    `adapted_from` is the last step of the first phase, None where there is no second one.
    """
    figure, (axes,) = new_figure()
    draw_line(axes, run.series("draft/tau_prob"), f"{TAU}, training batches", COTRAINED, smooth=True)
    held_out = run.series("eval/accepted_length")
    axes.plot(*held_out, "D-", color=VERMILLION, linewidth=1.2, label="sampled, held-out prompts")
    untrained = run.series("eval/untrained_accepted_length").values[0]
    axes.axhline(untrained, color=FROZEN, linestyle="--", linewidth=1.4, label=f"untrained draft: {untrained:.2f}")
    most = draft_length + 1
    axes.axhline(most, color=GREY, linestyle=":", linewidth=1.4, label=f"most possible, K + 1 = {most}")
    if adapted_from is not None:
        axes.axvline(adapted_from, color=GREY, linewidth=0.9)
        axes.annotate(" second phase", (adapted_from, 1.0 + 0.3 * draft_length), fontsize=8, color=GREY)
    axes.set_ylim(0.9, most + 0.2)
    over_steps(axes, "tokens per verify round")
    axes.set_xlabel("step (draft updates)")
    legend_below(figure, [axes])
    return Drawn(
        figure,
        "Sampled: committed tokens / verify rounds on held-out prompts, pooled over all requests. τ_prob: the same "
        "expected from both laws at each token of the training batch, which counts rounds that begin anywhere.",
    )
