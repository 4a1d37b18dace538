"""The figures of `draftco bench decode` as text; all of them are in its JSON."""

from __future__ import annotations

from typing import Any


def table(found: dict[str, Any]) -> str:
    """The cells, what a round is made of, and on what it was measured."""
    lines = lines_of(found["cells"])
    part = found["overhead"]
    lines.append(
        f"{part['policy']}, batch {part['batch']}, k = {part['draft_length']}: of a round of "
        f"{part['milliseconds']['round']:.2f} ms {part['share']:.1%} are outside the two forwards; the verify forward "
        f"costs {part['verify_over_step']:.2f} steps"
    )
    return "\n".join([*lines, *lines_of_machine(found)])


def lines_of(cells: list[dict[str, Any]]) -> list[str]:
    """A line a cell: drafted length, accepted length, speeds without prefill, prefill, and what they are beside."""
    head = ("policy", "batch", "sampling", "k", "tau", "plain", "tokens/s", "of plain", "prefill", "of HF")
    lines = [_line(*head)]
    for cell in cells:
        fast = cell.get("speculative", cell["plain"])
        lines.append(
            _line(
                cell["policy"],
                str(cell["batch"]),
                cell["sampling"].replace("_", " "),
                str(cell["draft_length"]),
                _number(cell["accepted_length"]),
                f"{cell['plain']['tokens_per_second']:.0f}",
                f"{fast['tokens_per_second']:.0f}",
                f"{cell['speedup']:.2f}x",
                f"{fast['prefill_milliseconds']:.1f} ms",
                _number(cell["over_transformers"]),
            )
        )
    return lines


def lines_of_machine(found: dict[str, Any]) -> list[str]:
    """Processor, load, date, and why there is no peer."""
    lines = []
    reason, hardware = found["over_transformers_reason"], found["hardware"]
    if reason:
        lines.append(f"Beside transformers: not measured ({reason})")
    load = " to ".join(_number(hardware[name]) for name in ("load_before", "load_after"))
    lines.append(
        f"{hardware['processor']}, {hardware['cores']} cores, load {load}, {found['date']}, step_matmul="
        f"{found['step_matmul']}"
    )
    return lines


def _line(*fields: str) -> str:
    places = zip(fields, "<><>>>>>>>", (8, 5, 13, 3, 6, 8, 9, 9, 10, 7), strict=True)
    return " ".join(f"{text:{side}{width}}" for text, side, width in places).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def last_line(found: dict[str, Any]) -> str:
    """What to remember."""
    best = max(found["cells"], key=lambda cell: cell["speedup"])
    return (
        f"Speculation gains up to {best['speedup']:.2f}x ({best['policy']}, batch {best['batch']}, "
        f"{best['sampling'].replace('_', ' ')}) and at worst {found['worst_over_plain']:.2f}x"
    )
