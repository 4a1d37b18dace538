"""How evenly attention work is spread: query-key pairs counted from the documents that are really there.

Counted in whole tiles where a tile is given, since a kernel works on a tile if any of its pairs is visible.

The ring moves in step, so its time is the sum over steps of the slowest rank: `critical`. Numpy, on the host.

Letters: C ranks, N tokens of a row, L = N / C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64

from draftco_jax.context_parallel.layouts import Layout, Split, Striped, Zigzag


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Work of one row over the ranks, in query-key pairs."""

    step_pairs: Int64[np.ndarray, "C C"]
    """Of each rank (first axis) in each step of the ring."""

    @property
    def rank_pairs(self) -> Int64[np.ndarray, " C"]:
        """Of each rank, all steps together."""
        return self.step_pairs.sum(axis=1)

    @property
    def max_over_mean(self) -> float:
        """1 is perfect; 1 where there is no work."""
        pairs = self.rank_pairs
        return float(pairs.max() / pairs.mean()) if pairs.sum() else 1.0

    @property
    def critical_pairs(self) -> int:
        """Sum over steps of the slowest rank."""
        return int(self.step_pairs.max(axis=0).sum())

    def efficiency(self, one_rank_pairs: int) -> float:
        """Work on one rank / (C * critical path): what C ranks make of C times the machine, by count."""
        return one_rank_pairs / (self.step_pairs.shape[0] * self.critical_pairs)


def document_ranges(lengths: Sequence[int], tokens: int, window: int | None = None) -> Int64[np.ndarray, "2 N"]:
    """First and last key of each query of a row of documents laid one after another; padding sees none (1, 0)."""
    if sum(lengths) > tokens or min(lengths, default=1) < 1:
        raise ValueError(f"lengths (sum {sum(lengths)}) must be >= 1 and fit tokens={tokens}; make the row longer")
    ranges = np.stack([np.ones(tokens, np.int64), np.zeros(tokens, np.int64)])
    start = 0
    for length in lengths:
        place = np.arange(start, start + length)
        ranges[0, place] = start if window is None else np.maximum(start, place - window + 1)
        ranges[1, place] = place
        start += length
    return ranges


def balance(ranges: Int64[np.ndarray, "2 N"], layout: Layout, *, tile: int = 1) -> Balance:
    """Pairs of each rank in each step, counted in tiles of `tile` by `tile` (1: exactly the visible pairs).

    What is counted is what the block op does: for a tile of queries all tiles between the first and the last key that
    one of them sees.
    """
    c = layout.ranks
    held = [np.asarray(layout.order()).reshape(c, -1)[r].astype(np.int64) for r in range(c)]
    key_tiles = [_tile_ends(keys, tile) for keys in held]
    pairs = np.zeros((c, c), np.int64)
    for rank in range(c):
        first, last = _tile_hull(ranges[0, held[rank]], ranges[1, held[rank]], tile)
        for step in range(c):
            starts, ends = key_tiles[(rank - step) % c]
            low, high = np.searchsorted(ends, first, side="left"), np.searchsorted(starts, last, side="right")
            pairs[rank, step] = np.maximum(np.where(first <= last, high - low, 0), 0).sum() * tile * tile
    return Balance(step_pairs=pairs)


def pick_layout(lengths: Sequence[int], tokens: int, ranks: int, *, tile: int, halo: int = 0) -> Split:
    """Zigzag or stripes of 1, 2 or 4 tiles: what has the shortest critical path for these documents, counted in tiles.

    Zigzag wins ties. A program is compiled for one layout, so ask with lengths that are typical of the run.

    Args:
        lengths: of the documents of a row, in their order.
        tokens: padded length of the row; layouts that cannot split it are left out.
        ranks: of the context axis.
        tile: of the kernel.
        halo: tokens that labels reach ahead, which a piece must hold.
    """
    layouts: list[Split] = []
    if tokens % (2 * ranks) == 0:
        layouts.append(Zigzag(ranks=ranks, tokens=tokens))
    stripes = [n * tile for n in (1, 2, 4) if tokens % (ranks * n * tile) == 0]
    layouts += [Striped(ranks=ranks, tokens=tokens, stripe=stripe) for stripe in stripes]
    layouts = [layout for layout in layouts if layout.piece >= halo]
    if not layouts:
        raise ValueError(
            f"tokens={tokens} must be a multiple of {2 * ranks} or {ranks * tile}, pieces >= halo={halo}; pad the row"
        )
    ranges = document_ranges(lengths, tokens)
    return min(layouts, key=lambda layout: balance(ranges, layout, tile=tile).critical_pairs)


def padded_usp_pairs(lengths: Sequence[int], ulysses: int, ring: int) -> float:
    """Critical path of Ulysses x contiguous ring where every document is a row padded to the longest, in pairs.

    Ulysses splits heads evenly, so a pair there costs 1 / ulysses of one with all heads. The contiguous ring takes
    2 - 1/ring times the mean (`balance` of one document, exact in the limit of long rows).
    """
    longest = max(lengths)
    return len(lengths) * longest * (longest + 1) / 2 / (ulysses * ring) * (2 - 1 / ring)


def causal_pairs(lengths: Sequence[int]) -> int:
    """Visible pairs of these documents."""
    return sum(n * (n + 1) // 2 for n in lengths)


def length_mix(count: int, *, longest: int, mean: float, variation: float, seed: int) -> Int64[np.ndarray, " n"]:
    """Lengths with this maximum, mean and coefficient of variation, drawn once from a beta law.

    Mean and standard deviation are as asked to half a token, which is what rounding to whole tokens may change; figures
    that so many lengths of 1..longest cannot have, with one of them the longest, are refused.

    The benchmark of arXiv 2609.07108 (Fig. 5) states 20,480 at most and rows padded to 2.25 times the real tokens; its
    measured times fit a mean of 9,102 and a variation of 0.52.
    """
    if count < 8 or not 0 < mean < longest or variation <= 0:
        raise ValueError(
            f"count={count} must be >= 8, 0 < mean={mean} < longest={longest}, variation={variation} > 0; draw more"
        )
    share, spread = mean / longest, variation * mean
    if (most := float(np.sqrt((1 - share) / share))) <= variation:
        raise ValueError(
            f"variation={variation} must be < {most:.3g} for mean={mean}, longest={longest}; ask for a smaller one"
        )
    # One document is the longest; the others are moved and stretched so that mean and variation of all are as asked.
    rest_mean = (count * mean - longest) / (count - 1)
    rest_variance = (count * (mean**2 + spread**2) - longest**2) / (count - 1) - rest_mean**2
    weight = share * (1 - share) / (spread / longest) ** 2 - 1
    draws = np.random.default_rng(seed).beta(share * weight, (1 - share) * weight, count - 1) * longest
    wanted = np.sqrt(max(rest_variance, 0.0))
    for _ in range(100):  # each move pushes some past the ends, where they are clipped
        draws = np.clip(rest_mean + (draws - draws.mean()) * (wanted / max(draws.std(), 1e-9)), 1, longest)
    lengths = np.append(np.rint(draws), longest).astype(np.int64)
    if max(abs(lengths.mean() - mean), abs(lengths.std() - spread)) > 0.5:
        raise ValueError(
            f"mean={mean}, variation={variation} must be reached by count={count} lengths of 1..{longest} (found "
            f"{lengths.mean():.6g}, {lengths.std() / lengths.mean():.3g}); draw more documents or ask for other figures"
        )
    return lengths


def _tile_ends(index: Int64[np.ndarray, " L"], tile: int) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    return index[::tile], np.append(index[tile - 1 :: tile], index[-1:])[: -(-index.size // tile)]


def _tile_hull(
    first: Int[np.ndarray, " L"], last: Int[np.ndarray, " L"], tile: int
) -> tuple[Int[np.ndarray, " A"], Int[np.ndarray, " A"]]:
    """Lowest first and highest last of each tile of queries, of those that see anything; (1, 0) if none does."""
    some = first <= last
    starts = np.arange(0, first.size, tile)
    lowest = np.minimum.reduceat(np.where(some, first, np.iinfo(np.int64).max), starts)
    highest = np.maximum.reduceat(np.where(some, last, -1), starts)
    return np.where(highest < 0, 1, lowest), np.where(highest < 0, 0, highest)
