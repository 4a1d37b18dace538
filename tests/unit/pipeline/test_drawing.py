"""Drawings of schedules: every piece of work is in them, in its place."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from draftco_jax.pipeline.drawing import draw_svg, draw_text, title
from draftco_jax.pipeline.schedule import make_schedule

SHAPES = [("1f1b", 4, 1, 8), ("gpipe", 3, 1, 12), ("1f1b", 2, 2, 4), ("1f1b", 1, 1, 2), ("gpipe", 2, 3, 4)]
SVG = "{http://www.w3.org/2000/svg}"


def made(name, stages, chunks, microbatches):
    return make_schedule(name, stages=stages, chunks=chunks, microbatches=microbatches)


def test_text_of_a_small_schedule():
    drawn = """
t     0       1       2       3       4       5       6       7       8       9       10      11
s0 F0a/.   F1a/.   F0b/.   F1b/.   F2a/B0b F3a/B1b F2b/B0a F3b/B1a   ./B2b   ./B3b   ./B2a   ./B3a
s1   ./.   F0a/.   F1a/.   F0b/B0b F1b/B1b F2a/B0a F3a/B1a F2b/B2b F3b/B3b   ./B2a   ./B3a   ./.
   |---- F: 3 ticks -----| |- F+B, loss -| |---- F+B, loss: 4 ticks -----| |---- B: 3 ticks -----|
"""
    assert draw_text(made("1f1b", 2, 2, 4)) == drawn.strip("\n")


def test_a_short_phase_still_has_its_mark():
    assert draw_text(made("1f1b", 2, 1, 1)).splitlines()[-1].strip() == "| F | |F+B| | B |"


@pytest.mark.parametrize("shape", SHAPES)
def test_text_has_all_work(shape):
    schedule = made(*shape)
    lines = draw_text(schedule).splitlines()[1:-1]
    assert len(lines) == schedule.stages
    for s, line in enumerate(lines):
        for letter, ticks in (("F", schedule.forward_ticks), ("B", schedule.backward_ticks)):
            cells = [cell.split("/")["FB".index(letter)] for cell in line.split()[1:]]
            for k in range(s, schedule.virtual_stages, schedule.stages):
                for m in range(schedule.microbatches):
                    mark = "abc"[k // schedule.stages] if schedule.chunks > 1 else ""
                    assert cells[ticks[m, k]] == f"{letter}{m}{mark}"
            assert len(cells) == schedule.ticks
            assert sum(cell != "." for cell in cells) == schedule.microbatches * schedule.chunks


@pytest.mark.parametrize("shape", SHAPES)
def test_svg_is_a_picture_on_its_own(shape):
    schedule = made(*shape)
    text = draw_svg(schedule)
    root = ElementTree.fromstring(text)
    assert "href" not in text and "url(" not in text and "<script" not in text
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    words = [(node.text or "", node) for node in root.iter(f"{SVG}text")]
    assert title(schedule) in [word for word, _ in words]
    for _, node in words:
        assert 0 <= float(node.attrib["x"]) <= width and 0 <= float(node.attrib["y"]) <= height
    numbers = [word for word, node in words if re.fullmatch(r"\d+[abc]?", word) and "fill" not in node.attrib]
    assert len(numbers) == 2 * schedule.microbatches * schedule.virtual_stages
    assert [word for word, _ in words if word.startswith("stage ")] == [f"stage {s}" for s in range(schedule.stages)]
    assert sum("microbatch" in word and "bubble" not in word for word, _ in words) == 2  # the legend


def test_svg_shows_a_microbatch_in_one_colour_and_its_backward_stronger():
    root = ElementTree.fromstring(draw_svg(made("1f1b", 2, 1, 3)))
    shown = {}
    boxes = [node.attrib for node in root.iter(f"{SVG}rect")]
    for node in root.iter(f"{SVG}text"):
        if re.fullmatch(r"[0-2]", node.text or "") and "fill" not in node.attrib:
            x, y = float(node.attrib["x"]), float(node.attrib["y"])
            inside = [
                box["fill"]
                for box in boxes[1:]
                if 0 < x - float(box["x"]) < float(box["width"]) and 0 < y - float(box["y"]) < float(box["height"])
            ]
            (fill,) = inside
            shown.setdefault(node.text, set()).add(fill)
    assert {len(fills) for fills in shown.values()} == {2} and len(set.union(*shown.values())) == 6


def test_title_says_the_bubble():
    assert title(made("1f1b", 4, 1, 8)) == "1f1b, 4 stages, 8 microbatches: 14 ticks, bubble 27.3%"
    assert title(made("gpipe", 1, 2, 1)).startswith("gpipe, 1 stage, 2 chunks a stage, 1 microbatch: ")
