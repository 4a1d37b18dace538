"""Queries stay, stacked keys and values go round: the ring, forward and backward.

At step i rank r holds the keys of rank r - i. C - 1 hops, the first one sent before the own keys are worked on, none
after the last step. Each hop is tied by a barrier to the result of the step before, so that it is sent then and is
under way during the next step: without the barrier XLA would send all of them first.

The backward replays the ring with the merged lse (and delta) of the forward. Gradients of keys travel in float32 with
their keys (one permute carries both); they start at step 1, because what the own queries add is added at home, so they
take C - 1 hops too.

Bytes out of a rank: forward 2 (C-1) L d b, backward (C-1) L d (2 b + 8), with d = K * H, b bytes of a key's number.

Letters beside those of the block op: C ranks, L tokens of a rank, S = C slots of kept keys (or 1: only the own ones).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from draftco_jax.context_parallel.layouts import Layout
from draftco_jax.context_parallel.zigzag import rank_of, ring_hops
from pallas_kernels.block_attention import (
    KeyRange,
    Partial,
    block_attention,
    block_attention_backward,
    empty_partial,
    merge,
    statistics_dtype,
)
from pallas_kernels.manual_axes import cast, varying_axes


@dataclass(frozen=True, kw_only=True)
class RingSpec:
    """How attention runs over the context axis."""

    layout: Layout
    axis: str | None
    """Name of the context axis inside shard_map; None: one rank, no shard_map needed."""
    scale: float
    """Factor of the scores, usually head_dim ** -0.5."""
    implementation: str = "blockwise"
    """Of the block op, and of the branch op unless that has its own."""
    branch_implementation: str | None = None
    tile: int = 256
    unroll: int = 1
    """Ring steps in one loop body. Compiled for 8 H100, 1 overlaps every hop and needs less memory than 2, which saves
    a copy of the keys a step."""

    def __post_init__(self) -> None:
        if self.axis is None and self.layout.ranks != 1:
            raise ValueError(f"axis=None must go with ranks=1, not {self.layout.ranks}; name the context axis")
        if self.unroll < 1:
            raise ValueError(f"unroll={self.unroll} must be >= 1; 1 is a plain loop")

    @property
    def ranks(self) -> int:
        """Ranks of the ring."""
        return self.layout.ranks

    @property
    def of_branches(self) -> str:
        """Implementation of the branch op."""
        return self.branch_implementation or self.implementation


def check_axis(spec: RingSpec) -> None:
    """Refuse a layout that was made for another number of ranks than the axis has."""
    if spec.axis is not None and (size := lax.axis_size(spec.axis)) != spec.ranks:
        raise ValueError(f"ranks={spec.ranks} must be {size}, the size of axis {spec.axis!r}; make the layout with it")


def ring_forward(
    q: Float[Array, "R Tq N H"], slots: Float[Array, "S 2 R L K H"], seen: KeyRange, spec: RingSpec
) -> Partial:
    """Attention of this rank's queries over the whole trunk. With S = 1 the keys go round, with S = C they are here."""
    if spec.ranks == 1:
        return block_attention(q, slots[0, 0], slots[0, 1], seen, _keys_at(spec, jnp.int32(0)), **_options(spec))
    axes = _axes(spec, q, slots, *seen)
    start = empty_partial(q.shape, statistics_dtype(q.dtype), axes)
    slots = cast(slots, axes)

    def work(so_far: Partial, kv: Array, step: Array) -> Partial:
        index = _keys_at(spec, step)
        return merge(so_far, block_attention(q, kv[0], kv[1], seen, index, **_options(spec)))

    if _kept(slots, spec):
        steps = jnp.arange(spec.ranks, dtype=jnp.int32)
        return lax.scan(lambda c, x: (work(c, *x), None), start, (slots, steps))[0]

    def hop(carry: tuple[Partial, Array], step: Array) -> tuple[tuple[Partial, Array], None]:
        so_far, kv = lax.optimization_barrier(carry)
        coming = _send(kv, spec)
        return (work(so_far, kv, step), coming), None

    steps = jnp.arange(spec.ranks - 1, dtype=jnp.int32)
    (so_far, kv), _ = lax.scan(hop, (start, slots[0]), steps, unroll=min(spec.unroll, spec.ranks - 1))
    return work(so_far, kv, jnp.int32(spec.ranks - 1))


def ring_backward(
    q: Float[Array, "R Tq N H"],
    slots: Float[Array, "S 2 R L K H"],
    seen: KeyRange,
    lse: Float[Array, "R Tq N"],
    delta: Float[Array, "R Tq N"],
    d_out: Float[Array, "R Tq N H"],
    spec: RingSpec,
) -> tuple[Float[Array, "R Tq N H"], Float[Array, "S 2 R L K H"]]:
    """Gradients of the queries and of the slots, float32, given lse and delta of the whole attention."""
    axes = _axes(spec, q, slots, *seen, lse, delta, d_out)
    slots = cast(slots, axes)
    last = spec.ranks - 1

    def work(kv: Array, step: Array | int) -> tuple[Array, Array]:
        index = _keys_at(spec, jnp.asarray(step, jnp.int32))
        grads = block_attention_backward(q, kv[0], kv[1], seen, index, lse, delta, d_out, **_options(spec))
        return grads.q, jnp.stack([grads.k, grads.v])

    if _kept(slots, spec):

        def slot(dq: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
            own_q, own_kv = work(*x)
            return dq + own_q, own_kv

        start = cast(jnp.zeros_like(q, dtype=lse.dtype), axes)
        return lax.scan(slot, start, (slots, jnp.arange(spec.ranks, dtype=jnp.int32)))

    # Not before this backward's own cotangent is there: sent earlier it would meet another ring's last hop.
    own, d_out = lax.optimization_barrier((slots[0], d_out)) if last else (slots[0], d_out)
    coming = _send(own, spec) if last else own
    dq, at_home = work(own, 0)
    if not last:
        return dq, at_home[None]
    dq, kv = lax.optimization_barrier((dq, coming))
    coming = _send(kv, spec) if last > 1 else kv
    own_q, travelling = work(kv, 1)
    dq = dq + own_q

    def hop(carry: tuple[Array, Array, Array], step: Array) -> tuple[tuple[Array, Array, Array], None]:
        dq, travelling, kv = lax.optimization_barrier(carry)
        coming, arrived = send_together(kv, travelling, spec)
        own_q, own_kv = work(kv, step)
        return (dq + own_q, arrived + own_kv, coming), None

    carry = (dq, travelling, coming)
    if last > 2:
        steps = jnp.arange(2, last, dtype=jnp.int32)
        carry, _ = lax.scan(hop, carry, steps, unroll=min(spec.unroll, last - 2))
    dq, travelling, kv = carry
    if last > 1:
        dq, travelling, kv = lax.optimization_barrier((dq, travelling, kv))
        arrived = _send(travelling, spec)
        own_q, own_kv = work(kv, last)
        dq, travelling = dq + own_q, arrived + own_kv
    return dq, (at_home + _send(travelling, spec))[None]


def gather_ring(own: Float[Array, "2 R L K H"], spec: RingSpec) -> Float[Array, "C 2 R L K H"]:
    """Keys and values of all ranks, slot i those of rank r - i: one ring's bytes, and C times the memory."""
    own = cast(own, _axes(spec, own))

    def hop(kv: Array, _: None) -> tuple[Array, Array]:
        kv = _send(kv, spec)
        return kv, kv

    if spec.ranks == 1:
        return own[None]
    _, others = lax.scan(hop, own, None, length=spec.ranks - 1)
    return jnp.concatenate([own[None], others])


def send_home(slots: Float[Array, "C 2 R L K H"], spec: RingSpec) -> Float[Array, "2 R L K H"]:
    """The transpose of `gather_ring`: each slot's gradients added up on the rank whose keys they belong to.

    They travel as they do in the replayed ring, C - 1 hops.
    """
    if spec.ranks == 1:
        return slots[0]
    slots = cast(slots, _axes(spec, slots))
    travelling, _ = lax.scan(lambda total, own: (_send(total, spec) + own, None), slots[1], slots[2:])
    return slots[0] + _send(travelling, spec)


def _options(spec: RingSpec) -> dict[str, Any]:
    return {"scale": spec.scale, "implementation": spec.implementation, "tile": spec.tile}


def _kept(slots: Array, spec: RingSpec) -> bool:
    if slots.shape[0] not in (1, spec.ranks):
        raise ValueError(f"slots={slots.shape[0]} must be 1 or {spec.ranks}, the ranks; make them with share_trunk")
    return slots.shape[0] > 1


def _axes(spec: RingSpec, *arrays: Array) -> frozenset[str]:
    """Mesh axes these vary over, the context axis among them."""
    return varying_axes(rank_of(spec.axis), *arrays)


def _keys_at(spec: RingSpec, step: Array) -> Int32[Array, " L"]:
    """Places of the keys that this rank holds at a step."""
    return spec.layout.index((rank_of(spec.axis) - step) % spec.ranks)


def _send(x: Array, spec: RingSpec) -> Array:
    assert spec.axis is not None
    return lax.ppermute(x, spec.axis, ring_hops(spec.ranks, 1))


def send_together(kv: Array, grads: Array, spec: RingSpec) -> tuple[Array, Array]:
    """Keys and their gradients in one permute, bit for bit: of two, XLA on a GPU keeps only one under way at a time."""
    width, ratio = kv.shape[-1], grads.dtype.itemsize // kv.dtype.itemsize
    if width % ratio:
        return _send(kv, spec), _send(grads, spec)
    packed = kv.reshape(*kv.shape[:-1], width // ratio, ratio) if ratio > 1 else kv
    packed = packed if kv.dtype == grads.dtype else lax.bitcast_convert_type(packed, grads.dtype)
    arrived = _send(jnp.concatenate([packed, grads], axis=-1), spec)
    packed, grads = arrived[..., : width // ratio], arrived[..., width // ratio :]
    if kv.dtype != grads.dtype:
        packed = lax.bitcast_convert_type(packed, kv.dtype)
    return packed.reshape(kv.shape), grads
