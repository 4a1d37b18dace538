"""The op inside larger programs: remat, donation, a data axis, jit, leaks between documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from draftco_jax.context_parallel import (
    KeyRange,
    RingSpec,
    Zigzag,
    branch_attention,
    causal_range,
    from_ranks,
    local_index,
    ring_attention,
    save_ring_policy,
    sharded_ring_attention,
    share_trunk,
    to_ranks,
)

AXIS = "context"
SHARDED = PartitionSpec(None, AXIS)


def policy_inputs(cases):
    q, k, v, *_ = cases.inputs(cases.Case("policy"))
    return q[:, :, 0], k, v


def permutes(jaxpr) -> int:
    """ppermute in a jaxpr and all jaxprs inside, each once."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "ppermute"
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            count += permutes(inner) if hasattr(inner, "eqns") else 0
    return count


@pytest.fixture(scope="module", params=["replay", "gathered"])
def rematerialised(cases, request):
    """Permutes in the gradient program of two reads, without jax.checkpoint and with it under two policies."""
    spec = cases.spec_of(4)
    args = tuple(to_ranks(x, spec.layout) for x in policy_inputs(cases))

    def layer(q, k, v):
        index = jnp.broadcast_to(local_index(spec.layout, AXIS)[None, :, None], (*q.shape[:2], 1))
        seen = KeyRange(jnp.zeros_like(index), index)
        trunk, out = share_trunk(jnp.sin(k), jnp.sin(v), spec, mode=request.param), jnp.sin(q)[:, :, None]
        for _ in range(2):
            out, _ = branch_attention(out, trunk, seen, spec=spec)
        return jnp.sin(out[:, :, 0])

    def count(wrapped):
        mapped = jax.shard_map(wrapped, mesh=cases.mesh_of(4), in_specs=(SHARDED,) * 3, out_specs=SHARDED)
        gradient = jax.grad(lambda *a: jnp.sum(mapped(*a)), argnums=(0, 1, 2))
        return permutes(jax.make_jaxpr(gradient)(*args).jaxpr)

    return {
        "plain": count(layer),
        "kept": count(jax.checkpoint(layer, policy=save_ring_policy())),
        "nothing kept": count(jax.checkpoint(layer)),
    }


def test_checkpoint_does_not_run_the_ring_again_unless_asked(rematerialised):
    assert rematerialised["kept"] == rematerialised["plain"]
    assert rematerialised["nothing kept"] > rematerialised["plain"], "the count would not see a ring that runs twice"


def test_checkpointed_gradients_are_the_same(cases):
    spec = cases.spec_of(2)
    case = cases.Case("policy")
    q, k, v, bk, bv, w, *_ = cases.inputs(case)

    def gradients(wrap):
        op = wrap(lambda q, k, v, s, p: cases.token_op(case, spec)(q, k, v, bk, bv, s, p, s > 0, None)[0])
        mapped = jax.shard_map(op, mesh=cases.mesh_of(2), in_specs=(SHARDED,) * 5, out_specs=SHARDED)
        zig = [to_ranks(jnp.asarray(x), spec.layout) for x in (q, k, v, cases.SEGMENTS, cases.POSITIONS, w)]
        loss = lambda q, k, v: jnp.sum(mapped(q, k, v, *zig[3:5]) * zig[5])  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*zig[:3])

    kept = gradients(lambda f: jax.checkpoint(f, policy=save_ring_policy()))
    for a, b in zip(gradients(lambda f: f), kept, strict=True):
        assert cases.DENSE.relative(a, b) < 1e-6  # two programs: XLA may fuse, and so round, in another way


def test_bug_case_b53_a_data_axis_beside_the_context_axis(cases):
    """Rows over two groups of four ranks; the gradient of a shared sink is summed over both axes."""
    case = cases.Case("ttt", sinks=True)
    got = cases.solve_with(case, cases.spec_of(4), data=2)(*cases.inputs(case))
    wanted = cases.answer(case)
    assert max(cases.DENSE.relative(got[name], wanted[name]) for name in wanted) < 1e-6


def test_policy_attention_in_plain_jit_with_donated_inputs(cases):
    spec = cases.spec_of(4)
    mesh = cases.mesh_of(4, data=2)
    place = NamedSharding(mesh, PartitionSpec("data", AXIS))
    attend = sharded_ring_attention(mesh, spec, batch_axis="data")
    put = lambda x: jax.device_put(to_ranks(jnp.asarray(x), spec.layout), place)  # noqa: E731
    q, k, v, segments, positions = map(put, (*policy_inputs(cases), cases.SEGMENTS, cases.POSITIONS))
    program = jax.jit(lambda q, *rest: attend(q, *rest) * 2.0, donate_argnums=0)
    out = from_ranks(program(q, k, v, segments, positions), spec.layout)
    assert q.is_deleted()
    assert cases.DENSE.relative(out[:, :, None], 2 * cases.answer(cases.Case("policy"))["out"]) < 1e-6


@pytest.fixture(scope="module")
def policy_program(cases):
    spec = cases.spec_of(4)

    def local(q, k, v, segments, positions):
        seen = causal_range(segments, positions, local_index(spec.layout, AXIS))
        return ring_attention(q, k, v, seen, spec=spec)[0]

    mapped = jax.shard_map(local, mesh=cases.mesh_of(4), in_specs=(SHARDED,) * 5, out_specs=SHARDED)

    @jax.jit
    def run(q, k, v, segments, positions, weights):
        def loss(q, k, v):
            zig = [to_ranks(x, spec.layout) for x in (q, k, v, segments, positions)]
            out = from_ranks(mapped(*zig), spec.layout)
            return jnp.sum(out * weights), out

        grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *grads

    return run


def test_bug_case_b51_documents_do_not_see_each_other(cases, policy_program):
    """Another document 3 leaves every other token's value and gradient as it was, bit for bit (axolotl 3608)."""
    q, k, v = policy_inputs(cases)
    rows = jnp.asarray(cases.SEGMENTS), jnp.asarray(cases.POSITIONS)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=q.shape), jnp.float32)
    before = policy_program(q, k, v, *rows, weights)
    theirs = (cases.SEGMENTS == 3)[:, :, None, None] & (np.arange(2) == 0)[:, None, None, None]
    moved = [jnp.where(theirs, x * -3.0 + 1.0, x) for x in (q, k, v)]
    after = policy_program(*moved, *rows, weights)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.where(theirs, 0, a), np.where(theirs, 0, b))
    assert np.any(np.where(theirs, before[0], 0) != np.where(theirs, after[0], 0))


def test_bug_case_b48_packed_documents_equal_the_same_documents_alone(cases, policy_program):
    """Every document of row 0 in a row by itself, at another place: the same outputs and gradients."""
    q, k, v = policy_inputs(cases)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=q.shape), jnp.float32)
    packed = policy_program(q, k, v, jnp.asarray(cases.SEGMENTS), jnp.asarray(cases.POSITIONS), weights)
    start, shift = 0, 11
    for length in cases.LENGTHS[0]:
        segments, positions = (np.zeros((2, cases.TOKENS), np.int32) for _ in range(2))
        segments[0, shift : shift + length], positions[0, shift : shift + length] = 1, np.arange(length)
        alone = [
            jnp.zeros_like(x).at[0, shift : shift + length].set(x[0, start : start + length])
            for x in (q, k, v, weights)
        ]
        got = policy_program(*alone[:3], jnp.asarray(segments), jnp.asarray(positions), alone[3])
        for a, b in zip(got, packed, strict=True):
            ours, theirs = a[0, shift : shift + length], b[0, start : start + length]
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * float(jnp.max(jnp.abs(b))))
        start += length


def test_the_last_token_of_a_ragged_row_matters(cases, policy_program):
    """A length that 2 C does not divide is not rounded down (TransformerEngine 1930): its last value is read."""
    q, k, v = policy_inputs(cases)
    rows = jnp.asarray(cases.SEGMENTS), jnp.asarray(cases.POSITIONS)
    last = cases.LENGTHS[1][0] - 1
    before = policy_program(q, k, v, *rows, jnp.ones_like(q))[0]
    after = policy_program(q, k, v.at[1, last].add(1.0), *rows, jnp.ones_like(q))[0]
    changed = np.flatnonzero(np.any(np.asarray(before != after), axis=(0, 2, 3)))
    assert changed.tolist() == [last]


def test_gradients_of_many_reads_are_added_in_float32(cases):
    """Four reads of bfloat16 keys: the sum is rounded once. Rounded at each read it would be off by several."""
    reads, spec = 4, cases.spec_of(2)
    q, k, v = (x.astype(jnp.bfloat16) for x in policy_inputs(cases))
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=q.shape), jnp.bfloat16) for i in range(reads)]

    def gradients(share_once):
        def local(q, k, v, *weights):
            seen = KeyRange(
                jnp.zeros(q.shape[:2], jnp.int32), jnp.broadcast_to(local_index(spec.layout, AXIS), q.shape[:2])
            )
            seen = KeyRange(*(x[:, :, None] for x in seen))

            def loss(k, v):
                shared, total = share_trunk(k, v, spec), jnp.float32(0.0)
                for w in weights:
                    trunk = shared if share_once else share_trunk(k, v, spec)
                    out = branch_attention(q[:, :, None], trunk, seen, spec=spec)[0][:, :, 0]
                    total = total + jnp.sum(out.astype(jnp.float32) * w.astype(jnp.float32))
                return total

            return jax.grad(loss, argnums=(0, 1))(k, v)

        specs = (SHARDED,) * (3 + reads)
        mapped = jax.jit(jax.shard_map(local, mesh=cases.mesh_of(2), in_specs=specs, out_specs=SHARDED))
        dk, dv = mapped(*(to_ranks(x, spec.layout) for x in (q, k, v, *weights)))
        assert dv.dtype == jnp.bfloat16
        return from_ranks(dv, spec.layout)

    mask = np.tril(np.ones((cases.TOKENS, cases.TOKENS), bool))
    total = sum(np.asarray(w, np.float64) for w in weights)
    wanted = np.stack(
        [cases.DENSE.dense_attention(q[r], k[r], v[r], mask, scale=cases.SCALE, d_out=total[r]).dv for r in range(2)]
    )
    mean = lambda got: float(np.abs(np.asarray(got, np.float64) - wanted).mean())  # noqa: E731
    assert cases.DENSE.relative(gradients(True), wanted) < 4e-3
    # One rounding against four and three sums of them: 0.66 of the mean error here.
    assert mean(gradients(True)) < 0.8 * mean(gradients(False))


def test_keys_that_a_tensor_axis_shares(cases):
    """Query heads over a tensor axis, their one key-value head on both: its gradient is the sum over that axis."""
    case = cases.Case("policy", kv_heads=1)
    spec = cases.spec_of(4)
    q, k, v, _, _, w, wl, _ = cases.inputs(case)
    devices = np.array(jax.devices()).reshape(2, 4)
    heads, shared = PartitionSpec(None, AXIS, "tensor"), SHARDED

    def local(q, k, v, segments, positions):
        seen = causal_range(segments, positions, local_index(spec.layout, AXIS))
        return ring_attention(q, k, v, seen, spec=spec)[0]

    mapped = jax.shard_map(
        local,
        mesh=jax.sharding.Mesh(devices, ("tensor", AXIS)),
        in_specs=(heads, shared, shared, shared, shared),
        out_specs=heads,
        check_vma=True,
    )
    zig = [
        to_ranks(jnp.asarray(x), spec.layout) for x in (q[:, :, 0], k, v, cases.SEGMENTS, cases.POSITIONS, w[:, :, 0])
    ]
    loss = lambda q, k, v: jnp.sum(mapped(q, k, v, *zig[3:5]) * zig[5])  # noqa: E731
    got = [from_ranks(x, spec.layout) for x in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*zig[:3])]
    mask = cases.masks(case)
    for row in range(2):
        d = cases.DENSE.dense_attention(q[row, :, 0], k[row], v[row], mask[row], scale=cases.SCALE, d_out=w[row, :, 0])
        for a, b in zip(got, (d.dq, d.dk, d.dv), strict=True):
            assert cases.DENSE.relative(a[row], b) < 1e-6


def test_padding_gets_zeros_and_no_gradient(cases, policy_program):
    """1e30 in the padding, of which whole chunks consist, changes no bit (TransformerEngine 2186).

    Not-a-number would reach the tile it stands in, as 0 times it: what the op promises is finite inputs only.
    """
    q, k, v = policy_inputs(cases)
    padding = (cases.SEGMENTS == 0)[:, :, None, None]
    weights = jnp.ones_like(q)
    rows = jnp.asarray(cases.SEGMENTS), jnp.asarray(cases.POSITIONS)
    clean = policy_program(q, k, v, *rows, weights)
    dirty = policy_program(q, *(jnp.where(padding, 1e30, x) for x in (k, v)), *rows, weights)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.any(np.where(padding, np.asarray(a), 0))


def test_without_a_trunk_the_ring_changes_no_bit_of_the_branch(cases):
    """Branch keys never leave their rank: with the trunk masked out a ring of 8 gives what no ring gives, bit for bit.

    The same shapes on every device in both, since XLA may add in another order for other shapes.
    """
    case = cases.Case("dspark")
    q, k, v, bk, bv, w, *_ = cases.inputs(case)
    q, bk, bv, w = (jnp.concatenate([x, x[:, :4]], axis=1) for x in (q, bk, bv, w))  # 16 branches: 2 a device

    def branch_gradients(spec):
        def local(q, k, v, bk, bv):
            none = KeyRange(jnp.ones(q.shape[:3], jnp.int32), jnp.zeros(q.shape[:3], jnp.int32))
            branch = cases.Branch(bk, bv, jnp.ones(q.shape[:2], bool))
            return branch_attention(q, share_trunk(k, v, spec), none, branch, rule=case.rule, spec=spec)[0]

        mapped = jax.shard_map(local, mesh=cases.mesh_of(8), in_specs=(SHARDED,) * 5, out_specs=SHARDED)
        loss = lambda q, bk, bv: jnp.sum(mapped(q, k, v, bk, bv) * w)  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, bk, bv)

    alone = RingSpec(layout=Zigzag(ranks=1, tokens=cases.TOKENS // 8), axis=None, scale=cases.SCALE, tile=cases.TILE)
    for a, b in zip(branch_gradients(alone), branch_gradients(cases.spec_of(8)), strict=True):
        assert np.any(a)
        np.testing.assert_array_equal(a, b)


def test_a_layout_for_another_ring_is_refused(cases):
    spec = RingSpec(layout=Zigzag(ranks=4, tokens=128), axis=AXIS, scale=1.0)
    q, k, v = policy_inputs(cases)
    seen = KeyRange(*(jnp.zeros(q.shape[:2], jnp.int32) for _ in range(2)))
    mapped = jax.shard_map(
        lambda q, k, v, seen: ring_attention(q, k, v, seen, spec=spec)[0],
        mesh=cases.mesh_of(2),
        in_specs=(SHARDED,) * 4,
        out_specs=SHARDED,
    )
    with pytest.raises(ValueError, match="ranks=4 must be 2, the size of axis 'context'"):
        mapped(q, k, v, seen)


def test_interpreted_kernels_are_refused_where_types_are_checked(cases):
    """By the block op, before JAX fails inside of its interpreter; the branch op says the same of itself."""
    spec = cases.spec_of(2, implementation="pallas_interpret")
    q, k, v = policy_inputs(cases)
    seen = KeyRange(*(jnp.zeros(q.shape[:2], jnp.int32) for _ in range(2)))
    mapped = jax.shard_map(
        lambda q, k, v, seen: ring_attention(q, k, v, seen, spec=spec)[0],
        mesh=cases.mesh_of(2),
        in_specs=(SHARDED,) * 4,
        out_specs=SHARDED,
        check_vma=True,
    )
    with pytest.raises(ValueError, match=r"over \['context'\] must be False for .*; give shard_map check_vma=False"):
        mapped(q, k, v, seen)
