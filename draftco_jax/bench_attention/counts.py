"""What is counted on the host: work of the slowest rank, for one long document and for packed mixes.

Work is query-key pairs (`context_parallel.work`), in two units: visible pairs, and whole tiles of a kernel (TILE by
TILE), which is what a kernel really works on. A ratio has one unit on both sides.

A ring moves in step, so the work that takes its time is the sum over steps of the slowest rank ("critical path").
Figures are for one attention head count and one pass: both cancel in every ratio here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftco_jax.context_parallel.layouts import Contiguous, Layout, Striped, Zigzag, padded_tokens
from draftco_jax.context_parallel.work import (
    balance,
    causal_pairs,
    document_ranges,
    length_mix,
    padded_usp_pairs,
    pick_layout,
)

RANKS = (1, 2, 4, 8)
TILE = 128
"""Of the kernels for GPUs; the smallest stripe."""
LONGEST, MEAN, VARIATION = 20_480, 9_102, 0.52
"""Tokens of a document in the mix of arXiv 2609.07108, Fig. 5: see `length_mix` for what is printed and what fitted."""
LONG_TOKENS = 256 * 1024
CONTEXTS = tuple(1024 * n for n in (8, 16, 32, 64, 128, 256))
"""Row lengths of Fig. 6."""
PAPER: dict[str, Any] = {
    "source": "arXiv 2609.07108, measured on H100; ulysses x ring",
    "usp_milliseconds": {
        "2x1": 563,
        "1x2": 801,
        "4x1": 287,
        "2x2": 427,
        "1x4": 479,
        "8x1": 146,
        "4x2": 216,
        "2x4": 254,
        "1x8": 287,
    },
    "ours_milliseconds": {"2": 196, "4": 126, "8": 99},
    "usp_over_ours_c2_c4_c8": [2.9, 2.3, 1.5],
    "parallel_efficiency_256k_c8": 0.94,
    "peak_bytes_256k_c1_c8": [53.2e9, 7.5e9],
}


def paper_mix(documents: int, seed: int) -> list[int]:
    """Lengths of so many documents of the paper's law."""
    return length_mix(documents, longest=LONGEST, mean=MEAN, variation=VARIATION, seed=seed).tolist()


def mixes(documents: Sequence[int], seed: int) -> dict[str, list[int]]:
    """The rows that balance is counted for, by name."""
    short = length_mix(512, longest=1024, mean=455, variation=VARIATION, seed=seed).tolist()
    of_paper = {f"paper_mix_{n}": paper_mix(n, seed) for n in documents}
    return {"one_64k": [64 * 1024]} | of_paper | {"short_512": short}


def layouts(lengths: Sequence[int], ranks: int) -> dict[str, Layout]:
    """The layouts that are compared, of one row that all of them can split."""
    tokens = padded_tokens(sum(lengths), ranks, 4 * TILE)
    return {
        "zigzag": Zigzag(ranks=ranks, tokens=tokens),
        "stripes": Striped(ranks=ranks, tokens=tokens, stripe=TILE),
        "picked": pick_layout(lengths, tokens, ranks, tile=TILE),
        "contiguous": Contiguous(ranks=ranks, tokens=tokens),
    }


def name_of(layout: Layout) -> str:
    """What a reader calls a layout."""
    return f"stripes of {layout.stripe}" if isinstance(layout, Striped) else type(layout).__name__.lower()


def balance_rows(documents: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Maximum over mean of the ranks' work, and critical path over a perfect split, of every mix, layout and C."""
    rows = []
    for mix, lengths in mixes(documents, seed).items():
        for ranks in RANKS:
            row: dict[str, Any] = {"documents": mix, "ranks": ranks}
            for name, layout in layouts(lengths, ranks).items():
                found = balance(document_ranges(lengths, layout.tokens), layout, tile=TILE)
                row |= {
                    name: found.max_over_mean,
                    f"{name}_critical_over_mean": found.critical_pairs / float(found.rank_pairs.mean()),
                }
                if name == "picked":
                    row["picked_layout"] = name_of(layout)
            rows.append(row)
    return rows


def efficiency_rows() -> list[dict[str, Any]]:
    """Parallel efficiency of one long document on 8 ranks by count, at the lengths of Fig. 6."""
    rows = []
    for tokens in CONTEXTS:
        ranges = document_ranges([tokens], tokens)
        alone = balance(ranges, Zigzag(ranks=1, tokens=tokens), tile=TILE).critical_pairs
        both = {"zigzag": Zigzag(ranks=8, tokens=tokens), "contiguous": Contiguous(ranks=8, tokens=tokens)}
        found = {name: balance(ranges, layout, tile=TILE).efficiency(alone) for name, layout in both.items()}
        rows.append({"tokens": tokens, "ranks": 8} | found)
    return rows


def usp_pairs(lengths: Sequence[int], ulysses: int, ring: int, tile: int) -> float:
    """Critical path of padded USP in this unit; `padded_usp_pairs` for visible pairs."""
    if tile == 1:
        return padded_usp_pairs(lengths, ulysses, ring)
    longest = padded_tokens(max(lengths), ring, tile)
    row = balance(document_ranges([longest], longest), Contiguous(ranks=ring, tokens=longest), tile=tile)
    return len(lengths) * row.critical_pairs / ulysses


def usp_rows(documents: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Critical path of padded USP over that of the picked layout, the same documents on the same ranks."""
    rows = []
    for count in documents:
        lengths = paper_mix(count, seed)
        for ranks in RANKS[1:]:
            split = layouts(lengths, ranks)
            ours = {
                (name, tile): balance(
                    document_ranges(lengths, split[name].tokens), split[name], tile=tile
                ).critical_pairs
                for name in ("picked", "zigzag")
                for tile in (1, TILE)
            }
            for ulysses in (u for u in RANKS if u <= ranks):
                ring = ranks // ulysses
                usp = {tile: usp_pairs(lengths, ulysses, ring, tile) for tile in (1, TILE)}
                rows.append(
                    {
                        "documents": count,
                        "ranks": ranks,
                        "ulysses": ulysses,
                        "ring": ring,
                        "over_picked": usp[1] / ours["picked", 1],
                        "over_picked_in_tiles": usp[TILE] / ours["picked", TILE],
                        "over_zigzag": usp[1] / ours["zigzag", 1],
                        "picked_layout": name_of(split["picked"]),
                    }
                )
    return rows


def critical_path_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Fig. 5 as a count: critical paths of one mix over C, 1 = its visible pairs on one rank without padding."""
    lengths = paper_mix(count, seed)
    whole = causal_pairs(lengths)
    rows = []
    for ranks in RANKS:
        split = layouts(lengths, ranks)
        row: dict[str, Any] = {"ranks": ranks, "perfect": 1 / ranks}
        for name in ("picked", "zigzag", "contiguous"):
            ranges = document_ranges(lengths, split[name].tokens)
            row[name] = balance(ranges, split[name]).critical_pairs / whole
        row["padded_usp_ring_1"] = padded_usp_pairs(lengths, ranks, 1) / whole
        row["padded_usp_ulysses_1"] = padded_usp_pairs(lengths, 1, ranks) / whole
        rows.append(row)
    return rows


def usp_milliseconds() -> list[dict[str, Any]]:
    """The paper's nine times of padded USP against the count, whose one constant is its (2, 1) bar."""
    rows = []
    for name, printed in PAPER["usp_milliseconds"].items():
        ulysses, ring = map(int, name.split("x"))
        from_count = PAPER["usp_milliseconds"]["2x1"] * 2 * (2 - 1 / ring) / (ulysses * ring)
        rows.append({"ulysses": ulysses, "ring": ring, "printed": printed, "from_count": from_count})
    return rows


def counted(documents: Sequence[int], seed: int) -> dict[str, Any]:
    """All of it; the headline ratios are of the first number of documents."""
    lengths = paper_mix(documents[0], seed)
    usp, efficiency = usp_rows(documents, seed), efficiency_rows()
    headline = {
        f"padded_usp_work_ratio_c{row['ranks']}": row["over_picked"]
        for row in usp
        if row["documents"] == documents[0] and row["ring"] == 1
    }
    return {
        "tile": TILE,
        "work_max_over_mean": balance_rows(documents, seed),
        "parallel_efficiency": efficiency,
        "parallel_efficiency_256k_c8": next(r["zigzag"] for r in efficiency if r["tokens"] == LONG_TOKENS),
        **headline,
        "padded_usp_work_ratio": usp,
        "padding_alone_work_ratio": len(lengths) * LONGEST * (LONGEST + 1) / 2 / causal_pairs(lengths),
        "padded_tokens_over_real": len(lengths) * LONGEST / sum(lengths),
        "critical_path": critical_path_rows(documents[0], seed),
        "paper_usp_milliseconds": usp_milliseconds(),
        "paper": PAPER,
    }
