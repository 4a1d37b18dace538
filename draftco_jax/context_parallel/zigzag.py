"""What each query sees, in places of the whole sequence, and values from later in it.

Every function here but `check_documents` runs on one rank's tokens, inside shard_map (or outside of it with axis None
and one rank).

Letters: C ranks, R rows, L tokens of a rank, p pieces of w tokens each of a rank, A anchors of a rank.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, Shaped

from draftco_jax.context_parallel.layouts import Layout, Split, Zigzag
from pallas_kernels.block_attention import KeyRange


def rank_of(axis: str | None) -> Int32[Array, ""]:
    """This rank on the context axis; 0 without one."""
    return jnp.int32(0) if axis is None else lax.axis_index(axis)


def local_index(layout: Layout, axis: str | None) -> Int32[Array, " L"]:
    """Place in the whole sequence of each of this rank's tokens."""
    return layout.index(rank_of(axis))


def causal_range(
    segment_ids: Int32[Array, "R L"],
    positions: Int32[Array, "R L"],
    index: Int32[Array, " L"],
    *,
    window: int | None = None,
) -> KeyRange:
    """Keys s <= t of the own document, at most `window` of them (t itself included); padding sees nothing.

    A document starts at index - position, so neither segment ids nor positions have to travel with the keys.

    Args:
        segment_ids: 0 is padding.
        positions: place in the document, counted from 0 without gaps (`check_documents` holds rows to that).
        index: place in the whole sequence, `local_index`.
        window: keys a query sees at most, None: all.
    """
    start = index[None, :] - positions
    first = start if window is None else jnp.maximum(start, index[None, :] - (_window(window) - 1))
    return _blank(KeyRange(first, jnp.broadcast_to(index[None, :], first.shape)), segment_ids > 0)


def anchor_range(
    anchors: Int32[Array, "R A"],
    starts: Int32[Array, "R A"],
    live: Bool[Array, "R A"],
    *,
    rows: int,
    window: int | None = None,
) -> KeyRange:
    """Trunk keys start <= s < anchor, the same for all rows of a block; [R, A, rows] each.

    With a window row j, which stands at anchor + j, sees only s > anchor + j - window.

    Args:
        anchors: place of each anchor in the whole sequence.
        starts: place of the first token of its document.
        live: which of the places for anchors are taken.
        rows: rows of a block.
        window: None: all of the context.
    """
    first = jnp.broadcast_to(starts[:, :, None], (*starts.shape, rows))
    if window is not None:
        row = anchors[:, :, None] + jnp.arange(rows, dtype=jnp.int32)[None, None, :]
        first = jnp.maximum(first, row - (_window(window) - 1))
    last = jnp.broadcast_to(anchors[:, :, None] - 1, first.shape)
    return _blank(KeyRange(first, last), jnp.broadcast_to(live[:, :, None], first.shape))


def with_halo(
    x: Shaped[Array, "R L *rest"], steps: int, layout: Split, axis: str | None, *, fill: float | int | bool = 0
) -> Shaped[Array, "R p e *rest"]:
    """Each piece of this rank followed by the next `steps` tokens of the sequence, e = w + steps.

    Only the first `steps` tokens of each piece are sent. The permutes are complete; what a border rank receives in vain
    is replaced by its own.
    """
    if not 0 <= steps <= layout.piece:
        raise ValueError(f"steps={steps} must be in 0..{layout.piece}, the tokens of a piece; use longer pieces")
    pieces = x.reshape(x.shape[0], layout.pieces, layout.piece, *x.shape[2:])
    heads = pieces[:, :, :steps]
    end = jnp.full_like(heads[:, :1], fill)
    after = _heads_after_zigzag if isinstance(layout, Zigzag) else _heads_after_stripes
    return jnp.concatenate([pieces, after(heads, end, layout.ranks, axis)], axis=2)


def _heads_after_zigzag(heads: Array, end: Array, ranks: int, axis: str | None) -> Array:
    """After an early chunk comes that of the next rank (on the last one its own late chunk), after a late chunk that of
    the rank before (on the first one the end)."""
    early, late = heads[:, :1], heads[:, 1:]
    if ranks == 1:
        return jnp.concatenate([late, end], axis=1)
    assert axis is not None
    rank = lax.axis_index(axis)
    after_early = jnp.where(rank == ranks - 1, late, lax.ppermute(early, axis, ring_hops(ranks, -1)))
    after_late = jnp.where(rank == 0, end, lax.ppermute(late, axis, ring_hops(ranks, 1)))
    return jnp.concatenate([after_early, after_late], axis=1)


def _heads_after_stripes(heads: Array, end: Array, ranks: int, axis: str | None) -> Array:
    """After a stripe comes that of the next rank; after the last rank's the first rank's next one."""
    if ranks == 1:
        return jnp.concatenate([heads[:, 1:], end], axis=1)
    assert axis is not None
    arrived = lax.ppermute(heads, axis, ring_hops(ranks, -1))
    of_first_rank = jnp.concatenate([arrived[:, 1:], end], axis=1)
    return jnp.where(lax.axis_index(axis) == ranks - 1, of_first_rank, arrived)


def ring_hops(ranks: int, step: int) -> tuple[tuple[int, int], ...]:
    """Permutation of a ring, rank r to r + step: complete, since a rank that receives nothing would get zeros."""
    return tuple((r, (r + step) % ranks) for r in range(ranks))


def check_documents(segment_ids: Int[np.ndarray, "R N"], positions: Int[np.ndarray, "R N"]) -> None:
    """Refuse, on the host, rows whose documents are not stretches with positions 0, 1, 2, ..., each with its own id.

    Where a document starts is read off its positions, so a gap would silently show a query the document before. An id
    that comes back later in its row would be one document to whoever compares ids and two to whoever reads positions.
    """
    if (negative := np.argwhere(segment_ids < 0)).size:
        row, t = (int(i) for i in negative[0])
        raise ValueError(f"segment_ids[{row}, {t}]={segment_ids[row, t]} must be >= 0; 0 is padding")
    real = segment_ids > 0
    new = np.ones_like(real)
    new[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    expected = np.arange(real.shape[1])[None, :] - np.maximum.accumulate(
        np.where(new, np.arange(real.shape[1])[None, :], 0), axis=1
    )
    bad = np.argwhere(real & (positions != expected))
    if bad.size:
        row, t = (int(i) for i in bad[0])
        raise ValueError(
            f"positions[{row}, {t}]={positions[row, t]} must be {expected[row, t]}, its place in document "
            f"{segment_ids[row, t]}; count positions from 0 in each document and give each its own segment id"
        )
    for row, begins in enumerate(new & real):
        starts = np.flatnonzero(begins)
        _, firsts = np.unique(segment_ids[row, starts], return_index=True)
        again = np.delete(starts, firsts)
        if again.size:
            t = int(again[0])
            raise ValueError(
                f"segment_ids[{row}, {t}]={segment_ids[row, t]} must be an id that this row has not used before; "
                "number its documents 1, 2, 3, ..."
            )


def _window(window: int) -> int:
    if window < 1:
        raise ValueError(f"window={window} must be >= 1 or None; None sees everything")
    return window


def _blank(seen: KeyRange, used: Array) -> KeyRange:
    return KeyRange(jnp.where(used, seen.first, 1), jnp.where(used, seen.last, 0))
