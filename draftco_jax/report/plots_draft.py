"""Plots of the draft: how many of its tokens are accepted, why that changes, how its training goes."""

from __future__ import annotations

import matplotlib
import numpy as np

from draftco_jax.report.figure_style import (
    BLUE,
    COTRAINED,
    FROZEN,
    GREY,
    INK,
    SAMPLED,
    VERMILLION,
    Drawn,
    LeftOut,
    draw_line,
    left_out,
    legend_below,
    new_figure,
    over_steps,
)
from draftco_jax.report.run_data import RunData, Series
from draftco_jax.report.words import signed

# At step 1 both drafts have the same weights; a difference of tau_prob above this is worth a word.
SAME_START_WITHIN = 1e-3

TAU = r"$\tau_\mathrm{prob}$"


def accepted_length(run: RunData) -> Drawn | LeftOut:
    """Tokens per verify round: sampled in the rollouts, and expected from the laws of both drafts."""
    wanted = [
        ("rollout/accepted_length", "sampled in rollouts", SAMPLED, "-"),
        ("draft/tau_prob", f"{TAU}, co-trained draft", COTRAINED, "-"),
        ("frozen_draft/tau_prob", _frozen_label(run), FROZEN, "--"),
    ]
    present = [item for item in wanted if run.has(item[0])]
    if not present:
        return left_out(run, "Accepted length")
    figure, (axes,) = new_figure()
    for name, label, colour, dash in present:
        draw_line(axes, run.series(name), label, colour, dash=dash)
    held_out = run.series("eval/accepted_length")
    if held_out.steps:
        axes.plot(*held_out, "D", color=VERMILLION, label="sampled, held-out prompts")
    most = run.draft_length + 1
    axes.axhline(most, color=GREY, linestyle=":", linewidth=1.4, label=f"most possible, K + 1 = {most}")
    axes.set_ylim(1.0, most + 0.2)
    over_steps(axes, "tokens per verify round")
    legend_below(figure, [axes])
    caption = (
        "Sampled: committed tokens / verify rounds, pooled over all requests of a step, bonus and residual tokens "
        "included. τ_prob = 1 + Σ_k Π_{j≤k} (1 − TV_j) over the trained positions up to K, TV_j the total variation "
        "between the draft's and the policy's laws at each trained token. It has no sampling noise, and differs from "
        "the sampled length because rounds do not begin at every token."
    )
    if budget := run.config.get("verify_budget"):
        caption += (
            f" At most {budget} drafted tokens were verified in a round over the whole batch: sampled lengths are cut "
            "by that, those of the larger held-out batch by more, τ_prob is not."
        )
    if run.config.get("verification") == "block":
        caption += (
            " Drafts of a round were judged together, which accepts no fewer than judging them one after another does: "
            "sampled lengths show it, τ_prob is of the latter."
        )
    return Drawn(figure, caption)


def _frozen_label(run: RunData) -> str:
    return f"{TAU}, frozen {'twin' if run.speculation == 'cotrained' else 'draft'}"


def acceptance_by_position(run: RunData) -> Drawn | LeftOut:
    """The share of rounds in which draft token 1..K was accepted."""
    count = run.count("rollout/acceptance_rate_position")
    if not count:
        return left_out(run, "Acceptance by position")
    figure, (axes,) = new_figure()
    # From dark to light in one scale that also orders in print and for any colour vision; its pale end is left out.
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, count))
    for position in range(1, count + 1):
        series = run.series(f"rollout/acceptance_rate_position_{position}")
        draw_line(axes, series, f"position {position}", colours[position - 1])
    axes.set_ylim(0.0, 1.02)
    over_steps(axes, "accepted / verify rounds")
    legend_below(figure, [axes], columns=min(4, count))
    return Drawn(
        figure,
        "Share of all verify rounds in which the draft's token at this position was accepted. A position counts as "
        "reached only if all before it were accepted, so the curves are ordered.",
    )


def entropy_and_mismatch(run: RunData) -> Drawn | LeftOut:
    """The frozen twin's change of tau_prob, split in two by the co-trained draft on the same rollouts."""
    cotrained, frozen = run.series("draft/tau_prob"), run.series("frozen_draft/tau_prob")
    shared = sorted(set(cotrained.steps) & set(frozen.steps))
    if not shared:
        return LeftOut(
            "Entropy part and mismatch part: the split needs a co-trained draft and its frozen twin on the same "
            f"rollouts, and this run has speculation = {run.speculation}."
        )
    ours = dict(zip(*cotrained, strict=True))
    theirs = dict(zip(*frozen, strict=True))
    first = ours[shared[0]]
    entropy_part = Series(shared, [ours[step] - first for step in shared])
    mismatch_part = Series(shared, [theirs[step] - ours[step] for step in shared])
    change = Series(shared, [theirs[step] - first for step in shared])

    figure, (axes,) = new_figure()
    axes.axhline(0.0, color=GREY, linewidth=0.9)
    draw_line(axes, entropy_part, "entropy part", BLUE)
    draw_line(axes, mismatch_part, "mismatch part", VERMILLION)
    draw_line(axes, change, "frozen twin's change (their sum)", INK, dash="--")
    over_steps(axes, f"change of {TAU} since step {shared[0]} (tokens)")
    legend_below(figure, [axes])
    return Drawn(figure, _split_caption(shared[0], theirs[shared[0]] - first))


def _split_caption(first_step: int, start_difference: float) -> str:
    caption = (
        f"Change of the frozen twin's τ_prob since step {first_step} = entropy part + mismatch part, where entropy "
        f"part(t) = τ_cotrained(t) − τ_cotrained({first_step}) and mismatch part(t) = τ_frozen(t) − τ_cotrained(t). "
        "The first is what a draft that follows the policy gains because the policy becomes easier to predict, the "
        "second what the twin loses by standing still. Limit of this split: the co-trained draft also keeps learning, "
        "and what it gains by that is counted in the entropy part."
    )
    if abs(start_difference) > SAME_START_WITHIN:
        differed = f"The two drafts already differed by {signed(start_difference, 3)} at step {first_step}"
        caption += f" {differed}; the sum starts there."
    return caption


def draft_loss(run: RunData) -> Drawn | LeftOut:
    """The co-trained draft's loss, one line per drafted position."""
    positions = run.count("draft/loss_position")
    if not positions and not run.has("draft/loss"):
        if run.speculation == "frozen":
            return LeftOut("Draft loss: the draft is frozen in this run (speculation = frozen).")
        return left_out(run, "Draft loss")
    figure, (axes,) = new_figure()
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, max(positions, 1)))
    for number in range(1, positions + 1):
        draw_line(
            axes, run.series(f"draft/loss_position_{number}"), f"position {number}", colours[number - 1], smooth=True
        )
    if run.has("draft/loss"):
        draw_line(axes, run.series("draft/loss"), "all positions, weighted", INK, smooth=True, dash="--")
    over_steps(axes, "loss (nats per label token)")
    legend_below(figure, [axes])
    return Drawn(
        figure,
        "Loss of the co-trained draft. Position n is what proposes the n-th token of a verify round: the n-th pass of "
        "a chain, which has read n − 1 of its own states instead of the policy's, or the n-th place of a block.",
    )
