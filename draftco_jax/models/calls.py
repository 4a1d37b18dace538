"""What the layers of one forward are told beside their input, and what a token mixer is.

A policy is a stack of blocks; a block mixes tokens (attention of any kind, a recurrence) and then, or instead, works on
each token alone (an MLP, experts). Two calls exist:

    packed   whole packed rows in training, perhaps spread over devices: no state
    cached   T consecutive new tokens of each request, whose past is in the mixer's state

Rolling back. A verify call may hold tokens that are then rejected. The next call's `start` says how many were kept:
every state must then be as if only those had been read. A key-value cache gets this for nothing, since slots from
`start` on are overwritten before they are seen. A recurrent mixer keeps the state before the last call and that call's
inputs, and reads the kept ones at the beginning of the next call.

Trees. The tokens of a cached call may be the nodes of a token tree. A key-value cache holds them in the order of their
numbers, and is compacted to the path that was kept (`kv_cache.compacted`); a recurrent mixer cannot follow branches.

Letters: R packed rows of T tokens; B requests, T new tokens, S slots; h = half the rotated width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows
from draftco_jax.models.token_tree import Tree


class PackedCall(NamedTuple):
    """One forward over packed rows."""

    positions: jax.Array  # i32[R, T] restart at 0 in each document
    segment_ids: jax.Array  # i32[R, T] 0 = padding
    angles: tuple[jax.Array, jax.Array] | None  # f32[R, T, 1, h] cos and sin; None: no rotation
    packed: PackedRows  # how rows are spread over devices


class CachedCall(NamedTuple):
    """T new tokens of each request, at positions start, start + 1, ..., or those that a tree says."""

    start: jax.Array  # i32[B] position of the first
    angles: tuple[jax.Array, jax.Array] | None  # f32[B, T, 1, h] cos and sin; None: no rotation
    visible: Any  # what the cache's `seen` said: bool[B, T, S] slots at or before each token's own position, or pages
    lengths: jax.Array | None = None  # i32[B] real tokens of the T where this is a padded prompt; None: all are
    # With `lengths` the state afterwards is settled: that after the real tokens, with nothing to be rolled back.
    active: jax.Array | None = None  # bool[B, T] tokens whose output is read, the first ones of each request; the
    # others use no expert and no page. None: all
    packed: PackedRows = WHOLE_ROWS  # over which axes weights, and with them heads and states, are split
    tree: Tree | None = None  # the T tokens are its nodes: rows of the cache one after the other, positions by depth


@runtime_checkable
class Mixer(Protocol):
    """A module that mixes tokens, [.., D] -> [.., D] without norm and residual."""

    def __call__(self, x: Float[Array, "R T D"], call: PackedCall) -> Float[Array, "R T D"]:
        """Packed rows; padding gives finite values and takes no part."""
        ...

    def empty_state(self, batch: int, capacity: int, lookahead: int, dtype: Any) -> Any:
        """State before anything was read: room for `capacity` tokens, and for calls of lookahead + 1 tokens each.

        Where weights are split over a tensor axis, that of this rank's heads, read off the weights.
        """
        ...

    def step(self, x: Float[Array, "B T D"], state: Any, call: CachedCall) -> tuple[Float[Array, "B T D"], Any]:
        """New tokens. T is at most lookahead + 1, or anything where `call.lengths` is given."""
        ...
