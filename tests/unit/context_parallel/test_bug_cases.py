"""Reported faults of packed attention that one device shows: leaks, rows without keys, halves of documents, indices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import (
    Branch,
    KeyRange,
    PackedRows,
    RingSpec,
    Zigzag,
    branch_attention,
    causal_range,
    share_trunk,
)
from pallas_kernels.block_attention import IMPLEMENTATIONS, block_attention, block_attention_backward

# "pallas" needs a GPU; its kernels run here as "pallas_interpret".
NAMES = sorted(set(IMPLEMENTATIONS) - {"pallas"})
TOKENS, HEADS, KV_HEADS, WIDTH, SCALE = 24, 4, 2, 8, 0.4
SEGMENTS = np.array([[1] * 9 + [2] + [3] * 11 + [0] * 3], np.int32)
POSITIONS = np.array([[*range(9), 0, *range(11), 0, 0, 0]], np.int32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("segments_count", [True, False])
def test_report_10_bug_case_b51_every_implementation_keeps_documents_apart(name, segments_count):
    """Other numbers in document 3 change no bit of documents 1 and 2. Without segment ids they would: shown too."""
    ids = SEGMENTS if segments_count else np.where(SEGMENTS > 0, 1, 0).astype(np.int32)
    positions = POSITIONS if segments_count else np.arange(TOKENS, dtype=np.int32)[None]
    index = jnp.arange(TOKENS, dtype=jnp.int32)
    seen = causal_range(jnp.asarray(ids), jnp.asarray(positions), index)
    options = {"scale": SCALE, "implementation": name}

    @jax.jit
    def run(q, k, v, d_out):
        part = block_attention(q, k, v, seen, index, **options)
        delta = jnp.sum(d_out * part.out, axis=-1)
        return part, block_attention_backward(q, k, v, seen, index, part.lse, delta, d_out, **options)

    def moved(document):
        theirs = jnp.asarray(SEGMENTS == document)[:, :, None, None]
        return [jnp.where(theirs, x * -3.0 + 1.0, x) for x in given]

    given = [normal(seed, 1, TOKENS, heads, WIDTH) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))]
    before = run(*given)
    for document in (1, 3):
        others = (SEGMENTS != document)[0]
        after = run(*moved(document))
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        same = [np.array_equal(a[0, others], b[0, others]) for a, b in pairs]
        assert all(same) == segments_count, (document, same)
        assert not np.array_equal(before[0].out, after[0].out)


def naive_attention(q, k, v, seen):
    """Softmax with -inf masks, left to automatic differentiation."""
    scores = jnp.einsum("rtnh,rsnh->rtns", q, k) * SCALE
    place = jnp.arange(k.shape[1])[None, None, :]
    visible = (place >= seen.first[:, :, None]) & (place <= seen.last[:, :, None])
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("rtns,rsnh->rtnh", jnp.exp(scores - lse[..., None]), v), lse


def test_trap_rows_without_keys_have_no_gradient_and_not_nan():
    """Empty trunk, empty branch, both, neither; cotangents everywhere, of out and of lse."""
    count = 4
    spec = RingSpec(layout=Zigzag(ranks=1, tokens=count), axis=None, scale=SCALE)
    q, k, v = (normal(seed, 1, count, KV_HEADS, WIDTH) for seed in range(3))
    bk, bv = (normal(seed, 1, count, 2, KV_HEADS, WIDTH) for seed in (3, 4))
    d_out, d_lse = normal(5, 1, count, 1, KV_HEADS, WIDTH), normal(6, 1, count, 1, KV_HEADS)
    sees_trunk, live = jnp.asarray([[False, True, False, True]]), jnp.asarray([[True, False, False, True]])
    last = jnp.arange(count, dtype=jnp.int32)[None]
    seen = KeyRange(jnp.where(sees_trunk, 0, 1), jnp.where(sees_trunk, last, 0))

    @jax.jit
    def solve(q, k, v, bk, bv):
        def attend(q, k, v, bk, bv):
            wide = KeyRange(*(x[:, :, None] for x in seen))
            return branch_attention(q[:, :, None], share_trunk(k, v, spec), wide, Branch(bk, bv, live), spec=spec)

        (out, lse), pull = jax.vjp(attend, q, k, v, bk, bv)
        return out, lse, pull((d_out, d_lse))

    out, lse, grads = solve(q, k, v, bk, bv)
    assert np.isneginf(lse)[0].all(axis=(1, 2)).tolist() == [False, False, True, False]
    assert not np.any(out[0, 2]) and all(np.any(out[0, t]) for t in (0, 1, 3))
    assert all(np.isfinite(g).all() for g in grads)
    dq, dk, dv, dbk, dbv = grads
    assert np.any(dq != 0, axis=(2, 3))[0].tolist() == [True, True, False, True]
    # Tokens 1 and 3 see the trunk up to themselves, so every key of it is seen.
    assert np.any(dk[0], axis=(1, 2)).all() and np.any(dv[0], axis=(1, 2)).all()
    for g in (dbk, dbv):
        assert np.any(g != 0, axis=(2, 3, 4))[0].tolist() == [True, False, False, True]
    # The same empty rows in a softmax that is differentiated through its mask.
    (out, lse), pull = jax.vjp(lambda *x: naive_attention(*x, seen), q, k, v)
    wrong = pull((jnp.zeros_like(out), jnp.zeros_like(lse)))
    assert np.isnan(wrong[2]).any(), "no trap any more"


def test_bug_case_b50_halves_of_documents_need_no_offsets():
    """Documents of 4, 6 and 2 tokens on two ranks: what a rank's tokens see of every rank's, put together, is the mask.

    The middle of a document is nobody's business here, so an odd length cannot be halved wrongly.
    """
    for lengths in ((4, 6, 2), (3, 7, 1)):
        segments = np.repeat(np.arange(1, 4), lengths)
        segments = np.pad(segments, (0, 12 - segments.size)).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(12 - sum(lengths), int)])
        layout, wanted = Zigzag(ranks=2, tokens=12), np.zeros((12, 12), bool)
        found = np.zeros((12, 12), bool)
        for t in range(12):
            wanted[t, : t + 1] = (segments[: t + 1] == segments[t]) & (segments[t] > 0)
        for rank in range(2):
            held = np.asarray(layout.index(rank))
            seen = causal_range(
                jnp.asarray(segments[held][None]), jnp.asarray(positions[held][None], jnp.int32), layout.index(rank)
            )
            first, last = (np.asarray(x)[0][:, None] for x in seen)
            for other in range(2):
                keys = np.asarray(layout.index(other))
                found[np.ix_(held, keys)] = (keys[None] >= first) & (keys[None] <= last)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("packed", [PackedRows(), PackedRows(ranks=4, context_axis="context")])
def test_bug_case_b54_no_look_ahead_leaves_its_array(packed):
    """The furthest token that any local token of any rank may look at is the last of what it was given."""
    local_tokens, reach = 8, 3
    layout = packed.layout(local_tokens)
    size = layout.pieces * (layout.piece + reach)
    places = np.asarray(packed.places(jnp.arange(local_tokens, dtype=jnp.int32), reach, local_tokens))
    assert places.min() == 0 and places.max() + reach == size - 1
    # Token j after one stands j places after it, also at the end of a piece.
    index = np.concatenate(
        [np.arange(start, start + layout.piece + reach) for start in np.asarray(layout.index(0))[:: layout.piece]]
    )
    for j in range(reach + 1):
        np.testing.assert_array_equal(index[places + j], np.asarray(layout.index(0)) + j)
    with pytest.raises(ValueError, match="steps=4 must be in 0..3"):
        packed.shifted(jnp.zeros((1, layout.pieces, layout.piece + reach)), 4, local_tokens)
