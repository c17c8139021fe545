"""Builds point estimates with confidence intervals and p-values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

CONFIDENCE_LEVEL = 0.95
ALPHA = 0.04
"""Error rate that intervals are computed for, a little below 1 − `CONFIDENCE_LEVEL`, because t quantiles are
approximations for discrete and skewed scores: `benchmarks/verdicts.py` measures that 1 − `CONFIDENCE_LEVEL` holds."""

_RELATIVE_ROUNDING = 1e-6  # half-width, relative to the estimate, that is due to rounding: outputs have 32 bits
_ROUNDING = 1e-12  # half-width about 0 that is due to rounding


@final
@dataclass(frozen=True)
class Estimate:
    """Holds a point estimate, the two ends of its confidence interval, and its p-value.

    Attributes:
        value: the point estimate.
        low: lower end of the interval.
        high: upper end of the interval.
        p: two-sided p-value for 0, the smallest error rate at which the interval excludes 0, corrected for multiple
            tests.
    """

    value: float
    low: float
    high: float
    p: float


def t_quantile(alpha: float, degrees_of_freedom: float) -> float:
    """Returns the two-sided quantile of Student's t distribution: the value that |t| exceeds with probability `alpha`."""
    from scipy.special import stdtrit  # scipy.stats would take half a second to import

    return float(stdtrit(degrees_of_freedom, 1 - alpha / 2))


def is_rounding_error(deviation: float, value: float) -> bool:
    """Returns whether a deviation is no more than the rounding of values equal to `value`.

    >>> is_rounding_error(0.0, 0.0), is_rounding_error(1e-16, 1 / 6), is_rounding_error(1e-5, 1 / 6)
    (True, True, False)
    """
    return deviation <= max(_RELATIVE_ROUNDING * abs(value), _ROUNDING)


def estimate_from_half_width(
    value: float, centre: float, half_width_at_error_rate: Callable[[float], float], alpha: float
) -> Estimate:
    """Builds an estimate with interval and p-value from the half width at each error rate.

    Args:
        value: the point estimate.
        centre: the centre of the interval; for shares it is shrunk towards the middle, and the interval is widened to
            contain `value`.
        half_width_at_error_rate: error rate -> half-width of the interval.
        alpha: the error rate of the interval."""
    width = half_width_at_error_rate(alpha)
    if is_rounding_error(width, value):  # if all differences are equal, their variance is unknown, not 0
        return Estimate(value, -math.inf, math.inf, 1.0)
    # For shares the centre is shrunk towards the middle; the interval must still contain the observed value.
    level = _level_touching_zero(centre, half_width_at_error_rate) if value * centre > 0 else 1.0
    low, high = min(centre - width, value), max(centre + width, value)
    return Estimate(value, low, high, min(1.0, level * (1 - CONFIDENCE_LEVEL) / alpha))


def _level_touching_zero(centre: float, half_width: Callable[[float], float]) -> float:
    """Finds by bisection the error rate at which the interval just touches 0."""
    if abs(centre) <= half_width(1.0):
        return 1.0
    low, high = -40.0, 0.0  # logarithms of the error rate
    for _ in range(50):
        middle = (low + high) / 2
        if half_width(math.exp(middle)) >= abs(centre):
            low = middle
        else:
            high = middle
    return math.exp(high)
