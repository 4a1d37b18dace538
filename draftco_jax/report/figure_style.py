"""The one look of all plots: sizes, colours, axes.

Figures are made without pyplot, which would keep them in a list of its own.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from draftco_jax.report.run_data import RunData, Series

# The palette of Okabe and Ito, told apart by readers with any common colour vision. One meaning, one colour.
INK = "#333333"
GREY = "#8c8c8c"
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
VERMILLION = "#d55e00"
PURPLE = "#cc79a7"
SKY = "#56b4e9"

COTRAINED, FROZEN, SAMPLED, PLAIN = BLUE, ORANGE, INK, GREY

# Shown at about 370 CSS pixels on a phone and 560 on a desk, this size keeps 9 point type between 9 and 14 pixels.
# One height, so that cards side by side match.
WIDTH_INCHES, HEIGHT_INCHES = 5.2, 3.7
DOTS_PER_INCH = 190

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a report looks the same everywhere
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "white",
}

STEP_LABEL = "step (policy updates)"
# Fewer points than this are marked: a line through one point is invisible.
MARKED_BELOW = 15
SMOOTHED_FROM = 20


class Drawn(NamedTuple):
    """A plot with the words that belong under it."""

    figure: Figure
    caption: str


class LeftOut(NamedTuple):
    """Why a plot is not there."""

    reason: str


def left_out(run: RunData, what: str) -> LeftOut:
    """Say that ``what`` was not measured, and that no speculation is the cause where it is."""
    if run.speculation == "off":
        return LeftOut(f"{what}: this run has speculation = off, so there is no draft to measure.")
    return LeftOut(f"{what}: not in the metrics of this run (speculation = {run.speculation}).")


def new_figure(rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of the house style with ``rows`` panels that share the step axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
        panels = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(panels)


def over_steps(axes: Axes, label: str) -> None:
    """Label a panel over training steps; whole steps only."""
    axes.set_xlabel(STEP_LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_ylabel(label)


def log_scale(axes: Axes, low: float, high: float) -> None:
    """Make the y axis logarithmic from low to high with few, plain tick labels."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    # Powers of ten alone leave a short axis with one label or none.
    marks = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=marks, numticks=7))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if marks != (1.0,):
        axes.yaxis.set_major_formatter("{x:g}")


def draw_line(axes: Axes, series: Series, label: str, colour: object, *, smooth: bool = False, dash: str = "-") -> None:
    """Draw one metric. ``smooth``: the raw values faint, and over them the mean of a window named in the legend."""
    marker = "o" if len(series.steps) < MARKED_BELOW else ""
    if not smooth or len(series.steps) < SMOOTHED_FROM:
        axes.plot(series.steps, series.values, dash, marker=marker, color=colour, label=label)
        return
    window = max(3, len(series.steps) // 15) | 1
    axes.plot(series.steps, series.values, color=colour, alpha=0.3, linewidth=0.9)
    means = centred_means(series.values, window)
    axes.plot(series.steps, means, dash, color=colour, label=f"{label} (mean of {window} steps)")


def centred_means(values: Sequence[float], window: int) -> list[float]:
    """The mean over ``window`` values around each value; over fewer at both ends."""
    half = window // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def legend_below(figure: Figure, axes: Sequence[Axes], columns: int = 2) -> None:
    """One legend for all panels, under them, where it covers nothing."""
    entries = [entry for panel in axes for entry in zip(*panel.get_legend_handles_labels(), strict=True)]
    with matplotlib.rc_context(STYLE):
        figure.legend(
            [handle for handle, _ in entries],
            [str(label) for _, label in entries],
            loc="outside lower center",
            ncols=columns,
        )


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG; equal figures give equal bytes."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return file.getvalue()
