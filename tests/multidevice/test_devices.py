"""Checks that this process really has the devices the other tests here count on."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def test_eight_devices_take_part_in_one_collective():
    assert jax.device_count() == 8
    totals = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")(jnp.arange(8.0))
    assert totals.tolist() == [28.0] * 8
