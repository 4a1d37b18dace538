"""The gated delta rule over rows that ranks share equals that of one rank, in values and in every gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows, from_ranks, to_ranks
from draftco_jax.models.delta_rule import DeltaInputs, delta_rule_packed
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
