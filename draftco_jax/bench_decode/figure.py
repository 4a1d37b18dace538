"""A picture of what `bench_decode` found: gains over plain decoding, and speeds beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from draftco_jax.bench_attention.figure import save
from draftco_jax.report.figure_style import BLUE, GREY, INK, ORANGE, STYLE, VERMILLION

WIDTH_INCHES, HEIGHT_INCHES = 10.4, 4.2
_WIDTH = 0.38
_COLOURS = {"greedy": BLUE, "temperature_1": ORANGE}


def write_figure(found: dict[str, Any], path: Path) -> None:
    """To a .png or .svg file."""
    save(draw(found), path)


def draw(found: dict[str, Any]) -> Figure:
    """Left: speed over plain decoding, by cell. Right: tokens a second of greedy decoding, prefill included."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
        left, right = figure.subplots(1, 2)
        _gains(left, found["cells"])
        _speeds(right, [cell for cell in found["cells"] if cell["sampling"] == "greedy"])
    return figure


def _gains(axes: Axes, cells: list[dict[str, Any]]) -> None:
    places = _places(axes, cells)
    for number, (sampling, colour) in enumerate(_COLOURS.items()):
        rows = [cell for cell in cells if cell["sampling"] == sampling]
        at = [places[cell["policy"], cell["batch"]] + (number - 0.5) * _WIDTH for cell in rows]
        axes.bar(at, [cell["speedup"] for cell in rows], _WIDTH, color=colour, label=sampling.replace("_", " "))
        for x, cell in zip(at, rows, strict=True):
            text = f" k={cell['draft_length']}" if cell["draft_length"] else " plain"
            axes.text(x, cell["speedup"], text, ha="center", va="bottom", fontsize=6.5, color=INK, rotation=90)
    axes.margins(y=0.12)  # room for the words
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=":")
    axes.set_ylabel("speed over plain decoding, without prefill")
    axes.set_title("Speculation with the length chosen; the same function in all sizes", fontsize=9, loc="left")
    axes.legend(loc="upper left")


def _speeds(axes: Axes, cells: list[dict[str, Any]]) -> None:
    places, key = _places(axes, cells), "tokens_per_second_with_prefill"
    at = [places[cell["policy"], cell["batch"]] for cell in cells]
    best = [cell.get("speculative", cell["plain"])[key] for cell in cells]
    axes.plot(at, best, "o", color=BLUE, label="length chosen")
    axes.plot(at, [cell["plain"][key] for cell in cells], "_", markersize=12, color=GREY, label="plain")
    for name, marker, label in (("plain", "s", "transformers"), ("assisted", "^", "transformers, assisted")):
        points = [
            (x, c["transformers"][name][key])
            for x, c in zip(at, cells, strict=True)
            if name in (c["transformers"] or {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=VERMILLION, markerfacecolor="none", label=label)
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("tokens a second, prefill included")
    axes.set_title("Greedy, whole calls", fontsize=9, loc="left")
    axes.legend(loc="best", fontsize=7.5)


def _places(axes: Axes, cells: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """One place a policy and batch size, named below the axis."""
    keys = list(dict.fromkeys((cell["policy"], cell["batch"]) for cell in cells))
    places = {key: float(number) for number, key in enumerate(keys)}
    axes.set_xticks(list(places.values()), [f"{policy}\nb {batch}" for policy, batch in keys], fontsize=8)
    axes.set_xlim(-0.6, len(keys) - 0.4)
    return places
