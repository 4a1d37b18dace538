"""Fig. 5 and Fig. 6 of arXiv 2609.07108, re-created from counts and compiled memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from draftco_jax.errors import UserError
from draftco_jax.report.figure_style import BLUE, DOTS_PER_INCH, GREY, INK, ORANGE, PURPLE, STYLE, VERMILLION

WIDTH_INCHES, HEIGHT_INCHES = 10.4, 4.6
SUFFIXES = (".png", ".svg")
LINES = (
    ("padded_usp_ulysses_1", "padded USP, ulysses 1 x ring C", VERMILLION),
    ("padded_usp_ring_1", "padded USP, ulysses C x ring 1", ORANGE),
    ("contiguous", "packed row, sequential ring", PURPLE),
    ("zigzag", "packed row, zigzag", GREY),
    ("picked", "packed row, picked layout", BLUE),
)


def check_plot(path: Path) -> None:
    """Refuse a file that no plot can be written to, before minutes of work."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot {path} must end in .png or .svg; use --plot figure.png")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path} cannot be written: there is no folder {path.parent}; make it first")


def write_figure(found: dict[str, Any], path: Path) -> None:
    """Draws what `bench_attention` found."""
    save(draw(found), path)


def save(figure: Figure, path: Path) -> None:
    """To a .png or .svg file, the same bytes each time."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "draftco"}):
        metadata = {"Software": None} if path.suffix == ".png" else {"Date": None}
        try:
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)
        except OSError as error:
            raise UserError(f"--plot {path} cannot be written: {error.strerror}") from error


def draw(found: dict[str, Any]) -> Figure:
    """Left: critical path over ranks. Right: efficiency and memory over the length of one document."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
        grid = figure.add_gridspec(2, 2)
        _critical_path(figure.add_subplot(grid[:, 0]), found)
        efficiency = figure.add_subplot(grid[0, 1])
        _efficiency(efficiency, found)
        _memory(figure.add_subplot(grid[1, 1]), found)
        efficiency.tick_params(labelbottom=False)
    return figure


def _critical_path(axes: Axes, found: dict[str, Any]) -> None:
    rows = found["critical_path"]
    ranks = [row["ranks"] for row in rows]
    for name, label, colour in LINES:
        axes.plot(ranks, [row[name] for row in rows], "o-", color=colour, label=label)
    axes.plot(ranks, [row["perfect"] for row in rows], ":", color=INK, linewidth=1.2, label="perfect split, 1 / C")
    # Printed milliseconds in units of the count: the (2, 1) bar of padded USP is where both are put equal.
    unit = found["paper"]["usp_milliseconds"]["2x1"] / rows[1]["padded_usp_ring_1"]
    printed = found["paper"]["usp_milliseconds"]
    hollow: dict[str, Any] = {"marker": "s", "markersize": 6, "linestyle": "none", "markerfacecolor": "none"}
    for colour, values in (
        (VERMILLION, [printed[f"1x{c}"] for c in ranks[1:]]),
        (ORANGE, [printed[f"{c}x1"] for c in ranks[1:]]),
        (BLUE, [found["paper"]["ours_milliseconds"][str(c)] for c in ranks[1:]]),
    ):
        axes.plot(ranks[1:], [v / unit for v in values], color=colour, **hollow)
    axes.plot(
        [],
        [],
        color=INK,
        label=f"squares: the paper's times, {unit:.0f} ms = 1\n(blue: its own ring, fixed costs included)",
        **hollow,
    )
    _powers(axes, ranks, [str(c) for c in ranks])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(FixedLocator([0.125, 0.25, 0.5, 1, 2, 4]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("C, ranks of context parallelism")
    axes.set_ylabel("critical path, counted (1 = real pairs on one rank)")
    axes.set_title("Work of the slowest rank, documents of the paper's mix", fontsize=9, loc="left")
    axes.set_ylim(0.1, 24)
    axes.legend(loc="upper right", fontsize=7.5)


def _efficiency(axes: Axes, found: dict[str, Any]) -> None:
    rows = found["parallel_efficiency"]
    tokens = [row["tokens"] for row in rows]
    _powers(axes, tokens, [f"{n // 1024}K" for n in tokens])
    axes.plot(tokens, [row["zigzag"] for row in rows], "o-", color=BLUE, label="zigzag, counted")
    axes.plot(tokens, [row["contiguous"] for row in rows], "o-", color=PURPLE, label="sequential ring, counted")
    axes.plot(
        tokens[-1:], [found["paper"]["parallel_efficiency_256k_c8"]], "s", markersize=6, markerfacecolor="none",
        color=INK, label="paper, measured",
    )  # fmt: skip
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("efficiency, C = 8")
    axes.set_title("One document: parallel efficiency and memory of a rank", fontsize=9, loc="left")
    axes.legend(loc="lower left", ncols=2, fontsize=7.5)


def _memory(axes: Axes, found: dict[str, Any]) -> None:
    tokens = [row["tokens"] for row in found["parallel_efficiency"]]
    _powers(axes, tokens, [f"{n // 1024}K" for n in tokens])
    axes.set_xlabel("tokens of the document")
    axes.set_ylabel("GB a rank")
    axes.set_yscale("log", base=10)
    axes.set_ylim(0.1, 100)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if found["peak_bytes_per_rank"] is None:
        axes.text(
            0.5, 0.5, f"no memory: {found['peak_bytes_per_rank_reason']}", transform=axes.transAxes, ha="center",
            fontsize=8,
        )  # fmt: skip
        return
    rows = [row for row in found["peak_bytes_per_rank"] if row["program"] == "three_passes"]
    for ranks, colour in ((found["ranks"], BLUE), (1, GREY)):
        points = [(row["tokens"], row["bytes"] / 1e9) for row in rows if row["ranks"] == ranks]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"C = {ranks}, planned by the H100 compiler")
    printed = [value / 1e9 for value in found["paper"]["peak_bytes_256k_c1_c8"]]
    axes.plot(
        [tokens[-1]] * 2, printed, "s", markersize=6, markerfacecolor="none", color=INK, linestyle="none",
        label="paper, C = 1 and 8, measured",
    )  # fmt: skip
    axes.legend(loc="upper left", fontsize=7.5)


def _powers(axes: Axes, places: Sequence[int], labels: Sequence[str]) -> None:
    """A logarithmic x axis with these ticks only."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(places), list(labels))
