"""Tests of the interval."""

import math

import pytest
from scipy import stats

from draftco_jax.metrics.intervals import wilson_interval


@pytest.mark.parametrize(("successes", "count"), [(0, 256), (1, 256), (151, 256), (256, 256), (1, 2)])
def test_wilson_interval_matches_scipy(successes, count):
    expected = stats.binomtest(successes, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_rate_lies_in_its_interval_also_at_the_ends():
    for count in range(1, 300):
        for rate in (0.0, 1.0, 1 / count):
            low, high = wilson_interval(rate, count)
            assert 0.0 <= low <= rate <= high <= 1.0


def test_without_trials_there_is_no_width():
    assert wilson_interval(0.5, 0) == (0.5, 0.5)


def test_the_interval_covers_about_95_of_100():
    # All outcomes of 40 problems at several rates, weighed by their probability.
    n = 40
    for p in (0.1, 0.3, 0.5, 0.8):
        covered = 0.0
        for c in range(n + 1):
            low, high = wilson_interval(c / n, n)
            covered += math.comb(n, c) * p**c * (1 - p) ** (n - c) * (low <= p <= high)
        assert 0.92 < covered < 0.98, (p, covered)
