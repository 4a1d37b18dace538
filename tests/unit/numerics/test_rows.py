import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.numerics.rows import pick, row_at, slice_rows, update_rows

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("trailing", [(), (3,), (3, 2)])
def test_rows_are_read_and_written_at_their_own_offsets(rows, trailing):
    values = RNG.normal(size=(rows, 9, *trailing)).astype(np.float32)
    start = RNG.integers(0, 6, rows).astype(np.int32)
    block = RNG.normal(size=(rows, 4, *trailing)).astype(np.float32)
    start[0] = 5  # up to the very end
    written = values.copy()
    for row, at in enumerate(start):
        written[row, at : at + 4] = block[row]
    read = np.stack([values[row, at : at + 4] for row, at in enumerate(start)])
    np.testing.assert_array_equal(slice_rows(jnp.asarray(values), jnp.asarray(start), 4), read)
    np.testing.assert_array_equal(row_at(jnp.asarray(values), jnp.asarray(start)), read[:, 0])
    np.testing.assert_array_equal(update_rows(jnp.asarray(values), jnp.asarray(block), jnp.asarray(start)), written)


def test_pick_reads_one_entry_of_each_row():
    values = RNG.normal(size=(3, 5, 7)).astype(np.float32)
    index = RNG.integers(0, 7, (3, 5)).astype(np.int32)
    expected = np.take_along_axis(values, index[..., None], axis=-1)[..., 0]
    np.testing.assert_array_equal(pick(jnp.asarray(values), jnp.asarray(index)), expected)
