"""Writing the report of a run directory: its plots as PNG files, its page around them."""

from __future__ import annotations

from pathlib import Path

from draftco_jax.errors import UserError
from draftco_jax.metrics import write_text_whole
from draftco_jax.report.figure_style import LeftOut, to_png
from draftco_jax.report.page import Picture, render_page
from draftco_jax.report.plots import PLOTS
from draftco_jax.report.run_data import load_run

REPORT_FILE = "report.html"
PLOTS_FOLDER = "plots"


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` and ``plots/*.png`` from ``config.json``, ``metrics.jsonl`` and ``summary.json``.

    The page holds its plots itself and refers to no other file. A plot whose numbers the run does not have is left out,
    and the page says why. The same numbers give the same bytes. A run that has not ended has a report too.

    Raises:
        UserError: one line, if the directory holds no metrics or no config, or one that cannot be read.
    """
    run = load_run(run_dir)
    if run.config.get("type") == "PretrainConfig":
        raise UserError(
            f"run_dir={run_dir} holds the pre-training of a draft, which has no report; see accepted_length.png and "
            "summary.json in it"
        )
    folder = run_dir / PLOTS_FOLDER
    folder.mkdir(exist_ok=True)
    pictures: list[Picture] = []
    reasons: list[str] = []
    for plot in PLOTS:
        file = folder / f"{plot.name}.png"
        drawn = plot.draw(run)
        if isinstance(drawn, LeftOut):
            reasons.append(drawn.reason)
            file.unlink(missing_ok=True)  # that of an earlier report would contradict this one
            continue
        png = to_png(drawn.figure)
        file.write_bytes(png)
        pictures.append(Picture(plot.title, drawn.caption, png))
    path = run_dir / REPORT_FILE
    write_text_whole(path, render_page(run, pictures, reasons))
    return path
