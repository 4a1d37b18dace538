"""Tokens before a piece, across ranks: the short convolution and the starts of documents of recurrent mixers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows, from_ranks, to_ranks
from draftco_jax.models.recurrent import behind, convolve_packed, documents, preceded

AXIS = "context"
TOKENS = PartitionSpec(None, AXIS)
SPREADS = [PackedRows(ranks=4, context_axis=AXIS), PackedRows(ranks=4, context_axis=AXIS, stripe=4)]
named = pytest.mark.parametrize("packed", SPREADS, ids=["zigzag", "stripes"])


def on_ranks(packed, function, tokens):
    """The same function of whole rows in natural order, run on the ranks."""
    layout = packed.row_layout(tokens)
    mesh = Mesh(np.array(jax.devices()[: packed.ranks]), (AXIS,))
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS, check_vma=True))
    move = functools.partial(jax.tree.map, lambda x: to_ranks(x, layout))
    return lambda *xs: jax.tree.map(lambda y: from_ranks(y, layout), run(*move(xs)))


@named
def test_behind_is_the_shift_of_the_whole_row(packed):
    """Every step a window of four taps needs and as many as a piece has; ids, features; zeros at the row's start."""
    x = jnp.arange(1, 65, dtype=jnp.int32).reshape(2, 32)
    y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 3)), jnp.float32)
    steps = (0, 1, 3, 4)
    got = on_ranks(packed, lambda *xs: [behind(z, s, packed) for s in steps for z in xs], 32)(x, y)
    for found, (s, z) in zip(got, [(s, z) for s in steps for z in (x, y)], strict=True):
        wanted = np.pad(np.asarray(z), ((0, 0), (s, 0)) + ((0, 0),) * (z.ndim - 2))[:, :32]
        np.testing.assert_array_equal(found, wanted)


@named
def test_reaching_beyond_the_neighbour_is_refused(packed):
    with pytest.raises(ValueError, match="reach=5 must be <= 4"):
        on_ranks(packed, lambda x: preceded(x, 5, packed)[:, 0], 32)(jnp.zeros((1, 32)))


@named
def test_starts_of_documents_are_those_of_the_whole_row(cases, packed):
    segments = jnp.asarray(cases.SEGMENTS)
    got = on_ranks(packed, lambda s: documents(s, packed), cases.TOKENS)(segments)
    np.testing.assert_array_equal(got.real, cases.SEGMENTS > 0)
    np.testing.assert_array_equal(got.starts, (cases.SEGMENTS > 0) & (cases.POSITIONS == 0))


@named
def test_bug_case_b51_convolution_on_ranks_is_that_of_whole_rows_in_values_and_gradients(cases, packed):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, weight, bias, scale = draw(2, cases.TOKENS, 3), draw(3, 4), draw(3), draw(2, cases.TOKENS, 3)
    segments = jnp.asarray(cases.SEGMENTS)

    def loss(x, packed_run):
        return jnp.sum(packed_run(x, segments) * scale)

    many = on_ranks(packed, lambda x, s: convolve_packed(x, weight, bias, s, packed), cases.TOKENS)
    one = lambda x, s: convolve_packed(x, weight, bias, s, WHOLE_ROWS)  # noqa: E731
    # The same four products summed in the same order: a difference can come from fused multiply-adds only, 1 ulp of 8.
    np.testing.assert_allclose(many(x, segments), one(x, segments), rtol=0, atol=1e-6)
    got, wanted = (jax.grad(loss)(x, f) for f in (many, one))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    assert np.abs(np.asarray(wanted)).max() > 1
