"""Pictures of what `bench_pipeline` found, a file each, in one folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from draftco_jax.errors import UserError
from draftco_jax.pipeline.drawing import draw_svg
from draftco_jax.pipeline.schedule import make_schedule
from draftco_jax.report.figure_style import (
    BLUE,
    GREEN,
    GREY,
    HEIGHT_INCHES,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILLION,
    WIDTH_INCHES,
    to_png,
)

NAMES = {
    "all_stages": "all stages,\ndirect",
    "last_stage": "last stage,\ndirect",
    "relay": "last stage,\nrelay",
    "host": "last stage,\nhost memory",
}
FAMILIES = {
    "eagle3": "EAGLE-3",
    "eagle3_whole_vocabulary": "EAGLE-3,\nwhole vocab.",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "MTP",
}
FORMS = (
    ("lockstep_direct", "in ticks, direct", BLUE, "-"),
    ("lockstep_hold", "in ticks, hold", ORANGE, "-"),
    ("lockstep_hold_window", "in ticks, hold, only when needed", GREEN, "-"),
    ("lockstep", "in ticks, ideal channel", GREY, "-"),
    ("1f1b", "1F1B that waits for what it needs", INK, ":"),
)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, before minutes of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--plots {folder} cannot be made: {error.strerror}; give another folder") from error


def write_figures(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draws them all; returns the files."""
    drawn: dict[str, Callable[[Axes, dict[str, Any]], None]] = {
        "tap_bytes.png": tap_bytes,
        "executed_permutes.png": executed_permutes,
        "temp_memory.png": temp_memory,
        "draft_critical_path.png": draft_critical_path,
        "update_overhead.png": update_overhead,
        "tap_wait.png": tap_wait,
    }
    schedule = make_schedule("1f1b", stages=found["stages"], microbatches=found["microbatches"])
    contents = {"ticks.svg": draw_svg(schedule).encode()}
    contents |= {name: to_png(draw(fill, found)) for name, fill in drawn.items()}
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"--plots {folder} cannot be written: {error.strerror}; give another folder") from error
    return [folder / name for name in contents]


def draw(fill: Callable[[Axes, dict[str, Any]], None], found: dict[str, Any]) -> Figure:
    """One picture in the style of the house."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
        axes = figure.add_subplot()
        fill(axes, found)
    return figure


def tap_bytes(axes: Axes, found: dict[str, Any]) -> None:
    """Bytes of features over Eq. 5; what host staging copies is beside what it sends."""
    rows = found["tap_bytes_over_eq5"]
    values = [rows[name] for name in NAMES]
    axes.bar(range(len(NAMES)), values, color=BLUE, width=0.6, label="sent between stages")
    eq5 = found["transports"]["host"]["eq5_bytes"]
    copied = [sum(found["host_staged_bytes"].values()) / eq5 if name == "host" else 0 for name in NAMES]
    axes.bar(range(len(NAMES)), copied, bottom=values, color=ORANGE, width=0.6, label="to and from host memory")
    for place, (value, more) in enumerate(zip(values, copied, strict=True)):
        axes.text(place, value + more + 0.05, f"{value + more:.2f}", ha="center", fontsize=8.5)
    axes.axhline(1, color=INK, linewidth=1, linestyle=":", label="Eq. 5: each feature once")
    _categories(axes, list(NAMES.values()))
    axes.set_ylabel("bytes of features over Eq. 5")
    _title(axes, f"Features in a compiled update, {_shape(found)}")
    axes.set_ylim(0, 1.45 * max(v + c for v, c in zip(values, copied, strict=True)))
    axes.legend(loc="upper left", fontsize=8)


def executed_permutes(axes: Axes, found: dict[str, Any]) -> None:
    """How often permutes run in an update."""
    rows = found["transports"]
    hops = [rows[name]["activation_permutes"] for name in NAMES]
    taps = [rows[name]["tap_permutes"] for name in NAMES]
    axes.bar(range(len(NAMES)), hops, color=GREY, width=0.6, label="activations and their gradients")
    axes.bar(range(len(NAMES)), taps, bottom=hops, color=BLUE, width=0.6, label="features (host memory: a count)")
    for place, (hop, tap) in enumerate(zip(hops, taps, strict=True)):
        axes.text(place, hop + tap + 0.5, f"{hop} + {tap}", ha="center", fontsize=8.5)
    _categories(axes, list(NAMES.values()))
    axes.set_ylabel("permutes of an update")
    _title(axes, f"Executed permutes, {_shape(found)}")
    axes.set_ylim(0, 1.35 * max(h + t for h, t in zip(hops, taps, strict=True)))
    axes.legend(loc="upper left", fontsize=8)


def temp_memory(axes: Axes, found: dict[str, Any]) -> None:
    """Planned memory over M, in features."""
    for schedule, colour in (("1f1b", BLUE), ("gpipe", VERMILLION)):
        rows = [row for row in found["temp_bytes_by_microbatches"] if row["schedule"] == schedule]
        counts = [row["microbatches"] for row in rows]
        axes.plot(counts, [row["bytes"] / found["feature_bytes"] for row in rows], "o-", color=colour, label=schedule)
        axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.set_xlabel("M, micro-batches of an update")
    axes.set_ylabel("temporary memory of a device (activations)")
    axes.set_ylim(bottom=0)
    _title(axes, f"Memory planned by the compiler, {found['stages']} stages")
    axes.legend(loc="upper left")


def draft_critical_path(axes: Axes, found: dict[str, Any]) -> None:
    """What the draft adds to an update, by placement."""
    rows = {row["family"]: row for row in found["draft_critical_path"] if row["tensor"] == 1}
    _pairs(axes, [rows[name] for name in FAMILIES])
    axes.set_ylabel("added to an update without draft")
    ratio = found["draft_critical_path_all_over_last"]
    _title(axes, f"Draft on the critical path, {_shape(found)}: {ratio:.2f} of it on all stages")


def update_overhead(axes: Axes, found: dict[str, Any]) -> None:
    """The same on the paper's mesh, beside what it printed and what is aimed at."""
    rows = {row["family"]: row for row in headline_rows(found)}
    _pairs(axes, [rows[name] for name in FAMILIES])
    for place, name in enumerate(FAMILIES):
        printed, aim = rows[name]["paper"], rows[name]["target"]
        if printed is not None and aim is not None:
            axes.plot([place - 0.2], [printed], "D", color=INK, markerfacecolor="white", markersize=5, zorder=3)
            axes.hlines([aim], place + 0.01, place + 0.39, colors=VERMILLION, linewidth=2.5, zorder=3)
    axes.plot([], [], "D", color=INK, markerfacecolor="white", label="paper, measured (last stage)")
    axes.plot([], [], color=VERMILLION, linewidth=2.5, label="aim (all stages)")
    axes.set_ylabel("update with draft over update without, - 1")
    _title(axes, "Qwen3-8B, stage 2, tensor 2, context 2, counted FLOPs")
    axes.legend(loc="upper right", fontsize=8)


def tap_wait(axes: Axes, found: dict[str, Any]) -> None:
    """Share of an update spent waiting for taps, over bandwidth."""
    rows = {row["form"]: row["share"] for row in found["tap_wait_share"] if row["family"] == "dflash"}
    bandwidths = found["tap_wait_bandwidths"]
    for form, label, colour, line in FORMS:
        axes.plot(bandwidths, rows[form], line, marker="o", color=colour, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(bandwidths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("GB a second of one device")
    axes.set_ylabel("share of the update spent waiting")
    _title(axes, f"Five taps (DFlash), {_shape(found)}, {found['teraflops']:g} TFLOP/s assumed")
    axes.legend(loc="upper right", fontsize=8)


def headline_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the overheads: needed work."""
    return [row for row in found["update_overhead"] if row["counting"] == "needed"]


def _pairs(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Bars of both placements for each family."""
    for shift, place, colour, label in (
        (-0.2, "last_stage", SKY, "draft on the last stage"),
        (0.2, "all_stages", PURPLE, "draft on all stages"),
    ):
        values = [row[place] for row in rows]
        axes.bar([i + shift for i in range(len(rows))], values, width=0.38, color=colour, label=label)
        for i, value in enumerate(values):
            axes.text(i + shift, value, f"{value:.0%}", ha="center", va="bottom", fontsize=7.5)
    _categories(axes, list(FAMILIES.values()))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(0, 1.3 * max(row["last_stage"] for row in rows))
    axes.legend(loc="upper right", fontsize=8)


def _categories(axes: Axes, labels: list[str]) -> None:
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.grid(visible=False, axis="x")


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left")


def _shape(found: dict[str, Any]) -> str:
    return f"S = {found['stages']}, M = {found['microbatches']}"
