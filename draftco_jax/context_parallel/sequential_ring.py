"""The baseline: Ulysses all-to-all inside, a ring of contiguous stretches outside, each document in a row of its own
that is padded to the longest. Nothing trains with it: `draftco bench attention` compiles it to read what it sends
(`bench_attention.usp`), and tests hold it to the dense answer.

What SpecForge's sequence parallelism does for EAGLE-3 (facts: its `modeling/draft/llama3_eagle.py`), implemented with
the same ring and the same block op as ours so that only the design differs:

    every pass    q, k, v exchanged (tokens gathered, heads split over the `ulysses` axis), the keys of pass 0 sent
                  round the `ring` axis, diagonals of later passes merged locally, out exchanged back
    layout        rank (r, u) holds stretch r * U + u of the row: causal work is uneven over r, by up to 2 - 1/ring
    padding       a document shorter than the row pays for the whole row; padding attends like any token

Kinder to the baseline than the original: the trunk stays float32 until the merge, and tiles above the diagonal are
skipped. The original also appends T tokens to each rank's stretch so that labels need no communication; that is not
done here, since labels are no part of the attention.

Letters: R rows, L tokens of a rank, U ranks of the ulysses axis, N query heads, K key-value heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from draftco_jax.context_parallel.branch import Branch, Trunk, branch_attention, share_trunk
from draftco_jax.context_parallel.layouts import Contiguous
from draftco_jax.context_parallel.ring import RingSpec
from draftco_jax.context_parallel.zigzag import local_index, rank_of
from pallas_kernels.block_attention import KeyRange


@dataclass(frozen=True, kw_only=True)
class UspSpec:
    """How the baseline runs."""

    ring: RingSpec
    """Over the ring axis, with a `Contiguous` layout of the padded row."""
    ulysses_axis: str | None
    ulysses: int

    def __post_init__(self) -> None:
        if not isinstance(self.ring.layout, Contiguous):
            raise ValueError(f"ring.layout={self.ring.layout} must be Contiguous; the baseline knows no other order")
        if (self.ulysses_axis is None) != (self.ulysses == 1) or self.ring.layout.local_tokens % self.ulysses:
            raise ValueError(
                f"ulysses={self.ulysses} must divide {self.ring.layout.local_tokens}, the tokens of a ring rank, and "
                f"have an axis (ulysses_axis={self.ulysses_axis!r}); pad the rows, or use None with 1"
            )


class UspCache(NamedTuple):
    """Keys of the passes done, after the exchange."""

    trunk: Trunk
    keys: tuple[jax.Array, ...]  # of passes 1, 2, ...: [R, L U, K / U, H]
    values: tuple[jax.Array, ...]


def usp_index(spec: UspSpec) -> Int32[Array, " L"]:
    """Place in the row of each of this rank's tokens, before the exchange: what rotations are made of."""
    per_rank = spec.ring.layout.local_tokens // spec.ulysses
    rank = rank_of(spec.ring.axis) * spec.ulysses + rank_of(spec.ulysses_axis)
    return rank * per_rank + jnp.arange(per_rank, dtype=jnp.int32)


def usp_pass(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K H"],
    cache: UspCache | None,
    spec: UspSpec,
) -> tuple[Float[Array, "R L N H"], UspCache]:
    """One training pass; `cache` is None in pass 0, which makes the trunk.

    Fewer key-value heads than ranks of the ulysses axis are repeated before the exchange.
    """
    if k.shape[2] < spec.ulysses:
        k, v = (jnp.repeat(x, spec.ulysses // x.shape[2], axis=2) for x in (k, v))
    for name, heads in (("heads", q.shape[2]), ("kv_heads", k.shape[2])):
        if heads % spec.ulysses:
            raise ValueError(f"{name}={heads} must be a multiple of ulysses={spec.ulysses}; use fewer ulysses ranks")
    q, k, v = (_gather_tokens(x, spec) for x in (q, k, v))
    if cache is None:
        cache = UspCache(share_trunk(k, v, spec.ring), (), ())
    else:
        cache = cache._replace(keys=(*cache.keys, k), values=(*cache.values, v))
    index = jnp.broadcast_to(local_index(spec.ring.layout, spec.ring.axis)[None, :, None], (*q.shape[:2], 1))
    branch = None
    if cache.keys:
        live = jnp.ones(q.shape[:2], bool)
        branch = Branch(jnp.stack(cache.keys, axis=2), jnp.stack(cache.values, axis=2), live)
    seen = KeyRange(jnp.zeros_like(index), index)
    out, _ = branch_attention(q[:, :, None], cache.trunk, seen, branch, spec=spec.ring)
    return _gather_heads(out[:, :, 0], spec), cache


def _gather_tokens(x: Array, spec: UspSpec) -> Array:
    """[R, L, N, H] -> [R, L U, N / U, H]."""
    if spec.ulysses_axis is None:
        return x
    return lax.all_to_all(x, spec.ulysses_axis, split_axis=2, concat_axis=1, tiled=True)


def _gather_heads(x: Array, spec: UspSpec) -> Array:
    """[R, L U, N / U, H] -> [R, L, N, H]."""
    if spec.ulysses_axis is None:
        return x
    return lax.all_to_all(x, spec.ulysses_axis, split_axis=1, concat_axis=2, tiled=True)
