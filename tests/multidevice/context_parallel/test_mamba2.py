"""The Mamba-2 layer on ranks that share rows: states are passed on, and values and gradients are those of one rank."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows, from_ranks, to_ranks
from draftco_jax.models.calls import PackedCall
from draftco_jax.models.functional import abstract_params, graph_of
from draftco_jax.models.mamba2 import Mamba2, Mamba2Sizes

AXIS, WIDTH = "context", 10
# Long memory, so that a state lost or read twice at any border shows many tokens later: exp(-a dt) about 0.99.
RATE = 0.01
# float32 sums in another order, over the largest entry; measured 2e-6. Heads of 3 numbers, whose norm is
# at times near 0, would magnify that.
RTOL = 1e-5


def build(rngs):
    return Mamba2(Mamba2Sizes(hidden_size=WIDTH, heads=4, head_dim=8, state=5, groups=2, chunk=8), rngs=rngs)


def params():
    rng = np.random.default_rng(21)  # of some seeds one under which the last token depends on the first a good deal

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape)
        if "A_log" in jax.tree_util.keystr(path):
            noise = np.log(RATE) + 0.3 * noise
        elif leaf.ndim == 2:
            noise = noise * leaf.shape[0] ** -0.5
        return jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(build))


def solve(cases, run):
    """Outputs in natural order, and gradients of a weighted sum of those of documents, by x and parameters."""
    rng = np.random.default_rng(6)
    x, weights = (jnp.asarray(rng.normal(size=(*cases.SEGMENTS.shape, WIDTH)), jnp.float32) for _ in range(2))
    real = jnp.asarray(cases.SEGMENTS > 0)[..., None]

    @jax.jit
    def all_of_it(x, params):
        def loss(x, params):
            y = run(x, params)
            return jnp.sum(jnp.where(real, y * weights, 0.0)), y

        grads, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, params)
        return {"y": jnp.where(real, y, 0.0), "x": grads[0], **grads[1]}

    return all_of_it(x, params())


@pytest.fixture(scope="module")
def one_rank(cases):
    def run(x, params):
        call = PackedCall(jnp.asarray(cases.POSITIONS), jnp.asarray(cases.SEGMENTS), None, WHOLE_ROWS)
        return graph_of(build).merge(params)(x, call)

    return solve(cases, run)


def on_ranks(cases, packed, data=1):
    layout = packed.row_layout(cases.TOKENS)
    tokens = PartitionSpec("data" if data > 1 else None, AXIS)

    def local(x, segments, positions, params):
        return graph_of(build).merge(params)(x, PackedCall(positions, segments, None, packed))

    mapped = jax.shard_map(
        local,
        mesh=cases.mesh_of(packed.ranks, data),
        in_specs=(tokens, tokens, tokens, PartitionSpec()),
        out_specs=tokens,
        check_vma=True,
    )
    zig = functools.partial(to_ranks, layout=layout)
    segments, positions = jnp.asarray(cases.SEGMENTS), jnp.asarray(cases.POSITIONS)
    return solve(cases, lambda x, params: from_ranks(mapped(zig(x), zig(segments), zig(positions), params), layout))


# Pieces of 32, 16, 16 and 4 tokens: a document of 17 tokens spans five of the last, and others lie inside one piece.
@pytest.mark.parametrize(("ranks", "stripe"), [(2, None), (4, None), (2, 16), (4, 4)])
def test_values_and_gradients_are_those_of_one_rank(cases, one_rank, ranks, stripe):
    got = on_ranks(cases, PackedRows(ranks=ranks, context_axis=AXIS, stripe=stripe))
    leaves = jax.tree_util.tree_leaves_with_path(one_rank)
    assert jax.tree.structure(got) == jax.tree.structure(one_rank)
    for (path, wanted), found in zip(leaves, jax.tree.leaves(got), strict=True):
        wanted, found = np.asarray(wanted, np.float64), np.asarray(found, np.float64)
        assert np.abs(found - wanted).max() <= RTOL * np.abs(wanted).max(), jax.tree_util.keystr(path)


def test_states_cross_every_border(cases, one_rank):
    """Else the comparison would not see one that is lost: the last token of row 1 depends on all pieces before it."""

    def last(x):
        call = PackedCall(jnp.asarray(cases.POSITIONS), jnp.asarray(cases.SEGMENTS), None, WHOLE_ROWS)
        return jnp.sum(graph_of(build).merge(params())(x, call)[1, 124])

    x = jnp.asarray(np.random.default_rng(6).normal(size=(*cases.SEGMENTS.shape, WIDTH)), jnp.float32)
    reach = np.abs(np.asarray(jax.grad(last)(x)))[1].max(axis=1)
    assert reach[:4].max() > 100 * RTOL * np.abs(np.asarray(one_rank["x"])).max()


def test_rows_split_over_data_ranks_too(cases, one_rank):
    got = on_ranks(cases, PackedRows(ranks=2, context_axis=AXIS, row_axes=("data",)), data=2)
    wanted = np.asarray(one_rank["y"], np.float64)
    assert np.abs(np.asarray(got["y"], np.float64) - wanted).max() <= RTOL * np.abs(wanted).max()


def test_pieces_shorter_than_the_convolution_reaches_are_refused(cases):
    with pytest.raises(ValueError, match="reach=3 must be <= 2, the tokens of a piece"):
        on_ranks(cases, PackedRows(ranks=2, context_axis=AXIS, stripe=2))
