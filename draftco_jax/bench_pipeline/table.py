"""The headline figures of `draftco bench pipeline` as text; all of them are in its JSON."""

from __future__ import annotations

from typing import Any

from draftco_jax.bench_pipeline.figure import headline_rows

_NAMES = {
    "all_stages": "draft on all stages, direct",
    "last_stage": "draft on the last stage, direct",
    "relay": "draft on the last stage, relayed",
}


def table(found: dict[str, Any]) -> str:
    """One line a figure: what it is, its value, what the paper says, what is aimed at, how it came about."""
    ratios, copied = found["tap_bytes_over_eq5"], found["host_staged_bytes"]
    eq5 = found["transports"]["host"]["eq5_bytes"]
    rows = [
        *((f"bytes of features over Eq. 5, {said}", f"{ratios[name]:.3f}", "", "1", "compiled")
          for name, said in _NAMES.items()),
        ("bytes to and from host memory over Eq. 5", f"{sum(copied.values()) / eq5:.3f}", "", "", "run"),
        *_memory(found),
        (
            "draft's critical path, all stages over last",
            f"{found['draft_critical_path_all_over_last']:.3f}",
            "",
            f"<= {found['targets']['draft_critical_path_all_over_last']:g}",
            "counted",
        ),
    ]  # fmt: skip
    for row in headline_rows(found):
        for place, said in (("last_stage", "last stage"), ("all_stages", "all stages")):
            printed = _share(row["paper"]) if place == "last_stage" else ""
            aim = _share(row["target"]) if place == "all_stages" else ""
            name = row["family"].replace("_", " ")
            rows.append((f"update overhead, {name}, {said}", f"{row[place]:.1%}", printed, aim, "counted"))
    head = ("figure", "value", "paper", "aim", "how")
    return "\n".join(f"{a:<63}{b:>8}{c:>8}{d:>8}  {e}" for a, b, c, d, e in (head, *rows))


def _memory(found: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What one more micro-batch takes, between the first and the last M."""
    lines = []
    for schedule in ("1f1b", "gpipe"):
        rows = [row for row in found["temp_bytes_by_microbatches"] if row["schedule"] == schedule]
        first, last = rows[0], rows[-1]
        if (more := last["microbatches"] - first["microbatches"]) > 0:
            each = (last["bytes"] - first["bytes"]) / more / found["feature_bytes"]
            lines.append((f"activations kept for one more micro-batch, {schedule}", f"{each:.2f}", "", "", "compiled"))
    return lines


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def last_line(found: dict[str, Any]) -> str:
    """What to remember."""
    ratios = found["tap_bytes_over_eq5"]
    return (
        f"Features travel {ratios['all_stages']:.2f} times Eq. 5 (relayed {ratios['relay']:.2f}); on all stages the "
        f"draft adds {found['draft_critical_path_all_over_last']:.2f} of what it adds on the last"
    )
