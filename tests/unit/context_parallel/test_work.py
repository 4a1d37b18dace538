"""Counts of attention work: exact against a mask, and the figures that the design is chosen for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import Contiguous, Striped, Zigzag, padded_tokens
from draftco_jax.context_parallel.work import (
    balance,
    causal_pairs,
    document_ranges,
    length_mix,
    padded_usp_pairs,
    pick_layout,
)
from pallas_kernels.block_attention.reference import NO_KEY, tile_bounds


def counted(lengths, layout, tile, window=None):
    """The same count made from the whole mask."""
    first, last = document_ranges(lengths, layout.tokens, window)
    index = np.arange(layout.tokens)
    mask = (index[None] >= first[:, None]) & (index[None] <= last[:, None])
    held = np.asarray(layout.order()).reshape(layout.ranks, -1)
    out = np.zeros((layout.ranks, layout.ranks), int)
    for r in range(layout.ranks):
        for i in range(layout.ranks):
            block = mask[np.ix_(held[r], held[(r - i) % layout.ranks])]
            for a in range(0, block.shape[0], tile):
                seen = [block[a : a + tile, b : b + tile].any() for b in range(0, block.shape[1], tile)]
                # Tiles between the first and the last one seen are worked on.
                places = np.flatnonzero(seen)
                out[r, i] += (places[-1] - places[0] + 1 if places.size else 0) * tile * tile
    return out


@pytest.mark.parametrize(
    "layout", [Striped(ranks=2, tokens=48, stripe=3), Zigzag(ranks=4, tokens=48), Contiguous(ranks=3, tokens=48)]
)
@pytest.mark.parametrize("window", [None, 5])
def test_pairs_are_those_of_the_mask(layout, window):
    lengths = [13, 1, 20, 9]
    got = balance(document_ranges(lengths, 48, window), layout)
    np.testing.assert_array_equal(got.step_pairs, counted(lengths, layout, 1, window))
    if window is None:
        assert got.rank_pairs.sum() == causal_pairs(lengths)


def test_tiles_are_those_of_the_mask_where_tiles_divide_chunks():
    layout = Zigzag(ranks=2, tokens=48)
    got = balance(document_ranges([17, 30], 48), layout, tile=4)
    np.testing.assert_array_equal(got.step_pairs, counted([17, 30], layout, 4))


@pytest.mark.parametrize("tile", [4, 5])
def test_tiles_are_those_the_block_op_visits(tile):
    """Also where a tile of queries straddles two chunks, whose hull then holds tiles that none of its queries sees."""
    layout = Zigzag(ranks=2, tokens=48)
    ranges = document_ranges([17, 30], 48)
    got = balance(ranges, layout, tile=tile).step_pairs
    held = np.asarray(layout.order()).reshape(2, 24)
    tiles = -(-24 // tile)
    pad = lambda x, fill: np.pad(x, (0, tiles * tile - 24), constant_values=fill).reshape(tiles, tile)  # noqa: E731
    for rank in range(2):
        first, last = (jnp.asarray(pad(x[held[rank]], fill), jnp.int32) for x, fill in zip(ranges, (1, 0), strict=True))
        for step in range(2):
            keys = jnp.asarray(pad(held[(rank - step) % 2], NO_KEY), jnp.int32)
            low, high = tile_bounds(first, last, keys)
            assert got[rank, step] == np.maximum(np.asarray(high) - np.asarray(low), 0).sum() * tile * tile


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_long_document_is_balanced_where_a_sequential_ring_is_not(ranks):
    tokens = 16384
    row = document_ranges([tokens], tokens)
    assert balance(row, Zigzag(ranks=ranks, tokens=tokens)).max_over_mean <= 1.02
    # 2 - 1/C in the limit of long rows; one part in `tokens` less here.
    assert balance(row, Contiguous(ranks=ranks, tokens=tokens)).max_over_mean == pytest.approx(
        2 - 1 / ranks, rel=2 / tokens * ranks
    )


def test_efficiency_at_256k_on_8_ranks():
    """By count in tiles of 128, as a kernel works: all steps of all ranks are equal."""
    tokens = 256 * 1024
    row = document_ranges([tokens], tokens)
    alone = balance(row, Zigzag(ranks=1, tokens=tokens), tile=128).critical_pairs
    assert balance(row, Zigzag(ranks=8, tokens=tokens), tile=128).efficiency(alone) >= 0.98
    assert balance(row, Contiguous(ranks=8, tokens=tokens), tile=128).efficiency(alone) < 0.55


@pytest.fixture(scope="module")
def paper_mix():
    return length_mix(256, longest=20480, mean=9102, variation=0.52, seed=0)


def test_the_mix_is_as_stated(paper_mix):
    assert paper_mix.max() == 20480 and paper_mix.min() >= 1
    assert paper_mix.mean() == pytest.approx(9102, rel=1e-3)
    assert paper_mix.std() / paper_mix.mean() == pytest.approx(0.52, rel=1e-3)
    again = length_mix(256, longest=20480, mean=9102, variation=0.52, seed=0)
    np.testing.assert_array_equal(paper_mix, again)


def test_padded_usp_costs_3_8_times_ours_on_the_papers_mix(paper_mix):
    """At 2 ranks, ulysses 2 x ring 1; both as critical paths. Padding alone: longest^2 / mean of squares = 3.98."""
    lengths = paper_mix.tolist()
    padding = padded_usp_pairs(lengths, 2, 1) / (causal_pairs(lengths) / 2)
    assert padding == pytest.approx(3.98, abs=0.02)
    tokens = padded_tokens(sum(lengths), 2)
    ours = balance(document_ranges(lengths, tokens), Zigzag(ranks=2, tokens=tokens)).critical_pairs
    assert padded_usp_pairs(lengths, 2, 1) / ours >= 3.8


def test_the_layout_is_picked_by_the_documents():
    """Zigzag for one long document; stripes for many, with less waste than zigzag in tiles too."""
    assert pick_layout([4096], 4096, 4, tile=16) == Zigzag(ranks=4, tokens=4096)
    lengths, tokens = length_mix(8, longest=1024, mean=455, variation=0.52, seed=1).tolist(), 4096
    picked = pick_layout(lengths, tokens, 8, tile=16, halo=8)
    assert isinstance(picked, Striped)
    row = document_ranges(lengths, tokens)
    zigzag = balance(row, Zigzag(ranks=8, tokens=tokens), tile=16)
    assert balance(row, picked, tile=16).critical_pairs < zigzag.critical_pairs / 1.5
    assert pick_layout(lengths, tokens, 8, tile=16, halo=40).piece >= 40
    with pytest.raises(ValueError, match="halo=4096"):
        pick_layout(lengths, tokens, 8, tile=16, halo=4096)


def test_refusals():
    with pytest.raises(ValueError, match="fit tokens=8"):
        document_ranges([5, 4], 8)
    with pytest.raises(ValueError, match="count=3"):
        length_mix(3, longest=10, mean=5, variation=0.5, seed=0)


def test_a_mix_is_as_asked_to_half_a_token():
    for count, mean, variation in ((8, 9102, 0.52), (32, 3000, 1.2), (64, 9102, 0.2)):
        found = length_mix(count, longest=20480, mean=mean, variation=variation, seed=1)
        assert (found.size, found.max()) == (count, 20480) and found.min() >= 1
        assert abs(found.mean() - mean) <= 0.5 and abs(found.std() - variation * mean) <= 0.5


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"mean": 3000, "variation": 0.52}, "must be reached by count=8 lengths"),  # the longest alone spreads more
        ({"mean": 2000, "variation": 2.0}, "must be reached by count=8 lengths"),  # no room left for seven others
        ({"mean": 9102, "variation": 1.2}, r"variation=1.2 must be < 1.12 for mean=9102"),
        ({"mean": 9102, "variation": 0.0}, "variation=0.0 > 0"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        length_mix(8, longest=20480, seed=0, **figures)
