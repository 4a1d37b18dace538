"""Where a draft that reads its own tokens keeps the nodes of a token tree: rows of its cache from the anchor on.

Only nodes that have children are read, and numbered anew without the others (`Tree.inner`): node i of these, i >= 1, of
depth d, is the index anchor + d - 1 of a chain that goes through it. It lies in slot anchor + i - 1 and stands at
position anchor + d - 1; it sees every slot before the anchor, those of its ancestors and its own. These are guesses:
`absorb` overwrites them, or they lie where no query looks before they are.

Letters: B requests, m nodes of one depth that have children, S slots of the cache, h = half the rotated width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from draftco_jax.drafts.base import TreeCall
from draftco_jax.models.kv_cache import Cache, visible_branches


class TreeRows(NamedTuple):
    """The rows of one depth."""

    start: jax.Array  # i32[B] slot of the first, the others follow
    position: jax.Array  # i32[B] of all of them
    angles: tuple[jax.Array, jax.Array] | None  # f32[B, m, 1, h] cos and sin; None: nothing is turned
    visible: jax.Array  # bool[B, m, S]


def tree_rows(call: TreeCall, depth: int, cache: Cache) -> TreeRows:
    """Of the nodes of `depth` >= 1 that have children."""
    inner = call.tree.inner
    if inner is None or depth > inner.depth:
        raise ValueError(f"depth={depth} must be that of a node with children in {call.tree}; take a lesser one")
    nodes = inner.levels[depth - 1].nodes
    position: Int[Array, " B"] = call.anchor + (depth - 1)
    angles = None
    if cache.cos.shape[1]:
        cos, sin = cache.angles_at(position, 1)
        one_each = lambda x: jnp.broadcast_to(x, (x.shape[0], len(nodes), *x.shape[2:]))  # noqa: E731
        angles = one_each(cos), one_each(sin)
    reads = inner.mask()[list(nodes), 1:]
    return TreeRows(
        call.anchor + (nodes[0] - 1), position, angles, visible_branches(cache.capacity, call.anchor, reads)
    )
