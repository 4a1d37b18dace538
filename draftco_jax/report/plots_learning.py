"""Plots of the policy: what it learns, how far it drifts, whether generator and trainer agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from draftco_jax.metrics.intervals import wilson_interval
from draftco_jax.report.figure_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    Drawn,
    LeftOut,
    draw_line,
    left_out,
    legend_below,
    log_scale,
    new_figure,
    over_steps,
)
from draftco_jax.report.run_data import RunData, Series

# Where a logarithmic axis shows exact zeros if no positive value says where its floor should be.
FLOOR_WITHOUT_VALUES = 1e-12
ZEROS_AT_THE_FLOOR = " Exact zeros cannot stand on a logarithmic axis: they are the triangles at its floor."


def reward_and_pass_rate(run: RunData) -> Drawn | LeftOut:
    """Training reward with the pass rate on held-out prompts over it."""
    if not (run.has("reward/mean") or run.has("eval/pass_rate")):
        return left_out(run, "Reward and pass rate")
    figure, (axes,) = new_figure()
    caption = "Reward: mean over the training rollouts of a step, sampled from the policy being trained. "
    if run.has("reward/mean"):
        draw_line(axes, run.series("reward/mean"), "training reward", BLUE, smooth=True)
    if run.has("eval/pass_rate"):
        caption += _draw_pass_rates(axes, run)
    over_steps(axes, "reward; pass rate (fraction)")
    legend_below(figure, [axes])
    return Drawn(figure, caption)


def _draw_pass_rates(axes: Axes, run: RunData) -> str:
    rows = [row for row in run.metrics if "eval/pass_rate" in row and math.isfinite(row["eval/pass_rate"])]
    rates = [row["eval/pass_rate"] for row in rows]
    # Without a number of prompts there is no interval to draw.
    ranges = [wilson_interval(row["eval/pass_rate"], int(row.get("eval/prompts", 0))) for row in rows]
    spread = [
        [rate - low for rate, (low, _) in zip(rates, ranges, strict=True)],
        [high - rate for rate, (_, high) in zip(rates, ranges, strict=True)],
    ]
    steps = [row["step"] for row in rows]
    axes.errorbar(steps, rates, spread, fmt="o", color=VERMILLION, capsize=3, label="pass rate, held-out prompts")
    prompts = sorted({int(row.get("eval/prompts", 0)) for row in rows})
    return f"Pass rate: on {' or '.join(map(str, prompts))} held-out prompts; bars are 95 % Wilson intervals."


def agreement(run: RunData) -> Drawn | LeftOut:
    """KL and largest log-prob difference between the program that sampled and the one that trains."""
    wanted = [
        ("agreement/kl_k3", "KL, k3 (nats)", BLUE),
        ("agreement/logprob_diff_max", "max |Δ log p| (nats)", VERMILLION),
    ]
    present = [item for item in wanted if run.has(item[0])]
    if not present:
        return left_out(run, "Generator-trainer agreement")
    figure, panels = new_figure(len(present))
    any_zero = False
    for axes, (name, label, colour) in zip(panels, present, strict=True):
        any_zero |= draw_on_log_axis(axes, [Curve(run.series(name), label, colour)])
        over_steps(axes, label)
        axes.label_outer()
    legend_below(figure, panels)
    caption = (
        "Tokens are sampled by the generation program and scored again by the training program with the same weights; "
        "both numbers would be 0 if the two computed alike to the last bit. Logarithmic axes."
    )
    if any_zero:
        caption += ZEROS_AT_THE_FLOOR
    return Drawn(figure, caption)


class Curve(NamedTuple):
    """One metric and how it is drawn."""

    series: Series
    label: str
    colour: str


def draw_on_log_axis(axes: Axes, curves: Sequence[Curve]) -> bool:
    """Draw values >= 0 on one logarithmic axis; returns whether there were zeros, which are put at its floor."""
    values = [value for curve in curves for value in curve.series.values]
    positive = [value for value in values if value > 0]
    any_zero = len(positive) < len(values)
    lowest = min(positive, default=FLOOR_WITHOUT_VALUES)
    floor = 10.0 ** math.floor(math.log10(lowest) - 0.5)
    log_scale(axes, floor / 2 if any_zero else lowest / 1.6, 1.6 * max(positive, default=floor * 100))
    for series, label, colour in curves:
        points = list(zip(*series, strict=True))
        above = [(step, value) for step, value in points if value > 0]
        if above:
            draw_line(axes, Series([step for step, _ in above], [value for _, value in above]), label, colour)
        if zeros := [step for step, value in points if value <= 0]:
            axes.plot(zeros, [floor] * len(zeros), "v", color=colour, fillstyle="none", label=f"exactly 0: {label}")
    return any_zero


def entropy_and_length(run: RunData) -> Drawn | LeftOut:
    """Policy entropy over response length: the two ways in which a policy narrows down."""
    wanted = [
        ("policy/entropy", "policy entropy", "nats per token", GREEN),
        ("rollout/response_tokens_mean", "mean response length", "tokens", PURPLE),
    ]
    present = [item for item in wanted if run.has(item[0])]
    if not present:
        return left_out(run, "Entropy and response length")
    figure, panels = new_figure(len(present))
    for axes, (name, label, unit, colour) in zip(panels, present, strict=True):
        draw_line(axes, run.series(name), label, colour, smooth=True)
        over_steps(axes, unit)
        axes.label_outer()
    legend_below(figure, panels, columns=1)
    return Drawn(figure, "Entropy of the policy's law at the trained tokens, and tokens per response, stop included.")


def gradient_norms(run: RunData) -> Drawn | LeftOut:
    """Gradient norms of the two optimizer groups, each before its own clip."""
    wanted = [("policy/gradient_norm", "policy", BLUE), ("draft/gradient_norm", "draft", ORANGE)]
    present = [item for item in wanted if run.has(item[0])]
    if not present:
        return left_out(run, "Gradient norms")
    figure, (axes,) = new_figure()
    any_zero = draw_on_log_axis(axes, [Curve(run.series(name), label, colour) for name, label, colour in present])
    over_steps(axes, "global gradient norm (log scale)")
    legend_below(figure, [axes])
    caption = "Global norm before clipping. "
    if len(present) == 2:
        caption += "Policy and draft are clipped apart, so neither norm changes the other's step."
    else:
        caption += "Only the policy is trained in this run."
    return Drawn(figure, caption + ZEROS_AT_THE_FLOOR if any_zero else caption)
