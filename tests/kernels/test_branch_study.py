"""What the notebook asks of the branch op: errors that see a wrong kernel, and refusals."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.branch_attention import study
from pallas_kernels.branch_attention.shapes import Shape
from pallas_kernels.branch_attention.tuning import Dims, Launch, Tuning

TINY = Shape(dims=Dims(branches=5, queries=1, keys=2, heads=2, kv_heads=1, width=16), rule="all", dtype_name="float32")
SIZES = Tuning(forward=Launch(branches=4), backward=Launch(branches=2))


def test_the_error_is_that_of_the_largest_difference_over_the_largest_entry():
    assert study.relative_error(jnp.array([1.0, -3.0]), jnp.array([1.0, -4.0])) == 0.25
    with pytest.raises(ValueError, match=r"got=\(2,\) must have the shape \(3,\)"):
        study.relative_error(jnp.ones(2), jnp.ones(3))


def test_kernels_are_within_the_bounds_and_a_wrong_one_is_not(monkeypatch):
    allowed = study.bounds(TINY)
    found = study.errors(TINY, SIZES)
    assert set(found) == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    assert all(found[name] < allowed[name] for name in found), found

    right = study.branch_attention_backward

    def wrong(*arguments, implementation, **options):
        grads = right(*arguments, implementation=implementation, **options)
        return grads if implementation == "blockwise" else grads._replace(keys=grads.keys * 1.01)

    monkeypatch.setattr(study, "branch_attention_backward", wrong)
    spoilt = study.errors(TINY, SIZES)
    assert spoilt.pop("dk") == pytest.approx(0.01, rel=1e-3)  # the one per cent, to float32
    assert all(spoilt[name] == found[name] for name in spoilt)


def test_lse_is_held_to_float32_whatever_comes_in():
    half = study.bounds(Shape(dims=TINY.dims, rule="all"))
    assert half.pop("lse") == study.BOUNDS["float32"] and set(half.values()) == {study.BOUNDS["bfloat16"]}


@pytest.mark.parametrize("name", ["blockwise", "pallas_interpret"])
def test_what_has_no_kernel_for_a_gpu_has_no_resources(name):
    with pytest.raises(ValueError, match=f"implementation='{name}' must have kernels for a GPU; use 'pallas'"):
        study.resources(TINY, None, implementation=name)
