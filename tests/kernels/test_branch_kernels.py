"""What is special to the branch kernels: tiles that do not fit, what they never read, sizes and their refusals."""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels.block_attention import Partial
from pallas_kernels.branch_attention import Branch, branch_attention, branch_attention_backward, pallas_calls, tuning
from pallas_kernels.branch_attention.shapes import SHAPES
from pallas_kernels.branch_attention.tuning import Dims, Launch, Tuning

# float32 sums of fewer than 100 numbers in another order: a few units in the last place of the largest.
ROUNDING = 1e-6
# See test_branch_attention.py.
KERNELS = "jax_triton" if os.environ.get("TRITON_INTERPRET") == "1" else "pallas_interpret"


def inputs(queries, keys, *, branches=5, heads=6, kv_heads=2, width=12, seed=0):
    """Odd everywhere: 5 branches, 3 query heads of a key-value head, a head of 12."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    q = normal(1, branches, queries, heads, width)
    branch = Branch(
        normal(1, branches, keys, kv_heads, width),
        normal(1, branches, keys, kv_heads, width),
        jnp.asarray(np.arange(branches)[None] != 1),
    )
    return q, Partial(normal(*q.shape), normal(*q.shape[:-1])), branch, normal(heads), normal(*q.shape)


def run(implementation, rule="all", sizes=None):
    options = {"scale": 0.3, "rule": rule, "implementation": implementation, "tuning": sizes}

    @jax.jit
    def both(q, trunk, branch, sinks, d_out):
        out, lse = branch_attention(q, trunk, branch, sinks, **options)
        delta = jnp.sum(d_out * out, axis=-1)
        return out, lse, branch_attention_backward(q, branch, sinks, lse, delta, d_out, **options)

    return both


@pytest.mark.parametrize(
    ("queries", "keys", "sizes"),
    [
        # 5 branches in tiles of 2: the last tile is half empty.
        (1, 3, Tuning(forward=Launch(branches=2), backward=Launch(branches=2))),
        # 27 rows in one tile of 32, and in two of 16 of which the second is not full.
        (9, 9, Tuning(forward=Launch(rows=32), backward=Launch(rows=16))),
    ],
    ids=["few", "block"],
)
def test_tiles_that_do_not_fit_change_nothing(dense, queries, keys, sizes):
    given = inputs(queries, keys)
    wanted, got = run("blockwise")(*given), run(KERNELS, sizes=sizes)(*given)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert dense.relative(ours, theirs) < ROUNDING


@pytest.mark.parametrize(("queries", "keys"), [(1, 3), (9, 9)], ids=["few", "block"])
def test_keys_of_a_branch_that_is_not_live_are_never_read(queries, keys):
    """Not-a-number in them, keys and values, reaches nothing; their gradients are 0."""
    q, trunk, branch, sinks, d_out = inputs(queries, keys)
    spoilt = Branch(branch.keys.at[0, 1].set(jnp.nan), branch.values.at[0, 1].set(jnp.nan), branch.live)
    both = run(KERNELS)
    before, after = both(q, trunk, branch, sinks, d_out), both(q, trunk, spoilt, sinks, d_out)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    grads = after[2]
    assert np.all(grads.keys[0, 1] == 0) and np.all(grads.values[0, 1] == 0) and np.all(grads.q[0, 1] == 0)
    assert np.all(np.any(grads.keys[0, 2] != 0, axis=-1))


@pytest.mark.parametrize("count", [2, 9], ids=["few", "block"])
def test_a_score_far_above_the_lse_that_is_not_seen_does_not_overflow(count):
    """exp(score - lse) of a masked key is inf in float32 from 89 on, and inf * 0 is not a number.

    Query 0 sees key 0, whose score is -200, and not the others, whose score is 1000.
    """
    _, _, branch, _, d_out = inputs(count, count)
    ones = jnp.ones(d_out.shape)
    score = jnp.where(jnp.arange(count) == 0, -200.0, 1000.0)[None, None, :, None, None]
    steep = branch._replace(keys=jnp.broadcast_to(score / (0.3 * ones.shape[-1]), branch.keys.shape))
    trunk = Partial(jnp.zeros(ones.shape), jnp.full(ones.shape[:-1], -jnp.inf))
    out, lse, grads = run(KERNELS, "causal")(ones, trunk, steep, None, d_out)
    np.testing.assert_allclose(lse[0, 0, 0], -200.0, rtol=1e-6)
    # Its one key has all of the weight, so that moving the score moves nothing.
    np.testing.assert_allclose(out[0, 0, 0], jnp.repeat(branch.values[0, 0, 0], 3, axis=0), rtol=1e-6)
    np.testing.assert_allclose(grads.q[0, 0, 0], 0.0, atol=1e-4)  # rounding of dout . v - delta, times keys of 55
    assert all(np.all(np.isfinite(x)) for x in (grads.q, grads.keys, grads.values))


def test_every_named_shape_has_a_row_in_the_table():
    for shape in SHAPES.values():
        sizes = tuning.pick(shape.dims, shape.dtype)
        assert sizes.forward.num_stages >= 1 and sizes.backward.num_stages >= 1
    routes = {shape.dims.route for shape in SHAPES.values()}
    assert routes == {"few", "block"}


def test_refusals_of_sizes_say_what_and_why():
    with pytest.raises(ValueError, match="branches=3 must be a power of two"):
        Launch(branches=3)
    with pytest.raises(ValueError, match="rows=8 must be >= 16"):
        Launch(rows=8)
    with pytest.raises(ValueError, match="num_warps=64 must be <= 32"):
        Launch(num_warps=64)
    with pytest.raises(ValueError, match="num_stages=0 must be >= 1"):
        Launch(num_stages=0)
    with pytest.raises(ValueError, match="head_dim=300 must be in 1..256"):
        Dims(branches=1, queries=1, keys=1, heads=1, kv_heads=1, width=300)
    with pytest.raises(ValueError, match="keys=300 must be in 1..256"):
        Dims(branches=1, queries=1, keys=300, heads=1, kv_heads=1, width=64)


def test_refusals_of_arguments_say_what_and_why():
    q, trunk, branch, sinks, _ = inputs(1, 3)
    options = {"scale": 0.3, "rule": "all"}
    for name in ("pallas", "jax_triton"):
        with pytest.raises(ValueError, match=f"implementation='{name}' must run on a GPU, not on platform='cpu'"):
            branch_attention(q, trunk, branch, sinks, implementation=name, **options)
    huge = jax.ShapeDtypeStruct((1, 2**20, 1, 32, 128), jnp.float32)
    branches = Branch(huge, huge, jax.ShapeDtypeStruct((1, 2**20), jnp.bool_))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"must have fewer than 2\*\*31 numbers"):
        jax.eval_shape(pallas_calls.dims_of, huge, branches)
    with pytest.raises(ValueError, match="dtypes=.*bfloat16.*float32.* must be one of"):
        mixed = branch._replace(keys=branch.keys.astype(jnp.bfloat16))
        branch_attention(q, trunk, mixed, sinks, implementation="pallas_interpret", **options)
    with pytest.raises(ValueError, match="must not be empty"):
        none = jax.tree.map(lambda x: x[:, :0], (q, trunk, branch))
        branch_attention(*none, None, implementation="pallas_interpret", **options)


def test_a_missing_triton_is_refused_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(pallas_calls, "target_platform", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    q, trunk, branch, sinks, _ = inputs(1, 3)
    with pytest.raises(ValueError, match=r"must find the module jax_triton .*; pip install 'draftco\[cuda12\]'"):
        branch_attention(q, trunk, branch, sinks, scale=0.3, rule="all", implementation="jax_triton")


def test_interpreted_kernels_run_in_a_shard_map_that_does_not_check_types():
    """With check_vma=True the interpreter's own loops are refused by JAX; that is said before they are tried."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("context",))
    q, trunk, branch, _, _ = inputs(1, 3)

    def mapped(implementation, check):
        def local(q, trunk, branch):
            return branch_attention(q, trunk, branch, None, scale=0.3, rule="all", implementation=implementation)

        spec = PartitionSpec(None, "context")
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check))

    with pytest.raises(ValueError, match=r"check_vma=True over \['context'\] must be False"):
        mapped("pallas_interpret", True)(q, trunk, branch)
    wanted, got = mapped("blockwise", True)(q, trunk, branch), mapped("pallas_interpret", False)(q, trunk, branch)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=ROUNDING, rtol=ROUNDING)
