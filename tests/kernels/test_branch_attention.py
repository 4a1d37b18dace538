"""Contract of the branch op: branch keys, a sink and a given trunk in one softmax, with gradients."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import Partial
from pallas_kernels.branch_attention import (
    Branch,
    branch_attention,
    branch_attention_backward,
)
from pallas_kernels.branch_attention.tuning import Launch, Tuning

# Those that run on a CPU: "pallas" is "pallas_interpret" compiled. The kernels in Triton's language are interpreted in
# a process of their own, which test_branch_triton.py starts.
NAMES = ["jax_triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["blockwise", "pallas_interpret"]
ROUNDING, BF16 = 1e-6, 1e-2  # as for the block op
ROWS, GROUPS, HEADS, WIDTH, TRUNK, SCALE = 2, 3, 4, 8, 5, 0.4
# (queries, keys, rule): EAGLE-3 of 1, 4 and 7 later passes, a DFlash block, a causal block. With two query heads of a
# key-value head, 9 queries are 18 rows, which the kernels treat as a block (tuning.Dims.route), 5 are few.
SHAPES = [(1, 1, "all"), (1, 4, "all"), (1, 7, "all"), (5, 5, "all"), (5, 5, "causal"), (9, 9, "all"), (9, 9, "causal")]


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def inside(count, keys, rule):
    return np.tril(np.ones((count, keys), bool)) if rule == "causal" else np.ones((count, keys), bool)


class Case:
    """A trunk of TRUNK keys that some queries do not see, and branches of which one is not live."""

    def __init__(self, count, keys, rule, *, kv_heads=2, sinks=True, dtype=jnp.float32):
        rng = np.random.default_rng(count + keys)
        self.rule = rule
        self.q = normal(rng, ROWS, GROUPS, count, HEADS, WIDTH, dtype=dtype)
        self.d_out = normal(rng, *self.q.shape, dtype=dtype)
        self.trunk_kv = normal(rng, 2, TRUNK, kv_heads, WIDTH, dtype=dtype)
        live = np.ones((ROWS, GROUPS), bool)
        live[1, 0] = False
        branch_kv = normal(rng, 2, ROWS, GROUPS, keys, kv_heads, WIDTH, dtype=dtype)
        self.branch = Branch(branch_kv[0], branch_kv[1], jnp.asarray(live))
        self.sinks = normal(rng, HEADS) if sinks else None
        self.sees_trunk = np.ones((ROWS, GROUPS, count), bool)
        self.sees_trunk[0, 1] = False  # an empty trunk with live branch keys
        self.sees_trunk[1, 0, :1] = False  # neither

    def dense(self, dense):
        """Reference of all queries at once: keys are the trunk and all branches, each seen by its own only."""
        count, keys = self.q.shape[2], self.branch.keys.shape[2]
        flat = lambda x: np.asarray(x, np.float64).reshape(-1, *x.shape[3:])  # noqa: E731
        k = np.concatenate([np.float64(self.trunk_kv[0]), flat(self.branch.keys)])
        v = np.concatenate([np.float64(self.trunk_kv[1]), flat(self.branch.values)])
        branches = ROWS * GROUPS
        own = np.kron(np.eye(branches, dtype=bool), inside(count, keys, self.rule))
        own &= np.repeat(np.asarray(self.branch.live).reshape(-1), count)[:, None]
        mask = np.concatenate([np.repeat(self.sees_trunk.reshape(-1, 1), TRUNK, axis=1), own], axis=1)
        return dense.dense_attention(flat(self.q), k, v, mask, scale=SCALE, d_out=flat(self.d_out), sinks=self.sinks)

    def trunk(self, dense):
        flat = lambda x: np.asarray(x, np.float64).reshape(-1, *x.shape[3:])  # noqa: E731
        mask = np.repeat(self.sees_trunk.reshape(-1, 1), TRUNK, axis=1)
        part = dense.dense_attention(
            flat(self.q), self.trunk_kv[0], self.trunk_kv[1], mask, scale=SCALE, d_out=flat(self.d_out)
        )
        shape = self.q.shape
        return Partial(
            jnp.asarray(part.out.reshape(shape), jnp.float32), jnp.asarray(part.lse.reshape(shape[:-1]), jnp.float32)
        )


def check(dense, case, name, tolerance, tuning=None):
    options = {"scale": SCALE, "rule": case.rule, "implementation": name, "tuning": tuning}

    @jax.jit
    def run(q, trunk, branch, sinks, d_out):
        out, lse = branch_attention(q, trunk, branch, sinks, **options)
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        return out, lse, branch_attention_backward(q, branch, sinks, lse, delta, d_out, **options)

    out, lse, grads = run(case.q, case.trunk(dense), case.branch, case.sinks, case.d_out)
    assert out.dtype == case.q.dtype and lse.dtype == jnp.float32
    ref = case.dense(dense)
    flat = lambda x: np.asarray(x, np.float64).reshape(-1, *x.shape[3:])  # noqa: E731
    assert dense.relative(flat(out), ref.out) < tolerance
    assert dense.relative(flat(lse), ref.lse) < ROUNDING  # float32 whatever comes in
    assert dense.relative(flat(grads.keys), ref.dk[TRUNK:]) < tolerance
    assert dense.relative(flat(grads.values), ref.dv[TRUNK:]) < tolerance
    if case.sinks is not None:
        assert dense.relative(grads.sinks, ref.dsinks) < tolerance
    return flat(grads.q), ref


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "keys", "rule"), SHAPES)
def test_equals_the_dense_reference(dense, name, count, keys, rule):
    check(dense, Case(count, keys, rule), name, ROUNDING)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_trunk_the_gradient_of_queries_is_whole(dense, name):
    case = Case(5, 5, "all")
    case.sees_trunk[:] = False
    dq, ref = check(dense, case, name, ROUNDING)
    assert dense.relative(dq, ref.dq) < ROUNDING


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_multi_query_and_multi_head_without_sinks(dense, name, kv_heads):
    """Without a sink the query that sees neither trunk nor branch has nothing at all."""
    case = Case(1, 4, "all", kv_heads=kv_heads, sinks=False)
    _, ref = check(dense, case, name, ROUNDING)
    assert np.isneginf(ref.lse).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [5, 9])
def test_bfloat16_is_rounded_once_at_the_end(dense, name, count):
    case = Case(count, count, "causal", dtype=jnp.bfloat16)
    check(dense, case, name, BF16)
    # Without branch keys the output is the trunk's rounded once, bit for bit.
    trunk = case.trunk(dense)
    out, _ = branch_attention(case.q, trunk, None, None, scale=SCALE, rule="all", implementation=name)
    np.testing.assert_array_equal(np.float32(out), np.float32(trunk.out.astype(jnp.bfloat16)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_a_gap_between_trunk_and_branch_is_exact(name, gap):
    case = Case(1, 4, "all", sinks=False)
    shape = case.q.shape
    trunk = Partial(jnp.ones(shape), jnp.full(shape[:-1], gap))
    out, lse = branch_attention(case.q, trunk, case.branch, None, scale=SCALE, rule="all", implementation=name)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))
    if gap > 0:
        np.testing.assert_array_equal(out, trunk.out)


@pytest.mark.parametrize("name", NAMES)
def test_a_branch_is_seen_by_its_own_queries_only(dense, name):
    """Moving the keys of one branch, or any number in one that is not live, moves nothing else."""
    case = Case(5, 5, "all")
    options = {"scale": SCALE, "rule": "all", "implementation": name}
    before, _ = branch_attention(case.q, case.trunk(dense), case.branch, None, **options)
    moved = case.branch._replace(
        keys=case.branch.keys.at[0, 2].add(1.0).at[1, 0].set(jnp.nan), values=case.branch.values.at[1, 0].set(1e30)
    )
    after, _ = branch_attention(case.q, case.trunk(dense), moved._replace(values=case.branch.values), None, **options)
    same = np.ones((ROWS, GROUPS), bool)
    same[0, 2] = False
    np.testing.assert_array_equal(np.asarray(before)[same], np.asarray(after)[same])
    assert np.any(np.asarray(before)[0, 2] != np.asarray(after)[0, 2])


def test_refusals_say_what_and_why(dense):
    case = Case(1, 4, "all")
    trunk = case.trunk(dense)
    with pytest.raises(ValueError, match="implementation='pallas_tpu' must be one of"):
        branch_attention(case.q, trunk, case.branch, None, scale=1.0, rule="all", implementation="pallas_tpu")
    with pytest.raises(ValueError, match="rule='causal' must have as many keys as queries"):
        branch_attention(case.q, trunk, case.branch, None, scale=1.0, rule="causal", implementation=NAMES[0])
    with pytest.raises(ValueError, match="branch.live="):
        wrong = case.branch._replace(live=case.branch.live[:, :2])
        branch_attention(case.q, trunk, wrong, None, scale=1.0, rule="all", implementation=NAMES[0])
    with pytest.raises(ValueError, match="tuning=.* must be None with implementation='blockwise'"):
        options = {"scale": 1.0, "rule": "all", "implementation": "blockwise"}
        branch_attention(
            case.q, trunk, case.branch, None, tuning=Tuning(forward=Launch(), backward=Launch()), **options
        )
    with pytest.raises(ValueError, match="trunk="):
        branch_attention(
            case.q, Partial(trunk.out, trunk.lse[0]), None, None, scale=1.0, rule="all", implementation="blockwise"
        )
