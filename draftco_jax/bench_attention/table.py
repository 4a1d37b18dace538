"""The headline figures of `draftco bench attention` as text; all of them are in its JSON."""

from __future__ import annotations

from typing import Any


def table(found: dict[str, Any]) -> str:
    """One line a figure: what it is, its value, what the paper says, how it came about."""
    paper = found["paper"]
    gains = paper["usp_over_ours_c2_c4_c8"]
    ratios = found["ring_forward_bytes_over_formula"].values()
    lines = [
        ("forward ring bytes over 2 (C-1) (N/C) d b", f"{min(ratios):.3f} to {max(ratios):.3f}", "", "compiled"),
        (
            "parallel efficiency, 256K tokens, C = 8",
            f"{found['parallel_efficiency_256k_c8']:.3f}",
            f"{paper['parallel_efficiency_256k_c8']:.2f} measured",
            "counted",
        ),
        *(
            (
                f"work of padded USP over ours, C = {ranks}",
                f"{found[f'padded_usp_work_ratio_c{ranks}']:.2f}",
                f"{gain} measured",
                "counted",
            )
            for ranks, gain in zip((2, 4, 8), gains, strict=True)
        ),
        (f"anchors dropped, C = {found['ranks']}", str(found["anchors_dropped"]), "", "run on virtual devices"),
        *_memory_lines(found),
        *(
            (f"block op over dense product, {tokens} tokens", f"{value:.2f}", "", "measured, CPU time")
            for tokens, value in found["cpu_blockwise_over_dense"].items()
        ),
    ]
    head = ("figure", "value", "paper", "how")
    return "\n".join(f"{a:<46}{b:>16}{c:>16}  {d}" for a, b, c, d in (head, *lines))


def _memory_lines(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = found["peak_bytes_per_rank"]
    if rows is None:
        return [("memory of a rank", "-", "", found["peak_bytes_per_rank_reason"])]
    printed = dict(zip((1, 8), found["paper"]["peak_bytes_256k_c1_c8"], strict=True))
    return [
        (
            f"GB a rank, three passes, {row['tokens'] // 1024}K tokens, C = {row['ranks']}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{printed[row['ranks']] / 1e9:.1f} measured"
            if row["tokens"] == 262144 and row["ranks"] in printed
            else "",
            "compiled for H100",
        )
        for row in rows
        if row["program"] == "three_passes"
    ]


def last_line(found: dict[str, Any]) -> str:
    """What to remember."""
    row = next(r for r in found["work_max_over_mean"] if r["documents"] == "one_64k" and r["ranks"] == 8)
    return (
        f"Slowest over mean rank at C = 8: {row['zigzag']:.2f} zigzag, {row['contiguous']:.2f} sequential; "
        f"padded USP works {found['padded_usp_work_ratio_c2']:.2f} times as much at C = 2"
    )
