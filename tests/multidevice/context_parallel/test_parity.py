"""Every predicate on C ranks equals a dense float64 reference: out, lse and every gradient."""

from __future__ import annotations

import pytest

# Largest difference over the largest entry. float32: sums of up to 128 products; bfloat16: inputs and results rounded
# to 4e-3, statistics float32.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}

KINDS = ["policy", "ttt", "dflash", "dspark"]
slow = pytest.mark.slow


def check(cases, ranks, **options):
    run = {name: options.pop(name) for name in ("mode", "stripe", "unroll", "implementation") if name in options}
    case = cases.Case(**options)
    errors = cases.errors(case, ranks, **run)
    assert max(errors.values()) < TOLERANCE[case.dtype], errors
    return errors


@pytest.mark.parametrize("kind", KINDS)
def test_bug_case_b46_eight_ranks_equal_the_reference(cases, kind):
    check(cases, 8, kind=kind)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "ttt"), (4, "dflash")])
def test_two_and_four_ranks_equal_the_reference(cases, ranks, kind):
    check(cases, ranks, kind=kind)


@pytest.mark.parametrize("kind", ["ttt", "dspark"])
def test_bug_case_b45_the_error_does_not_grow_with_the_ring(cases, kind):
    """Partial results are merged in float32: 8 ranks lose no more than 4 times what one does."""
    one, eight = check(cases, 1, kind=kind), check(cases, 8, kind=kind)
    for name, error in eight.items():
        assert error <= 4 * one[name], (name, error, one[name])


def test_bfloat16_inputs(cases):
    check(cases, 8, kind="ttt", dtype="bfloat16")


def test_multi_query_with_window_and_sinks(cases):
    check(cases, 4, kind="policy", kv_heads=1, window=9, sinks=True)


def test_stripes_are_exact_too(cases):
    check(cases, 4, kind="dspark", stripe=8)


def test_gathered_keys_are_exact_too(cases):
    check(cases, 4, kind="ttt", mode="gathered")


@pytest.mark.parametrize(("ranks", "stripe"), [(2, None), (4, 4)])
def test_the_kernels_of_a_gpu_in_a_ring(cases, ranks, stripe):
    """The bodies that Triton compiles, of both ops, interpreted: tiles, window and branch keys of a real ring."""
    check(cases, ranks, kind="ttt", window=9, stripe=stripe, implementation="pallas_interpret")


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_predicate_on_every_ring(cases, kind, ranks, kv_heads, dtype):
    errors = check(cases, ranks, kind=kind, kv_heads=kv_heads, dtype=dtype)
    one = check(cases, 1, kind=kind, kv_heads=kv_heads, dtype=dtype)
    for name, error in errors.items():
        assert error <= 4 * one[name], (name, error, one[name])


@slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"window": 9}, {"sinks": True}, {"window": 3, "sinks": True, "kv_heads": 4}])
def test_windows_and_sinks(cases, kind, options):
    check(cases, 8, kind=kind, **options)


@slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_gathered_keys_on_every_predicate(cases, kind, ranks):
    check(cases, ranks, kind=kind, mode="gathered")


@slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "stripe"), [(1, 16), (2, 8), (8, 4)])
def test_stripes_on_every_predicate(cases, kind, ranks, stripe):
    check(cases, ranks, kind=kind, stripe=stripe)


@slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_steps_in_a_loop_body(cases, ranks):
    check(cases, ranks, kind="dflash", unroll=2)
