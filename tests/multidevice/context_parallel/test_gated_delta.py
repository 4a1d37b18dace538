"""The gated delta rule over rows that ranks share equals that of one rank, in values and in every gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows, from_ranks, to_ranks
from draftco_jax.models.calls import PackedCall
from draftco_jax.models.delta_rule import DeltaInputs, delta_rule_packed
from draftco_jax.models.functional import initialise
from draftco_jax.models.gated_delta import GatedDeltaNet
from draftco_jax.models.recurrent import documents

AXIS = "context"
TOKENS = PartitionSpec(None, AXIS)
KEY_HEADS, HEADS, KEY, VALUE, CHUNK = 2, 4, 4, 3, 8
# float32 sums of up to 125 tokens in another order, over the largest entry of each array.
CLOSE = 4e-6


@pytest.fixture(scope="module")
def problem(cases):
    """Inputs on the ragged rows of `cases`, decays so weak that a document feels its start a hundred tokens later."""
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    shape = cases.SEGMENTS.shape
    arrays = (
        unit(rng.normal(size=(*shape, KEY_HEADS, KEY))),
        unit(rng.normal(size=(*shape, KEY_HEADS, KEY))),
        rng.normal(size=(*shape, HEADS, VALUE)),
        -0.01 * rng.exponential(size=(*shape, HEADS)),
        0.05 * rng.uniform(size=(*shape, HEADS)),
    )
    return DeltaInputs(*(jnp.asarray(a, jnp.float32) for a in arrays)), jnp.asarray(cases.SEGMENTS)


def solve(problem, packed):
    """Answers and gradients of their weighted sum, in natural order."""
    x, segments = problem
    layout = packed.row_layout(segments.shape[1])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=x.v.shape), jnp.float32)

    def local(x, segments):
        return delta_rule_packed(x, documents(segments, packed), packed, chunk=CHUNK)

    def whole(x):
        if packed.ranks == 1:
            return local(x, segments)
        mesh = Mesh(np.array(jax.devices()[: packed.ranks]), (AXIS,))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS, check_vma=True)
        return from_ranks(mapped(*jax.tree.map(lambda y: to_ranks(y, layout), (x, segments))), layout)

    def loss(x):
        out = whole(x)
        return jnp.sum(out * weights), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(x)
    return (out, *gradients)


@pytest.fixture(scope="module")
def of_one_rank(problem):
    return solve(problem, WHOLE_ROWS)


@pytest.mark.parametrize(("ranks", "stripe"), [(2, None), (4, None), (2, 8), (4, 8)])
def test_ranks_equal_one(problem, of_one_rank, ranks, stripe):
    got = solve(problem, PackedRows(ranks=ranks, context_axis=AXIS, stripe=stripe))
    for name, a, b in zip(("out", *DeltaInputs._fields), got, of_one_rank, strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE * np.abs(b).max(), err_msg=name)


def test_the_state_before_a_piece_matters(problem, of_one_rank):
    """Pieces that begin with nothing are far off: the test above would see a state that is lost on its way."""
    x, segments = problem
    out = np.asarray(of_one_rank[0])
    late = jax.tree.map(lambda y: y[:, 112:], x)  # the last of eight pieces
    alone = delta_rule_packed(late, documents(segments[:, 112:], WHOLE_ROWS), WHOLE_ROWS, chunk=CHUNK)
    assert np.abs(np.asarray(alone)[1] - out[1, 112:]).max() > 0.1 * np.abs(out).max()


@pytest.mark.parametrize("stripe", [None, 8])
def test_the_layer_on_four_ranks_equals_one(cases, stripe):
    """Convolution, rule and gate together, with the gradients of all parameters, summed over ranks."""
    graph, params = initialise(
        lambda rngs: GatedDeltaNet(
            8, key_heads=2, value_heads=4, key_dim=4, value_dim=3, eps=1e-6, rngs=rngs, chunk=CHUNK
        ),
        jax.random.key(0),
    )
    params = params | {"A_log": params["A_log"] - 4.0}  # decays so weak that ranks feel one another
    rng = np.random.default_rng(2)
    x, weights = (jnp.asarray(rng.normal(size=(*cases.SEGMENTS.shape, 8)), jnp.float32) for _ in range(2))
    arrays = (x, jnp.asarray(cases.SEGMENTS), jnp.asarray(cases.POSITIONS), weights)

    def run(packed):
        def local(params, x, segments, positions, weights):
            def loss(params, x):
                y = graph.merge(packed.varying(params))(x, PackedCall(positions, segments, None, packed))
                return packed.total(jnp.sum(y * weights)), y

            gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
            return y, gradients[1], gradients[0]

        if packed.ranks == 1:
            return jax.jit(local)(params, *arrays)
        layout, rest = packed.row_layout(cases.TOKENS), PartitionSpec()
        mapped = jax.shard_map(
            local,
            mesh=Mesh(np.array(jax.devices()[: packed.ranks]), (AXIS,)),
            in_specs=(rest, TOKENS, TOKENS, TOKENS, TOKENS),
            out_specs=(TOKENS, TOKENS, rest),
            check_vma=True,
        )
        y, of_x, of_params = jax.jit(mapped)(params, *(to_ranks(a, layout) for a in arrays))
        return from_ranks(y, layout), from_ranks(of_x, layout), of_params

    got, wanted = run(PackedRows(ranks=4, context_axis=AXIS, stripe=stripe)), run(WHOLE_ROWS)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        b = np.asarray(b)
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE * np.abs(b).max())
