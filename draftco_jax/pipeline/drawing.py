"""A schedule as text, one line a stage, and as a self-contained SVG picture.

A cell is a tick of a stage: its forward and its backward, each with the number of the microbatch and, if stages have
several chunks, a letter for the chunk.
"""

from __future__ import annotations

from html import escape
from string import ascii_lowercase

from draftco_jax.pipeline.schedule import Phase, Schedule, Work

# Okabe and Ito, told apart by readers with any common colour vision; they come again after seven microbatches.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442")
_PALE, _STRONG = 0.3, 0.65  # of forwards and backwards; dark numbers are read on both
_INK, _FAINT, _EMPTY = "#222222", "#777777", "#f2f2f2"
_WIDTH, _HALF, _GAP = 36, 20, 6
_LEFT, _TOP, _BOTTOM = 72, 78, 56
_TITLE_LETTER, _LETTER = 9, 6.6  # widths in a common sans serif font, rounded up


def title(schedule: Schedule) -> str:
    """What it is and how much of the time a stage waits."""
    shape = [_count(schedule.stages, "stage"), _count(schedule.microbatches, "microbatch")]
    if schedule.chunks > 1:
        shape.insert(1, f"{schedule.chunks} chunks a stage")
    return f"{schedule.name}, {', '.join(shape)}: {schedule.ticks} ticks, bubble {schedule.bubble_share:.1%}"


def phase_words(phase: Phase) -> str:
    """Kinds of work of a phase, and whether the loss is computed in it."""
    kinds = "+".join(letter for letter, has in (("F", phase.forward), ("B", phase.backward)) if has)
    return f"{kinds}, loss" if phase.head else kinds


def draw_text(schedule: Schedule) -> str:
    """Lines of cells like F3/B1, the ticks above them and the phases below."""
    cells = [
        [
            (_name(schedule, "F", schedule.forward, t, s), _name(schedule, "B", schedule.backward, t, s))
            for t in _ticks(schedule)
        ]
        for s in range(schedule.stages)
    ]
    widest = max(len(half) for row in cells for cell in row for half in cell)
    label = len(f"s{schedule.stages - 1}")
    column = 2 * widest + 2  # both halves, the slash and a space
    lines = [f"{'t':<{label}} " + "".join(f"{t:^{column}}" for t in _ticks(schedule))]
    for s, row in enumerate(cells):
        halves = "".join(f"{f:>{widest}}/{b:<{widest}} " for f, b in row)
        lines.append(f"{f's{s}':<{label}} {halves}")
    lines.append(" " * (label + 1) + "".join(_bracket(phase, column) for phase in schedule.phases))
    return "\n".join(line.rstrip() for line in lines)


def draw_svg(schedule: Schedule) -> str:
    """A picture: stages from top to bottom, ticks from left to right, colours by microbatch.

    The upper half of a cell is the forward, the lower one the backward.
    """
    row = 2 * _HALF + _GAP
    legend, legend_end = _legend(schedule, _TOP + schedule.stages * row + 28)
    width = max(_LEFT + schedule.ticks * _WIDTH + 16, 32 + _TITLE_LETTER * len(title(schedule)), legend_end)
    height = _TOP + schedule.stages * row + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">',
        f"<title>{escape(title(schedule))}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(16, 26, title(schedule), size=15, anchor="start"),
    ]
    parts += [line for phase in schedule.phases for line in _phase_mark(phase)]
    for s in range(schedule.stages):
        top = _TOP + s * row
        parts.append(_text(_LEFT - 10, top + _HALF + 4, f"stage {s}", anchor="end"))
        for t in _ticks(schedule):
            parts += _half(schedule, schedule.forward, t, s, top, strong=False)
            parts += _half(schedule, schedule.backward, t, s, top + _HALF, strong=True)
    below = _TOP + schedule.stages * row + 10
    parts.append(_text(_LEFT - 10, below, "tick", anchor="end", colour=_FAINT))
    parts += [_text(_LEFT + (t + 0.5) * _WIDTH, below, str(t), colour=_FAINT) for t in _ticks(schedule)]
    parts += [*legend, "</svg>"]
    return "\n".join(parts) + "\n"


def _ticks(schedule: Schedule) -> range:
    return range(schedule.ticks)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "es" if word.endswith("ch") else "s")


def _name(schedule: Schedule, letter: str, work: Work, t: int, s: int) -> str:
    """F3 or F3b; a dot where there is nothing."""
    return f"{letter}{_number(schedule, work, t, s)}" if work.active[t, s] else "."


def _number(schedule: Schedule, work: Work, t: int, s: int) -> str:
    """Microbatch and, with several chunks, the letter of the chunk (its number where letters run out)."""
    chunk = int(work.chunk[t, s])
    if schedule.chunks == 1:
        mark = ""
    else:
        mark = ascii_lowercase[chunk] if schedule.chunks <= len(ascii_lowercase) else f".{chunk}"
    return f"{work.microbatch[t, s]}{mark}"


def _bracket(phase: Phase, column: int) -> str:
    """|-- F: 3 ticks --| as wide as its ticks, less said where there is less room."""
    room = phase.ticks * column - 3
    words = (
        f" {phase_words(phase)}: {_count(phase.ticks, 'tick')} ",
        f" {phase_words(phase)} ",
        phase_words(phase)[:room],
    )
    return f"|{next((said for said in words if len(said) <= room), ''):-^{room}}| "


def _half(schedule: Schedule, work: Work, t: int, s: int, top: int, *, strong: bool) -> list[str]:
    left = _LEFT + t * _WIDTH
    box = f'<rect x="{left}" y="{top}" width="{_WIDTH - 1}" height="{_HALF - 1}"'
    if not work.active[t, s]:
        return [f'{box} fill="{_EMPTY}"/>']
    colour = _COLOURS[int(work.microbatch[t, s]) % len(_COLOURS)]
    return [
        f'{box} fill="{_tint(colour, _STRONG if strong else _PALE)}"/>',
        _text(left + (_WIDTH - 1) / 2, top + 14, _number(schedule, work, t, s)),
    ]


def _tint(colour: str, strength: float) -> str:
    """A colour laid thinly on white, as one that every viewer knows."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - value)):02x}" for value in channels)


def _phase_mark(phase: Phase) -> list[str]:
    left, right, y = _LEFT + phase.start * _WIDTH, _LEFT + phase.stop * _WIDTH - 3, _TOP - 14
    path = f'<path d="M{left},{y + 6} V{y} H{right} V{y + 6}" fill="none" stroke="{_INK}"/>'
    return [path, _text((left + right) / 2, y - 6, phase_words(phase))]


def _legend(schedule: Schedule, y: int) -> tuple[list[str], int]:
    """What colours and numbers mean, and how far to the right that goes."""
    chunk = " and chunk" if schedule.chunks > 1 else ""
    parts: list[str] = []
    x = _LEFT
    for colour, words in (
        (_tint(_COLOURS[0], _PALE), f"forward: microbatch{chunk}"),
        (_tint(_COLOURS[0], _STRONG), f"backward: microbatch{chunk}"),
        (_EMPTY, "nothing to do"),
    ):
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(x + 20, y + 11, words, anchor="start"))
        x += 40 + round(_LETTER * len(words))
    return parts, x


def _text(x: float, y: float, words: str, *, size: int = 0, anchor: str = "middle", colour: str = "") -> str:
    look = (f' font-size="{size}"' if size else "") + (f' fill="{colour}"' if colour else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}>{escape(words)}</text>'
