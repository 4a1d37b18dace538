"""Intervals for measured fractions."""

from __future__ import annotations

import math

# The 97.5 % point of the standard normal law: two-sided 95 %.
Z_95 = 1.959963984540054


def wilson_interval(rate: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a success rate seen in ``count`` trials; the rate itself if count is 0.

    ``(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)``. Unlike the textbook interval it stays inside [0, 1]
    and has a width at rates of 0 and 1. Source: E. B. Wilson, JASA 22 (1927).

    For means of values in 0..1 over ``count`` independent problems, such as pass@k or shares of several samples, it is
    on the safe side: their spread is at most that of the binomial law. It speaks of other problems of the same kind.
    """
    if count <= 0:
        return rate, rate
    spread = Z_95**2 / count
    centre = rate + spread / 2
    half = math.sqrt(spread * rate * (1 - rate) + spread**2 / 4)
    # Rounding may leave the ends a last bit on the wrong side of the rate at 0 and 1.
    return min(rate, max(0.0, (centre - half) / (1 + spread))), max(rate, min(1.0, (centre + half) / (1 + spread)))
