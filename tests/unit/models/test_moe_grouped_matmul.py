"""Both ways of a grouped matmul against one matmul a group in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.models import grouped_matmul as room
from draftco_jax.models.grouped_matmul import grouped_matmul

WAYS = ("ragged_dot", "blocks")
# In blocks of 4: none at all, a short one, exactly one, several and a rest; 3 rows belong to no group.
SIZES = {
    "mixed": [0, 3, 4, 0, 9, 1],
    "one_has_all": [0, 0, 17, 0, 0, 0],
    "nothing": [0, 0, 0, 0, 0, 0],
    "last_has_all": [0, 0, 0, 0, 0, 17],
}
ROWS = 20


@pytest.fixture(scope="module")
def run():
    """way -> (rows, kernels, sizes, c) -> result and gradients of sum(c * result) over rows of groups; blocks of 4."""

    def pull(way, rows, kernels, sizes, c):
        inside = (jnp.arange(ROWS) < jnp.sum(sizes))[:, None]
        y, back = jax.vjp(lambda rows, kernels: grouped_matmul(rows, kernels, sizes, way), rows, kernels)
        return y, back(jnp.where(inside, c, 0.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "BLOCK_ROWS", 4)
        yield {way: jax.jit(partial(pull, way)) for way in WAYS}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_each_group_is_multiplied_by_its_own_kernel(way, sizes, run):
    rng = np.random.default_rng(0)
    rows, kernels, c = (rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, 5), (6, 5, 3), (ROWS, 3)))
    y, (by_rows, by_kernels) = run[way](rows, kernels, np.array(SIZES[sizes], np.int32), c)
    assert y.dtype == jnp.float32
    start = 0
    for group, size in enumerate(SIZES[sizes]):
        own = slice(start, start + size)
        x, kernel, by = (a.astype(np.float64) for a in (rows[own], kernels[group], c[own]))
        # float32 sums of at most 17 products of order 1.
        np.testing.assert_allclose(y[own], x @ kernel, rtol=0, atol=3e-6)
        np.testing.assert_allclose(by_rows[own], by @ kernel.T, rtol=0, atol=3e-6)
        np.testing.assert_allclose(by_kernels[group], x.T @ by, rtol=0, atol=3e-6)
        start += size


def test_what_rows_of_no_group_hold_reaches_no_group_and_no_kernel_gradient(run):
    rng = np.random.default_rng(1)
    rows, kernels, c = (rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, 5), (6, 5, 3), (ROWS, 3)))
    sizes = np.array(SIZES["mixed"], np.int32)
    clean = run["blocks"](rows, kernels, sizes, c)
    rows[17:] = np.nan
    y, (_, by_kernels) = run["blocks"](rows, kernels, sizes, c)
    np.testing.assert_array_equal(y[:17], clean[0][:17])
    np.testing.assert_array_equal(by_kernels, clean[1][1])


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_float32_also_for_bfloat16(way):
    # 4096 times 1, and 4096 times 2^-7: a sum kept in bfloat16 would stop at 256 and at 2.
    rows = jnp.ones((2, 4096), jnp.bfloat16)
    kernels = jnp.stack([jnp.ones((4096, 1)), jnp.full((4096, 1), 2.0**-7)])
    out = jax.jit(lambda rows, kernels, sizes: grouped_matmul(rows, kernels, sizes, way))(
        rows, kernels, jnp.array([1, 1], jnp.int32)
    )
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [[4096.0], [32.0]])


def test_kernel_gradients_of_bfloat16_rows_add_up_over_blocks_in_float32():
    # Blocks of 128 rows that sum to 128, 128, 1, 1, 1, 1: 260. Added up in bfloat16, 256 + 1 stays 256.
    rows = jnp.zeros((768, 1), jnp.bfloat16).at[:256].set(1.0).at[256::128].set(1.0)
    total = lambda kernels: jnp.sum(grouped_matmul(rows, kernels, jnp.array([768], jnp.int32), "blocks"))  # noqa: E731
    gradient = jax.jit(jax.grad(total))(jnp.ones((1, 1, 1)))
    # The kernel is rounded to bfloat16, and so is its gradient, once: 260 is one of its numbers.
    assert gradient.dtype == jnp.float32 and float(gradient[0, 0, 0]) == 260.0


def test_blocks_do_no_more_products_than_the_rows_need(run):
    """A group without rows is not looked at: its kernel may even be no number."""
    rows = np.ones((ROWS, 5), np.float32)
    kernels = np.ones((6, 5, 3), np.float32)
    kernels[[0, 3]] = np.nan
    y, _ = run["blocks"](rows, kernels, np.array(SIZES["mixed"], np.int32), np.ones((ROWS, 3), np.float32))
    np.testing.assert_array_equal(y[:17], np.full((17, 3), 5.0))
