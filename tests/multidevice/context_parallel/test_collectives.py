"""What is sent, read from compiled programs: the ring's bytes and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import Branch, KeyRange, RingSpec, TrunkShape, Zigzag, branch_attention, share_trunk
from draftco_jax.context_parallel.memory import backward_ring_bytes, forward_ring_bytes, passes_bytes
from draftco_jax.context_parallel.ring import send_together
from draftco_jax.context_parallel.traffic import collectives, permuted_bytes

AXIS, RANKS, TOKENS, HEADS, KV_HEADS, WIDTH = "context", 8, 128, 4, 2, 8
SHARDED = PartitionSpec(None, AXIS)


def spec_of(ranks=RANKS, unroll=2):
    return RingSpec(layout=Zigzag(ranks=ranks, tokens=TOKENS), axis=AXIS, scale=1.0, tile=16, unroll=unroll)


def trunk_shape(ranks=RANKS, number_bytes=4):
    return TrunkShape(
        ranks=ranks, rows=1, local_tokens=TOKENS // ranks, kv_heads=KV_HEADS, head_dim=WIDTH, number_bytes=number_bytes
    )


def operands(groups, count, keys, dtype=jnp.float32):
    """Shapes of q, k, v, ranges and branch for `groups` branches in all."""
    trunk = jax.ShapeDtypeStruct((1, TOKENS, KV_HEADS, WIDTH), dtype)
    branch = jax.ShapeDtypeStruct((1, groups, keys, KV_HEADS, WIDTH), dtype)
    place = jax.ShapeDtypeStruct((1, groups, count), jnp.int32)
    q = jax.ShapeDtypeStruct((1, groups, count, HEADS, WIDTH), dtype)
    return q, trunk, trunk, place, place, branch, branch, jax.ShapeDtypeStruct((1, groups), bool)


def program(cases, spec, function, args):
    mesh = cases.mesh_of(spec.ranks)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(SHARDED,) * len(args), out_specs=SHARDED, check_vma=True)
    return collectives(jax.jit(mapped).lower(*args).compile().as_text())


def attend(spec, mode="replay"):
    def local(q, k, v, first, last, bk, bv, live):
        trunk = share_trunk(k, v, spec, mode=mode)
        return branch_attention(q, trunk, KeyRange(first, last), Branch(bk, bv, live), spec=spec)

    return local


# EAGLE-3 with 1, 4 and 7 later passes; 64 and 512 anchors of blocks of 4 rows.
BRANCHES = [(TOKENS, 1, 1), (TOKENS, 1, 4), (TOKENS, 1, 7), (64, 4, 4), (512, 4, 4)]


@pytest.mark.parametrize(("groups", "count", "keys"), BRANCHES)
def test_forward_sends_the_keys_once_round_whatever_the_branches(cases, groups, count, keys):
    found = program(cases, spec_of(), attend(spec_of()), operands(groups, count, keys))
    # Every byte is float32 keys and values: no segment ids or positions travel, since ranges are places of the row.
    assert {c.kind for c in found} == {"collective-permute"} and {c.dtype for c in found} == {"f32"}
    assert permuted_bytes(found) == forward_ring_bytes(trunk_shape()) == 2 * 7 * 16 * 16 * 4


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_unrolling_changes_no_byte(cases, unroll):
    found = program(cases, spec_of(unroll=unroll), attend(spec_of(unroll=unroll)), operands(TOKENS, 1, 1))
    assert permuted_bytes(found) == forward_ring_bytes(trunk_shape())


def test_one_rank_sends_nothing(cases):
    assert program(cases, spec_of(1), attend(spec_of(1)), operands(TOKENS, 1, 4)) == []


def pulled(function):
    """Forward and backward in one program, all inputs that have gradients."""

    def local(q, k, v, first, last, bk, bv, live):
        (out, lse), pull = jax.vjp(
            lambda q, k, v, bk, bv: function(q, k, v, first, last, bk, bv, live), q, k, v, bk, bv
        )
        return pull((out, lse))

    return local


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_backward_replays_the_ring_and_brings_float32_gradients_home(cases, ranks):
    spec = spec_of(ranks, unroll=1)
    found = program(cases, spec, pulled(attend(spec)), operands(TOKENS, 1, 4))
    assert {c.kind for c in found} == {"collective-permute"}, "gradients of sharded inputs need no other collective"
    shape = trunk_shape(ranks)
    # XLA may see that the first hop of the backward sends what that of the forward did, and do it once.
    once = forward_ring_bytes(shape) // (ranks - 1)
    whole = forward_ring_bytes(shape) + backward_ring_bytes(shape)
    assert permuted_bytes(found) in (whole, whole - once)


def three_passes(spec, mode):
    """A recurrence as in EAGLE-3: queries of a pass are made from the output of the one before."""

    def local(q, k, v, first, last, bk, bv, live):
        trunk = share_trunk(k, v, spec, mode=mode)
        for _ in range(3):
            q, lse = branch_attention(q, trunk, KeyRange(first, last), Branch(bk, bv, live), spec=spec)
        return q, lse

    return local


@pytest.mark.parametrize("mode", ["replay", "gathered"])
def test_gathered_keys_go_round_once_for_all_passes(cases, mode):
    spec, args = spec_of(unroll=1), operands(TOKENS, 1, 4)
    forward = permuted_bytes(program(cases, spec, three_passes(spec, mode), args))
    assert forward == forward_ring_bytes(trunk_shape()) * (3 if mode == "replay" else 1)


def test_gathered_backward_is_one_ring_of_gradients(cases):
    spec = spec_of(unroll=1)
    found = program(cases, spec, pulled(three_passes(spec, "gathered")), operands(TOKENS, 1, 4))
    assert {c.kind for c in found} == {"collective-permute"}
    assert permuted_bytes(found) == passes_bytes(trunk_shape(), 3, "gathered")


def test_shared_weights_are_summed_over_ranks_and_nothing_else_is(cases):
    """jax 21855: no all-reduce but that of the replicated input's own gradient (here: sinks)."""
    spec = spec_of(unroll=1)

    def local(q, k, v, first, last, bk, bv, live, sinks):
        def loss(sinks):
            trunk = share_trunk(k, v, spec)
            out, _ = branch_attention(q, trunk, KeyRange(first, last), Branch(bk, bv, live), sinks, spec=spec)
            return out

        out, pull = jax.vjp(loss, sinks)
        return pull(out)[0]

    args = (*operands(TOKENS, 1, 1), jax.ShapeDtypeStruct((HEADS,), jnp.float32))
    specs = (SHARDED,) * 8 + (PartitionSpec(),)
    mapped = jax.shard_map(local, mesh=cases.mesh_of(8), in_specs=specs, out_specs=PartitionSpec(), check_vma=True)
    found = collectives(jax.jit(mapped).lower(*args).compile().as_text())
    others = [c for c in found if c.kind != "collective-permute"]
    assert [(c.kind, c.result_bytes) for c in others] == [("all-reduce", 4 * HEADS)]


@pytest.mark.parametrize(
    ("width", "dtype", "permutes"), [(4, jnp.bfloat16, 1), (3, jnp.bfloat16, 2), (3, jnp.float32, 1)]
)
def test_keys_and_their_gradients_travel_in_one_permute_bit_for_bit(cases, compiled_in_full, width, dtype, permutes):
    """Packed also NaN of any payload (XLA on a CPU sends bfloat16 as float32, which changes some, and the quick compile
    makes all of them one); only an odd width of 16-bit numbers cannot be packed."""
    spec = spec_of(4)
    words = np.random.default_rng(0).integers(0, 2**16, (4, 6, width), np.uint16)
    if not compiled_in_full:
        words = np.where((words & 0x7F80) == 0x7F80, words & 0xFF80, words)  # infinities in the place of NaN
    any_bits = dtype == jnp.bfloat16 and permutes == 1
    kv = jnp.asarray(words).view(jnp.bfloat16) if any_bits else jnp.asarray(words, jnp.float32).astype(dtype)
    grads = jnp.asarray(np.random.default_rng(1).normal(size=kv.shape), jnp.float32)
    sharded = PartitionSpec(AXIS)
    mapped = jax.jit(
        jax.shard_map(
            lambda kv, grads: send_together(kv, grads, spec),
            mesh=cases.mesh_of(4),
            in_specs=(sharded, sharded),
            out_specs=sharded,
        )
    )
    for got, sent in zip(mapped(kv, grads), (kv, grads), strict=True):
        bits = f"u{sent.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(got).view(bits), np.roll(np.asarray(sent), 1, axis=0).view(bits))
    found = collectives(mapped.lower(kv, grads).compile().as_text())
    assert len(found) == permutes
    if permutes == 1:
        assert permuted_bytes(found) == 6 * width * (kv.dtype.itemsize + 4)
