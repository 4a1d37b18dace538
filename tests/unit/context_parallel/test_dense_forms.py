"""On one rank, without shard_map: the op equals the dense attention of decoding, value and gradients.

Padding is left out: there the dense forms give a mean of whatever lies in padding, the op gives 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import (
    Branch,
    KeyRange,
    RingSpec,
    Zigzag,
    anchor_range,
    branch_attention,
    causal_range,
    diagonal_branch,
    ring_attention,
    sharded_ring_attention,
    share_trunk,
)
from draftco_jax.drafts.blocks.body import cached_attention
from draftco_jax.models.attention import attend, packed_causal_mask
from draftco_jax.models.kv_cache import LayerCache

ROWS, TOKENS, HEADS, KV_HEADS, WIDTH = 2, 16, 4, 2, 8
SPEC = RingSpec(layout=Zigzag(ranks=1, tokens=TOKENS), axis=None, scale=WIDTH**-0.5, tile=8)
SEGMENTS = jnp.asarray([[1] * 5 + [2] * 2 + [3] * 6 + [0] * 3, [1] * 15 + [2]], jnp.int32)
POSITIONS = jnp.asarray([[*range(5), *range(2), *range(6), 0, 0, 0], [*range(15), 0]], jnp.int32)
# Two float32 programs with sums in another order: some roundings of the largest entry each.
CLOSE = 2e-6


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def same(ours, theirs, args, weights):
    """Outputs where `weights` is not 0, and gradients of their weighted sum."""

    def both(function):
        def loss(*args):
            out = function(*args)
            return jnp.sum(out * weights), out

        return jax.jit(jax.grad(loss, argnums=tuple(range(len(args))), has_aux=True))(*args)

    (got, out), (wanted, reference) = both(ours), both(theirs)
    used = weights != 0
    for a, b in zip(
        [jnp.where(used, out, 0.0), *jax.tree.leaves(got)],
        [jnp.where(used, reference, 0.0), *jax.tree.leaves(wanted)],
        strict=True,
    ):
        assert float(jnp.max(jnp.abs(a - b))) <= CLOSE * float(jnp.max(jnp.abs(b)))


def seen_of_rows():
    return causal_range(SEGMENTS, POSITIONS, SPEC.layout.index(0))


def weights_of_rows():
    return normal(9, ROWS, TOKENS, HEADS, WIDTH) * (SEGMENTS > 0).astype(jnp.float32)[:, :, None, None]


@pytest.fixture
def qkv():
    shapes = ((ROWS, TOKENS, HEADS, WIDTH), (ROWS, TOKENS, KV_HEADS, WIDTH), (ROWS, TOKENS, KV_HEADS, WIDTH))
    return tuple(normal(seed, *shape) for seed, shape in enumerate(shapes))


def test_policy_attention(qkv):
    def dense(q, k, v):
        return attend(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), packed_causal_mask(SEGMENTS))

    ours = lambda q, k, v: ring_attention(q, k, v, seen_of_rows(), spec=SPEC)[0]  # noqa: E731
    same(ours, dense, qkv, weights_of_rows())


def test_policy_attention_as_one_shard_map_of_one_device(qkv):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "context"))
    spec = RingSpec(layout=SPEC.layout, axis="context", scale=SPEC.scale, tile=8)
    mapped = sharded_ring_attention(mesh, spec, batch_axis="data")
    ours = lambda q, k, v: mapped(q, k, v, SEGMENTS, POSITIONS)  # noqa: E731
    alone = lambda q, k, v: ring_attention(q, k, v, seen_of_rows(), spec=SPEC)[0]  # noqa: E731
    same(ours, alone, qkv, weights_of_rows())


@pytest.mark.parametrize("passes", [1, 3])
def test_eagle3_passes(qkv, passes):
    q, k, v = qkv
    later = tuple(normal(20 + i, ROWS, TOKENS, KV_HEADS, WIDTH) for i in range(2 * (passes - 1)))

    def ours(q, k, v, *later):
        seen = KeyRange(*(x[:, :, None] for x in seen_of_rows()))
        branch = diagonal_branch(later[::2], later[1::2], SEGMENTS > 0)
        return branch_attention(q[:, :, None], share_trunk(k, v, SPEC), seen, branch, spec=SPEC)[0][:, :, 0]

    def dense(q, k, v, *later):
        """All keys side by side; of a later pass each query sees the one at its own index."""
        own = jnp.broadcast_to(jnp.eye(TOKENS, dtype=bool)[None], (ROWS, TOKENS, TOKENS))
        mask = jnp.concatenate([packed_causal_mask(SEGMENTS), *[own] * (passes - 1)], axis=-1)
        keys, values = (jnp.concatenate(x, axis=1) for x in ([k, *later[::2]], [v, *later[1::2]]))
        return attend(q, jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2), mask)

    same(ours, dense, (q, k, v, *later), weights_of_rows())


@pytest.mark.parametrize(("rule", "window"), [("all", None), ("causal", None), ("causal", 4)])
def test_blocks(qkv, rule, window):
    """Rows 5: one block runs past the end of its document, one past the end of the row, one has no context at all."""
    _, k, v = qkv
    rows = 5
    anchors = jnp.asarray([[0, 4, 9], [3, 14, 15]], jnp.int32)
    live = jnp.asarray([[True, True, True], [True, True, False]])
    starts = jnp.asarray([[0, 0, 7], [0, 0, 15]], jnp.int32)
    q = normal(30, ROWS, 3, rows, HEADS, WIDTH)
    bk, bv = normal(31, ROWS, 3, rows, KV_HEADS, WIDTH), normal(32, ROWS, 3, rows, KV_HEADS, WIDTH)
    index = jnp.arange(TOKENS, dtype=jnp.int32)[None, None, None, :]
    trunk_mask = (index < anchors[:, :, None, None]) & (index >= starts[:, :, None, None])
    if window is not None:
        row = anchors[:, :, None] + jnp.arange(rows, dtype=jnp.int32)[None, None, :]
        trunk_mask = trunk_mask & (index > (row - window)[..., None])
    inside = jnp.ones((rows, rows), bool)
    block_mask = jnp.tril(inside) if rule == "causal" else inside

    def ours(q, k, v, bk, bv):
        seen = anchor_range(anchors, starts, live, rows=rows, window=window)
        return branch_attention(q, share_trunk(k, v, SPEC), seen, Branch(bk, bv, live), rule=rule, spec=SPEC)[0]

    def dense(q, k, v, bk, bv):
        trunk = LayerCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        return cached_attention(trunk, trunk_mask, block_mask, q, bk, bv)

    weights = normal(33, *q.shape) * live.astype(jnp.float32)[:, :, None, None, None]
    same(ours, dense, (q, k, v, bk, bv), weights)


def test_refusals():
    with pytest.raises(ValueError, match="axis=None must go with ranks=1, not 2"):
        RingSpec(layout=Zigzag(ranks=2, tokens=TOKENS), axis=None, scale=1.0)
    with pytest.raises(ValueError, match="unroll=0 must be >= 1"):
        RingSpec(layout=SPEC.layout, axis=None, scale=1.0, unroll=0)
