"""`PackedRows` on one device; on several it is held to this by tests/multidevice/context_parallel."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from draftco_jax.context_parallel import WHOLE_ROWS, PackedRows, Striped, Zigzag
from draftco_jax.numerics.shift import look_ahead


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_ahead_on_one_device_is_the_plain_shift_however_short_the_row(steps):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
    np.testing.assert_array_equal(WHOLE_ROWS.ahead(x, steps), look_ahead(x, steps))


def test_one_exchange_serves_all_shifts_and_places():
    x = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    extended = WHOLE_ROWS.extend(x, 3)
    flat = extended.reshape(2, -1)
    for steps in range(4):
        shifted = WHOLE_ROWS.shifted(extended, steps, 5)
        np.testing.assert_array_equal(shifted, look_ahead(x, steps))
        np.testing.assert_array_equal(flat[:, WHOLE_ROWS.places(jnp.arange(5), 3, 5) + steps], shifted)
    with pytest.raises(ValueError, match=r"steps=4 must be in 0..3, the reach; extend by more"):
        WHOLE_ROWS.shifted(extended, 4, 5)


def test_whole_rows_cost_nothing():
    x = {"a": jnp.ones((1, 3))}
    assert WHOLE_ROWS.total(x) is x and WHOLE_ROWS.largest(x) is x and WHOLE_ROWS.row_total(x) is x
    assert WHOLE_ROWS.whole(x["a"]) is x["a"] and WHOLE_ROWS.local(x["a"]) is x["a"] and WHOLE_ROWS.axes == ()
    assert WHOLE_ROWS.once_a_row(x["a"]) is x["a"]


def test_layout_is_zigzag_or_stripes_and_of_one_piece_on_one_device():
    assert PackedRows(ranks=4, context_axis="context").layout(6) == Zigzag(ranks=4, tokens=24)
    assert PackedRows(ranks=4, context_axis="context", stripe=3).layout(6) == Striped(ranks=4, tokens=24, stripe=3)
    assert WHOLE_ROWS.layout(7).piece == 7
    assert PackedRows(ranks=2, context_axis="c", row_axes=("data",)).axes == ("data", "c")


def test_refusals():
    with pytest.raises(ValueError, match=r"ranks=0 must be >= 1"):
        PackedRows(ranks=0)
    with pytest.raises(ValueError, match=r"context_axis=None must name a mesh axis where ranks=2 > 1"):
        PackedRows(ranks=2)
    for field, value in (("tile", 0), ("unroll", 0), ("stripe", 0)):
        with pytest.raises(ValueError, match=rf"{field}=0 must be >= 1"):
            PackedRows(**{field: value})
    for field in ("implementation", "branch_implementation"):
        with pytest.raises(ValueError, match=rf"{field}='nope' must be one of"):
            PackedRows(**{field: "nope"})
    with pytest.raises(ValueError, match=r"row_axes=\('c',\) must not hold context_axis='c'"):
        PackedRows(ranks=2, context_axis="c", row_axes=("c",))
    with pytest.raises(ValueError, match=r"tokens=10 must be a positive multiple of 4"):
        PackedRows(ranks=2, context_axis="context").layout(5)
