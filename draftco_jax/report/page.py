"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from draftco_jax.report.page_style import CSS
from draftco_jax.report.run_data import RunData, speedup
from draftco_jax.report.summary_words import MEANINGS
from draftco_jax.report.words import duration, number, sentences, tiles


class Picture(NamedTuple):
    """A drawn plot as the page shows it."""

    title: str
    caption: str
    png: bytes


def render_page(run: RunData, pictures: Sequence[Picture], reasons: Sequence[str]) -> str:
    """Return the whole page; ``reasons`` say which plots are not on it and why."""
    sections = [
        _header(run),
        _tiles(run),
        _section("What happened", _list(sentences(run), "story")),
        _section("Plots", _plots(pictures)),
        _section("Plots left out", _list(reasons, "story")) if reasons else "",
        _section("What limits the speed", _speed(run)) if run.summary.get("speed") else "",
        _section("Summary", _summary_table(run)) if run.summary else "",
        _versions(run),
        _section("Resolved configuration", _config(run)),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(run.name)} · draftco report</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _header(run: RunData) -> str:
    facts = [f"{run.last_step} steps", f"speculation {run.speculation}"]
    if run.draft_length:
        facts.append(f"K = {run.draft_length} drafted tokens")
    wall = run.headline("wall_seconds")
    if wall is not None:
        facts.append(f"{duration(wall)} wall-clock")
    notice = ""
    if not run.summary:
        notice = (
            '<p class="notice">This run has written no summary yet: everything here comes from its steps so far.</p>'
        )
    spans = " ".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<header>\n<h1>{escape(run.name)}</h1>\n<p class="facts">{spans}</p>\n{notice}</header>'


def _tiles(run: RunData) -> str:
    found = [
        f'<div class="tile"><div class="label">{escape(tile.label)}</div>'
        f'<div class="value">{escape(tile.value)}</div><div class="detail">{escape(tile.detail)}</div></div>'
        for tile in tiles(run)
    ]
    return '<section class="tiles">\n' + "\n".join(found) + "\n</section>" if found else ""


def _list(items: Iterable[str], name: str) -> str:
    lines = "\n".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<div class="box {name}"><ul>\n{lines}\n</ul></div>'


def _plots(pictures: Sequence[Picture]) -> str:
    figures = [
        f'<figure>\n<h3>{escape(picture.title)}</h3>\n<img alt="{escape(picture.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(picture.png).decode("ascii")}">\n'
        f"<figcaption>{_subscripts(escape(picture.caption))}</figcaption>\n</figure>"
        for picture in pictures
    ]
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>"


def _subscripts(text: str) -> str:
    """Set what a plain caption writes as ``τ_prob`` or ``Π_{j≤k}`` as a subscript."""
    return re.sub(r"(?<=[^\W_])_(?:\{([^}]*)\}|(\w+))", lambda found: f"<sub>{found[1] or found[2]}</sub>", text)


def _speed(run: RunData) -> str:
    speed: dict[str, Any] = run.summary["speed"]
    paragraphs = [f"<p>{escape(part)}</p>" for part in str(speed.get("limits") or "").split("\n\n") if part.strip()]
    rows: list[dict[str, Any]] = speed.get("table") or []
    plain = {row["batch"]: row["tokens_per_second"] for row in rows if row["draft_length"] == 0}
    lines = [_speed_row(row, plain.get(row["batch"])) for row in rows]
    titles = ("batch", "drafted k", "tokens/s", "× plain", "accepted length", "ms per round", "quartiles of tokens/s")
    if lines:
        paragraphs.append(_table(titles, lines, numeric=True))
    if steps := speed.get("steps"):
        paragraphs.append("<h3>At the training batch, whole steps and their parts</h3>")
        paragraphs.append(_meanings_table(steps))
    return f'<div class="box">{"".join(paragraphs)}</div>'


def _speed_row(row: dict[str, Any], plain: float | None) -> list[str]:
    speed, accepted = row["tokens_per_second"], row.get("accepted_length")
    low, high = row.get("low"), row.get("high")
    return [
        str(row["batch"]),
        str(row["draft_length"]) if row["draft_length"] else "plain",
        f"{speed:,.0f}",
        f"{speedup(row, plain):.2f}" if plain else "–",
        "–" if accepted is None else f"{accepted:.2f}",
        "–" if row.get("round_milliseconds") is None else f"{row['round_milliseconds']:.3g}",
        "–" if low is None or high is None else f"{low:,.0f} to {high:,.0f}",
    ]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool) -> str:
    kind = ' class="number"' if numeric else ""
    head = "".join(f"<th{kind}>{escape(title)}</th>" for title in titles)
    lines = ["<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>"


def _summary_table(run: RunData) -> str:
    # Those with parts, such as speed and versions, have their own places.
    plain = {key: value for key, value in run.summary.items() if not isinstance(value, dict | list)}
    return f'<div class="box">{_meanings_table(plain)}</div>'


def _meanings_table(values: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for key, value in values.items():
        meaning = f'<span class="meaning">{escape(MEANINGS[key])}</span>' if key in MEANINGS else ""
        lines.append(
            f'<tr><td><code>{escape(key)}</code>{meaning}</td><td class="number">{escape(number(value))}</td></tr>'
        )
    return "<table>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>"


def _versions(run: RunData) -> str:
    boxes = [
        f'<div class="box"><h3>{title}</h3>'
        + _table(("name", "value"), [(str(name), number(value)) for name, value in found.items()], numeric=False)
        + "</div>"
        for title, key in (("Versions", "versions"), ("Hardware", "hardware"))
        if (found := run.summary.get(key))
    ]
    return _section("Versions and hardware", f'<div class="pair">{"".join(boxes)}</div>') if boxes else ""


def _config(run: RunData) -> str:
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return f'<details class="box"><summary>config.json</summary><pre>{escape(text)}</pre></details>'
