"""One attention for the policy and for every draft under context parallelism.

A query sees a range of the trunk, whose keys go round the ring, and the keys of its own branch, which never leave its
rank; both in one softmax (and the head's sink, if there is one):

    policy          trunk first..t                           no branch
    EAGLE-3 pass k  trunk first..t        (pass-0 keys)      keys of passes 1..k at t         rule "all"
    DFlash block    trunk first..a-1                         rows of the block                rule "all"
    DSpark block    trunk first..a-1                         rows of the block                rule "all" or "causal"

One custom derivative spans ring, branch and merge: the backward hands the merged lse to both parts, so nothing is
differentiated through a merge. `out` and `lse` are both differentiable.

A trunk that is read several times (EAGLE-3 passes) is shared: `share_trunk` gives its keys and a `carrier`, zeros whose
cotangent brings the keys' gradients back in float32 and adds them up over all reads before they are cast once.

Letters: R rows, G branches of a rank (tokens for EAGLE-3, anchors for blocks), n queries and m keys of a branch, L
tokens of a rank, S 1 or C slots of keys, N query heads, K key-value heads, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from draftco_jax.context_parallel.ring import RingSpec, check_axis, gather_ring, ring_backward, ring_forward, send_home
from draftco_jax.context_parallel.zigzag import causal_range, local_index, rank_of
from pallas_kernels.block_attention import KeyRange, Partial, statistics_dtype
from pallas_kernels.branch_attention import Branch, Rule, branch_attention_backward
from pallas_kernels.branch_attention import branch_attention as local_attention
from pallas_kernels.manual_axes import cast, fresh, varying_axes

TrunkMode = Literal["replay", "gathered"]
SAVED_NAMES = ("context_parallel_out", "context_parallel_lse", "context_parallel_slots")
"""What `save_ring_policy` keeps: of every read its out and lse; of a gathered trunk its slots."""


class Trunk(NamedTuple):
    """Keys and values of the main sequence, ready to be read any number of times."""

    slots: jax.Array  # [S, 2, R, L, K, H] slot i: keys and values of rank r - i
    carrier: jax.Array  # f32[S, 2, R, L, K, H] zeros; its cotangent is the gradient of the slots


def share_trunk(
    k: Float[Array, "R L K H"], v: Float[Array, "R L K H"], spec: RingSpec, *, mode: TrunkMode = "replay"
) -> Trunk:
    """Make this rank's keys and values readable.

    "replay": every read sends them round the ring. "gathered": they go round once, here, and are kept, so later reads
    send nothing; what that costs in memory grows with the number of reads (`memory.gathered_extra_bytes`,
    `pick_trunk_mode`). Both are exact.
    """
    if mode not in ("replay", "gathered"):
        raise ValueError(f"mode={mode!r} must be 'replay' or 'gathered'; ask pick_trunk_mode")
    check_axis(spec)
    axes = varying_axes(k, v, rank_of(spec.axis))
    shared: Any = _share(spec, mode, jnp.stack([cast(k, axes), cast(v, axes)]))
    slots, carrier = shared
    return Trunk(slots, carrier)


def branch_attention(
    q: Float[Array, "R G n N H"],
    trunk: Trunk,
    seen: KeyRange,
    branch: Branch | None = None,
    sinks: Float[Array, " N"] | None = None,
    *,
    rule: Rule = "all",
    spec: RingSpec,
) -> tuple[Float[Array, "R G n N H"], Float[Array, "R G n N"]]:
    """Attention over trunk and branch: `out` in the dtype of q and `lse` float32.

    A query that sees nothing at all has out 0 and lse -inf. Sinks may be the same on all ranks: their gradient is then
    summed over ranks.

    Args:
        q: queries, rotated.
        trunk: `share_trunk`.
        seen: places of the trunk that each query sees, [R, G, n] each (`causal_range`, `anchor_range`).
        branch: keys of its own branch (`diagonal_branch`; block drafts give theirs as they are), or None.
        sinks: a score of each head that takes weight and gives nothing, or None.
        rule: which keys of its branch a query sees.
        spec: how the ring runs.
    """
    check_axis(spec)
    leaves, tree = jax.tree.flatten((q, trunk, seen, branch, sinks))
    axes = varying_axes(rank_of(spec.axis), *leaves)
    # Cast here, outside of the custom derivative: the transpose of the cast is the sum over ranks.
    q, trunk, seen, branch, sinks = jax.tree.unflatten(tree, [cast(x, axes) for x in leaves])
    return _attend(spec, rule, q, trunk, seen, branch, sinks)


def ring_attention(
    q: Float[Array, "R L N H"],
    k: Float[Array, "R L K H"],
    v: Float[Array, "R L K H"],
    seen: KeyRange,
    sinks: Float[Array, " N"] | None = None,
    *,
    spec: RingSpec,
) -> tuple[Float[Array, "R L N H"], Float[Array, "R L N"]]:
    """Attention over the trunk alone: the policy's. `seen` is [R, L] each."""
    seen = KeyRange(seen.first[:, :, None], seen.last[:, :, None])
    out, lse = branch_attention(q[:, :, None], share_trunk(k, v, spec), seen, None, sinks, spec=spec)
    return out[:, :, 0], lse[:, :, 0]


def sharded_ring_attention(
    mesh: Mesh, spec: RingSpec, *, batch_axis: str | None = None, window: int | None = None
) -> Callable[..., Float[Array, "R N h H"]]:
    """`ring_attention` as one shard_map, for code that runs in plain jit: the policy's attention of packed rows.

    For models that are not ours and do not know `PackedRows`: training here is one shard_map around all of it, and does
    not call this.

    The function returned takes (q, k, v, segment_ids, positions) or, for a policy with sinks, those and the sinks; all
    arrays whole and in the order of the ranks (`to_ranks`). Rows are split over `batch_axis` if there is one.
    """
    tokens = PartitionSpec(batch_axis, spec.axis)

    def local(q: Array, k: Array, v: Array, segment_ids: Array, positions: Array, *sinks: Array) -> Array:
        seen = causal_range(segment_ids, positions, local_index(spec.layout, spec.axis), window=window)
        return ring_attention(q, k, v, seen, *sinks, spec=spec)[0]

    def attend(q: Array, k: Array, v: Array, segment_ids: Array, positions: Array, *sinks: Array) -> Array:
        specs = (tokens,) * 5 + (PartitionSpec(),) * len(sinks)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=True)
        return mapped(q, k, v, segment_ids, positions, *sinks)

    return attend


def diagonal_branch(
    keys: Sequence[Float[Array, "R L K H"]], values: Sequence[Float[Array, "R L K H"]], live: Bool[Array, "R L"]
) -> Branch | None:
    """Keys of EAGLE-3 passes 1..k, each seen only from its own index; None in pass 0, which has none."""
    return Branch(jnp.stack(keys, axis=2), jnp.stack(values, axis=2), live) if keys else None


def save_ring_policy() -> Callable[..., bool]:
    """Policy for `jax.checkpoint`: keep out and lse of this op, so that making the rest again does not send the ring.

    Of a gathered trunk its slots are kept too, C times the keys of a rank (2 C R L d b bytes a trunk, kept until its
    backward is done); a replayed trunk's keys are not, they are made again. jax.checkpoint without a policy keeps
    nothing, which asks for the forward ring, or the gathering, to be run again.
    """
    return jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _share(spec: RingSpec, mode: TrunkMode, own: Array) -> tuple[Array, Array]:
    return _share_fwd(spec, mode, own)[0]


def _share_fwd(spec: RingSpec, mode: TrunkMode, own: Array) -> tuple[tuple[Array, Array], Array]:
    # The name must stand here: a call of `_share` would hide it from `save_ring_policy`.
    slots = checkpoint_name(gather_ring(own, spec), SAVED_NAMES[2]) if mode == "gathered" else own[None]
    dtype = statistics_dtype(own.dtype)
    return (slots, fresh(slots.shape, 0.0, dtype, varying_axes(slots))), own[:0]


def _share_bwd(spec: RingSpec, mode: TrunkMode, like: Array, cotangents: tuple[Array, Array]) -> tuple[Array]:
    # The slots are only read by `_attend`, which gives them no cotangent; all of it is in the carrier's.
    of_slots = cotangents[1]
    own = send_home(of_slots, spec) if mode == "gathered" else of_slots[0]
    return (own.astype(like.dtype),)


_share.defvjp(_share_fwd, _share_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    spec: RingSpec, rule: Rule, q: Array, trunk: Trunk, seen: KeyRange, branch: Branch | None, sinks: Array | None
) -> tuple[Array, Array]:
    return _attend_fwd(spec, rule, q, trunk, seen, branch, sinks)[0]


def _attend_fwd(
    spec: RingSpec, rule: Rule, q: Array, trunk: Trunk, seen: KeyRange, branch: Branch | None, sinks: Array | None
) -> tuple[tuple[Array, Array], tuple]:
    rows, groups, count, heads, width = q.shape
    flat = KeyRange(*(x.reshape(rows, groups * count) for x in seen))
    partial = ring_forward(q.reshape(rows, groups * count, heads, width), trunk.slots, flat, spec)
    partial = Partial(partial.out.reshape(q.shape), partial.lse.reshape(q.shape[:-1]))
    out, lse = partial.out.astype(q.dtype), partial.lse
    if branch is not None or sinks is not None:
        out, lse = local_attention(
            q, partial, branch, sinks, scale=spec.scale, rule=rule, implementation=spec.of_branches
        )
    out, lse = checkpoint_name(out, SAVED_NAMES[0]), checkpoint_name(lse, SAVED_NAMES[1])
    return (out, lse), (q, trunk.slots, flat, branch, sinks, out, lse)


def _attend_bwd(spec: RingSpec, rule: Rule, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    q, slots, flat, branch, sinks, out, lse = residuals
    d_out, d_lse = cotangents
    stat = lse.dtype
    # A query without keys has a constant lse: whatever cotangent it is given goes nowhere.
    d_lse = jnp.where(jnp.isneginf(lse), 0.0, d_lse)
    delta = jnp.sum(d_out.astype(stat) * out.astype(stat), axis=-1) - d_lse
    rows, queries = flat.first.shape
    flatten = lambda x: x.reshape(rows, queries, *x.shape[3:])  # noqa: E731
    dq, d_slots = ring_backward(flatten(q), slots, flat, flatten(lse), flatten(delta), flatten(d_out), spec)
    dq, d_branch, d_sinks = dq.reshape(q.shape), None, None
    if branch is not None or sinks is not None:
        local = branch_attention_backward(
            q, branch, sinks, lse, delta, d_out, scale=spec.scale, rule=rule, implementation=spec.of_branches
        )
        dq = dq + local.q
        d_sinks = None if sinks is None or local.sinks is None else local.sinks.astype(sinks.dtype)
        if branch is not None:
            assert local.keys is not None and local.values is not None
            d_keys, d_values = local.keys.astype(branch.keys.dtype), local.values.astype(branch.values.dtype)
            d_branch = Branch(d_keys, d_values, None)  # pyright: ignore[reportArgumentType]
    return dq.astype(q.dtype), Trunk(None, d_slots), None, d_branch, d_sinks  # pyright: ignore[reportArgumentType]


_attend.defvjp(_attend_fwd, _attend_bwd)
