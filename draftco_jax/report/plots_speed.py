"""Plots of time: rollout speed, where a step's seconds go, plain against speculative decoding."""

from __future__ import annotations

import statistics
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftco_jax.report.figure_style import (
    BLUE,
    GREEN,
    GREY,
    HEIGHT_INCHES,
    INK,
    ORANGE,
    PLAIN,
    PURPLE,
    SKY,
    STYLE,
    VERMILLION,
    WIDTH_INCHES,
    Drawn,
    LeftOut,
    draw_line,
    left_out,
    legend_below,
    new_figure,
    over_steps,
)
from draftco_jax.report.run_data import RunData, speedup

PARTS = (("generate", BLUE), ("score", SKY), ("update", ORANGE), ("publish", GREEN))
MOST_BARS = 100
# A step this many times longer than the median one (the first, which compiles) would flatten all others.
OUTLIER_RATIO = 4.0


def tokens_per_second(run: RunData) -> Drawn | LeftOut:
    """Rollout speed over the run."""
    if not run.has("rollout/tokens_per_second"):
        return left_out(run, "Rollout speed")
    figure, (axes,) = new_figure()
    draw_line(axes, run.series("rollout/tokens_per_second"), "rollouts", GREEN)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    over_steps(axes, "generated tokens per second")
    legend_below(figure, [axes])
    return Drawn(
        figure,
        "Response tokens of a step / seconds of its generate part. It moves with response length, batch tail and "
        "whatever else the machine was doing; the comparison of plain and speculative decoding is the timed one.",
    )


def step_time_split(run: RunData) -> Drawn | LeftOut:
    """Seconds of a step by part, stacked."""
    rows = [row for row in run.metrics if any(f"time_seconds/{part}" in row for part, _ in PARTS)]
    if not rows:
        return left_out(run, "Step-time split")
    seconds = {part: [row.get(f"time_seconds/{part}", 0.0) for row in rows] for part, _ in PARTS}
    known = [sum(values) for values in zip(*seconds.values(), strict=True)]
    wholes = [row.get("time_seconds/step", total) for row, total in zip(rows, known, strict=True)]
    seconds["other"] = [max(0.0, whole - total) for whole, total in zip(wholes, known, strict=True)]
    groups = np.array_split(np.arange(len(rows)), min(MOST_BARS, len(rows)))
    steps = [int(row["step"]) for row in rows]

    figure, (axes,) = new_figure()
    bottom = np.zeros(len(groups))
    for part, colour in (*PARTS, ("other", GREY)):
        heights = np.asarray([np.mean([seconds[part][i] for i in group]) for group in groups])
        if heights.max() > 0:
            centres = [statistics.mean(steps[i] for i in group) for group in groups]
            widths = [steps[group[-1]] - steps[group[0]] + 1 for group in groups]
            axes.bar(centres, heights, widths, bottom, color=colour, label=part, linewidth=0)
            bottom += heights
    caption = "Wall-clock seconds of each step." + _cut_outliers(axes, bottom, [steps[group[0]] for group in groups])
    if len(groups) < len(rows):
        caption += f" Each bar is the mean of about {len(rows) // len(groups)} steps."
    over_steps(axes, "seconds per step")
    legend_below(figure, [axes], columns=5)
    return Drawn(figure, caption)


def _cut_outliers(axes: Axes, totals: np.ndarray, steps: list[int]) -> str:
    """Keep the axis readable when a few bars tower over the rest; returns the words that say so."""
    limit = OUTLIER_RATIO * float(np.median(totals))
    towering = [(step, total) for step, total in zip(steps, totals, strict=True) if total > limit]
    if not towering:
        return ""
    axes.set_ylim(0, 1.3 * max(total for total in totals if total <= limit))
    named = ", ".join(f"step {step} ({total:.1f} s)" for step, total in towering[:5])
    return f" Cut off at the top of the axis: {named}{' and others' if len(towering) > 5 else ''}."


def plain_and_speculative(run: RunData) -> Drawn | LeftOut:
    """Tokens per second by drafted length, one panel per batch size."""
    table: list[dict[str, Any]] = (run.summary.get("speed") or {}).get("table") or []
    if not table:
        if not run.summary:
            return LeftOut("Plain against speculative decoding: it is timed at the end of a run, which is not there.")
        return left_out(run, "Plain against speculative decoding")
    batches = sorted({int(row["batch"]) for row in table})
    columns = min(2, len(batches))
    rows = -(-len(batches) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, max(HEIGHT_INCHES, 1.7 * rows + 0.3)))
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, batch in zip(panels, batches, strict=False):
        _draw_bars(axes, [row for row in table if row["batch"] == batch], f"batch {batch}")
    for axes in panels[len(batches) :]:
        axes.remove()
    figure.supxlabel("drafted tokens per verify round (k)", fontsize=9, color=INK)
    figure.supylabel("tokens per second", fontsize=9, color=INK)
    return Drawn(
        figure,
        "Median tokens per second of the generate program after compilation; whiskers span the quartiles, the number "
        "over a bar is its speed relative to plain decoding of the same batch size, timed in turn. Each panel has its "
        "own scale.",
    )


def _draw_bars(axes: Axes, rows: list[dict[str, Any]], title: str) -> None:
    rows = sorted(rows, key=lambda row: row["draft_length"])
    speeds = [float(row["tokens_per_second"]) for row in rows]
    lows = [max(0.0, speed - float(row.get("low") or speed)) for row, speed in zip(rows, speeds, strict=True)]
    highs = [max(0.0, float(row.get("high") or speed) - speed) for row, speed in zip(rows, speeds, strict=True)]
    colours = [PLAIN if row["draft_length"] == 0 else PURPLE for row in rows]
    places = range(len(rows))
    axes.bar(places, speeds, 0.72, color=colours, yerr=[lows, highs], capsize=2.5, error_kw={"elinewidth": 1})
    plain = [speed for row, speed in zip(rows, speeds, strict=True) if row["draft_length"] == 0]
    for place, row, speed, high in zip(places, rows, speeds, highs, strict=True):
        if plain and row["draft_length"] > 0:
            ratio = speedup(row, plain[0])
            colour = GREEN if ratio > 1 else VERMILLION
            above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{ratio:.2f}×", (place, speed + high), color=colour, **above)
    axes.set_xticks(list(places), ["plain" if row["draft_length"] == 0 else str(row["draft_length"]) for row in rows])
    axes.set_ylim(0, 1.18 * max(speed + high for speed, high in zip(speeds, highs, strict=True)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=False, axis="x")
    axes.set_title(title, fontsize=9, loc="left")
