"""Known ways to lose precision in a blockwise attention, each beside the wrong form, which must fail the same check.

Numbers of the wrong forms are measured here and not remembered: a check that both forms pass would show nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import (
    IMPLEMENTATIONS,
    KeyRange,
    Partial,
    block_attention,
    block_attention_backward,
    empty_partial,
    merge,
    reference,
)
from pallas_kernels.branch_attention import Branch, branch_attention, branch_attention_backward

# "pallas" needs a GPU; its kernels run here as "pallas_interpret".
NAMES = sorted(set(IMPLEMENTATIONS) - {"pallas"})
SCALE, HEADS, WIDTH, QUERIES = 0.25, 2, 16, 16
BFLOAT16 = 2.0**-9  # half a step: the error of one rounding, relative


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def everything(queries=QUERIES):
    return KeyRange(jnp.zeros((1, queries), jnp.int32), jnp.full((1, queries), 2**31 - 2, jnp.int32))


def blocks_of(x, count):
    """[1, T, ...] -> [count, 1, T / count, ...]."""
    return jnp.moveaxis(x.reshape(1, count, -1, *x.shape[2:]), 1, 0)


def ring_of(count, q, k, v, d_out, change=lambda part: part, add=lambda total, part: total + part):
    """A ring in one process: blocks merged one after another, the merged lse replayed. `change`: what a fault does."""
    index = jnp.arange(k.shape[1] // count, dtype=jnp.int32)
    options = {"scale": SCALE, "implementation": "blockwise", "tile": 512}

    @jax.jit
    def run(q, k, v, d_out):
        pairs = blocks_of(k, count), blocks_of(v, count)

        def forward(so_far, kv):
            part = change(block_attention(q, *kv, everything(), index, **options))
            return change(merge(so_far, part)), None

        whole, _ = jax.lax.scan(forward, empty_partial(q.shape, jnp.float32, frozenset()), pairs)
        delta = jnp.sum(d_out.astype(jnp.float32) * whole.out, axis=-1)

        def backward(dq, kv):
            grads = block_attention_backward(q, *kv, everything(), index, whole.lse, delta, d_out, **options)
            return add(dq, grads.q), (grads.k, grads.v)

        dq, kv = jax.lax.scan(backward, jnp.zeros_like(whole.out), pairs)
        dk, dv = (jnp.moveaxis(x, 0, 1).reshape(k.shape) for x in kv)
        return {"out": whole.out, "dq": dq, "dk": dk, "dv": dv}

    return run(q, k, v, d_out)


def worst(dense, got, q, k, v, d_out):
    mask = np.ones((q.shape[1], k.shape[1]), bool)
    ref = dense.dense_attention(q[0], k[0], v[0], mask, scale=SCALE, d_out=d_out[0])
    return {name: dense.relative(got[name][0], getattr(ref, name)) for name in got}


def arrays(dtype=jnp.float32, keys=512):
    shapes = ((1, QUERIES, HEADS, WIDTH), (1, keys, 1, WIDTH), (1, keys, 1, WIDTH), (1, QUERIES, HEADS, WIDTH))
    return tuple(normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes))


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


FAULTS = {
    "partial results": lambda part: Partial(rounded(part.out), part.lse),
    "lse": lambda part: Partial(part.out, rounded(part.lse)),
}


def test_trap_partial_results_and_lse_stay_float32_over_many_blocks(dense):
    """The same keys in 2 and in 32 blocks: 32 lose no more than 4 times as much, and nothing near a bfloat16 step."""
    given = arrays()
    few, many = (worst(dense, ring_of(count, *given), *given) for count in (2, 32))
    for name in few:
        assert many[name] < 2e-6 and many[name] <= 4 * max(few[name], 2e-7), (name, few, many)


@pytest.mark.parametrize("fault", FAULTS)
def test_trap_the_same_in_bfloat16_is_seen(dense, fault):
    given = arrays()
    found = worst(dense, ring_of(32, *given, change=FAULTS[fault]), *given)
    assert found["out"] > 2 * BFLOAT16, found


def test_trap_gradients_are_added_in_float32_over_many_blocks(dense):
    """bfloat16 inputs: dq of 32 blocks is as good as that of 1. Added in bfloat16 it is several times worse."""
    given = arrays(jnp.bfloat16)
    one, many = (worst(dense, ring_of(count, *given), *given)["dq"] for count in (1, 32))
    low = worst(dense, ring_of(32, *given, add=lambda total, part: rounded(total + part)), *given)["dq"]
    assert many <= 2 * one and low > 2 * many, (one, many, low)


@pytest.mark.parametrize("name", NAMES)
def test_trap_a_block_replayed_with_its_own_lse_has_the_right_dv_and_nothing_else(dense, name):
    """Own (out, lse) of each block and a weighted cotangent: dv is exact, so a check of dv alone would pass."""
    q, k, v, d_out = arrays(keys=64)
    index = jnp.arange(32, dtype=jnp.int32)
    options = {"scale": SCALE, "implementation": name}

    @jax.jit
    def replay():
        pairs = list(zip(blocks_of(k, 2), blocks_of(v, 2), strict=True))
        parts = [block_attention(q, *kv, everything(), index, **options) for kv in pairs]
        whole = merge(*parts)
        right, wrong = [], []
        delta = jnp.sum(d_out * whole.out, axis=-1)
        for kv, part in zip(pairs, parts, strict=True):
            right.append(block_attention_backward(q, *kv, everything(), index, whole.lse, delta, d_out, **options))
            weighted = d_out * jnp.exp(part.lse - whole.lse)[..., None]
            own = jnp.sum(weighted * part.out, axis=-1)
            wrong.append(block_attention_backward(q, *kv, everything(), index, part.lse, own, weighted, **options))
        joined = lambda g: {  # noqa: E731
            "dq": g[0].q + g[1].q,
            "dk": jnp.concatenate([g[0].k, g[1].k], axis=1),
            "dv": jnp.concatenate([g[0].v, g[1].v], axis=1),
        }
        return joined(right), joined(wrong)

    right, wrong = (worst(dense, got, q, k, v, d_out) for got in replay())
    assert max(right.values()) < 1e-6, right
    assert wrong["dv"] < 1e-6 and min(wrong["dq"], wrong["dk"]) > 0.1, wrong


def sigmoid_merge(a, b):
    """The merge of several rings: b into the running a."""
    share = jax.nn.sigmoid(b.lse - a.lse)[..., None]
    return Partial(a.out - share * (a.out - b.out), a.lse - jax.nn.log_sigmoid(a.lse - b.lse))


def test_trap_the_sigmoid_merge_is_nan_where_the_running_side_is_empty():
    """Ours takes either side empty, or both, and is the same both ways."""
    empty = Partial(jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), -jnp.inf))
    live = Partial(normal(0, 1, 2, 1, 4), jnp.asarray([[[3.0], [-90.0]]]))
    for merged in (merge(empty, live), merge(live, empty)):
        np.testing.assert_array_equal(merged.out, live.out)
        np.testing.assert_array_equal(merged.lse, live.lse)
    both = merge(empty, empty)
    assert np.all(np.isneginf(both.lse)) and not np.any(both.out)
    wrong = sigmoid_merge(empty, live)
    assert np.any(np.isnan(wrong.lse)), "the other form is no trap any more"
    np.testing.assert_allclose(sigmoid_merge(live, empty).out, live.out)


@pytest.mark.parametrize("value", [None, -1e30, float(jnp.finfo(jnp.float32).min)])
def test_trap_a_finite_mask_value_gives_a_row_without_keys_the_mean_of_all(monkeypatch, value):
    """A row that sees nothing is 0 with lse -inf, so merging it changes nothing. With a finite mask it is a mean."""
    if value is not None:
        original = reference._scores
        masked = lambda *args: jnp.maximum(original(*args), jnp.float32(value))  # noqa: E731
        monkeypatch.setattr(reference, "_scores", masked)
    q, k, v, _ = arrays(keys=16)
    none = KeyRange(jnp.ones((1, QUERIES), jnp.int32), jnp.zeros((1, QUERIES), jnp.int32))
    part = block_attention(
        q, k, v, none, jnp.arange(16, dtype=jnp.int32), scale=SCALE, implementation="blockwise", tile=16
    )
    nothing = bool(np.all(np.isneginf(part.lse)) and not np.any(part.out))
    assert nothing == (value is None)
    if value is not None:
        mean = jnp.broadcast_to(jnp.mean(v[0], axis=0)[None], part.out[0].shape)
        np.testing.assert_allclose(part.out[0], mean, atol=1e-6)


def coarse(x):
    """In steps of an eighth, so that scores of these are exact and only the lse is rounded."""
    return jnp.round(x * 8) / 8


@pytest.mark.parametrize("name", NAMES)
def test_report_13_trap_masked_scores_far_above_the_lse_are_not_exponentiated(dense, name):
    """lse near -110, a tile of keys that is not full and unseen keys of score +110: exp(0 + 110) overflows float32."""
    q, k, v, d_out = arrays(keys=24)
    q, k = (
        coarse(q).at[..., 0].set(110 / SCALE),
        coarse(k).at[..., 0].set(jnp.where(jnp.arange(24) < 8, -1.0, 1.0)[None, :, None]),
    )
    index = jnp.arange(24, dtype=jnp.int32)
    seen = KeyRange(jnp.zeros((1, QUERIES), jnp.int32), jnp.full((1, QUERIES), 7, jnp.int32))
    options = {"scale": SCALE, "implementation": name}

    @jax.jit
    def both():
        part = block_attention(q, k, v, seen, index, **options)
        delta = jnp.sum(d_out * part.out, axis=-1)
        return part, block_attention_backward(q, k, v, seen, index, part.lse, delta, d_out, **options)

    part, grads = both()
    assert float(part.lse.max()) < -88.7, "exp(0 - lse) must overflow"
    mask = np.broadcast_to(np.arange(24) < 8, (QUERIES, 24))
    ref = dense.dense_attention(q[0], k[0], v[0], mask, scale=SCALE, d_out=d_out[0])
    pairs = ((part.out, ref.out), (part.lse, ref.lse), (grads.q, ref.dq), (grads.k, ref.dk), (grads.v, ref.dv))
    # The lse, 110, is rounded to half of 8e-6, and so is p.
    assert max(dense.relative(got[0], wanted) for got, wanted in pairs) < 1e-5


@pytest.mark.parametrize("name", ["blockwise", "pallas_interpret"])
def test_report_13_trap_branch_keys_that_are_not_seen_far_above_the_lse(dense, name):
    """Causal rows of one block: row 0 has lse -110 and does not see the keys of score +110 after it."""
    count = 4
    q, bk, bv, d_out = (
        normal(seed, 1, 1, count, heads, WIDTH) for seed, heads in enumerate((HEADS, 1, 1, HEADS), start=5)
    )
    q = coarse(q).at[..., 0].set(110 / SCALE)
    bk = coarse(bk).at[..., 0].set(jnp.asarray([-1.0, -1.0, 1.0, 1.0])[None, None, :, None])
    branch = Branch(bk, bv, jnp.ones((1, 1), bool))
    trunk = Partial(jnp.zeros(q.shape), jnp.full(q.shape[:-1], -jnp.inf))
    options = {"scale": SCALE, "rule": "causal", "implementation": name}

    @jax.jit
    def both():
        out, lse = branch_attention(q, trunk, branch, None, **options)
        delta = jnp.sum(d_out * out, axis=-1)
        return out, lse, branch_attention_backward(q, branch, None, lse, delta, d_out, **options)

    out, lse, grads = both()
    assert float(lse[0, 0, :2].max()) < -88.7, "exp(0 - lse) must overflow"
    mask = np.tril(np.ones((count, count), bool))
    ref = dense.dense_attention(q[0, 0], bk[0, 0], bv[0, 0], mask, scale=SCALE, d_out=d_out[0, 0])
    pairs = ((out, ref.out), (lse, ref.lse), (grads.q, ref.dq), (grads.keys, ref.dk), (grads.values, ref.dv))
    assert max(dense.relative(got[0, 0], wanted) for got, wanted in pairs) < 1e-5


@pytest.mark.parametrize("name", ["blockwise", "pallas_interpret"])
def test_trap_out_is_cast_once_after_the_branch(name):
    """bfloat16: nearly every entry is the float64 result rounded once. Cast before the merge, many are a step off."""
    shape = (1, 32, 1, HEADS, WIDTH)
    q = normal(0, *shape, dtype=jnp.bfloat16)
    keys, values = (normal(seed, 1, 32, 1, 1, WIDTH, dtype=jnp.bfloat16) for seed in (1, 2))
    # The branch has some 1 % of the weight, so what rounding its weights to bfloat16 does is far below a step of out.
    trunk = Partial(normal(3, *shape), jnp.full(shape[:-1], 5.0))
    branch = Branch(keys, values, jnp.ones((1, 32), bool))

    def off(trunk):
        out, _ = branch_attention(q, trunk, branch, None, scale=SCALE, rule="all", implementation=name)
        return np.float32(out)

    f64 = lambda x: np.asarray(x, np.float64)  # noqa: E731
    score = (f64(q) * f64(keys)).sum(-1) * SCALE
    share = 1 / (1 + np.exp(score - 5.0))[..., None]
    exact = np.float32(
        jnp.asarray(f64(trunk.out) * share + f64(values) * (1 - share), jnp.float32).astype(jnp.bfloat16)
    )
    right = np.mean(off(trunk) == exact)
    early = np.mean(off(Partial(rounded(trunk.out), trunk.lse)) == exact)
    assert right > 0.97 and early < 0.8, (right, early)
