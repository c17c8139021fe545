"""Estimates confidence intervals of differences over repeated random splits of the data, by the corrected resampled
t-test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from polyfed.comparison.statistics.estimate import ALPHA, Estimate, estimate_from_half_width, t_quantile
from polyfed.core.errors import UserError

_MANY_UNITS = 20  # from which on K − 1 degrees of freedom hold the level


def variance_of_mean_over_resplits(differences: Sequence[float], num_train: float, num_test: float) -> float:
    """Returns the variance of the mean over splits, corrected for overlapping training sets.

    It is (1/K + test/train)·s², where s² is the sample variance of the differences.

    The splits share most of their training examples and many of their test examples, so that their differences are
    correlated. s²/K, which takes them as independent, is several times too small, and tests with it find differences
    where there are none. Confidence interval: mean ± t(K − 1) · the root of the result.

    Args:
        differences: of two methods, one per split; at least two.
        num_train, num_test: examples for training and for testing in each split, or their shares.

    Returns:
        The variance, in the square of the differences' unit.

    Raises:
        UserError: fewer than two differences, one that is not a finite number, or sizes that are not positive.

    Source: C. Nadeau and Y. Bengio, "Inference for the generalization error", Machine Learning 52, 2003, equation 9.

    >>> round(variance_of_mean_over_resplits([0.01, 0.03], num_train=90, num_test=10), 6)
    0.000122
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all():
        raise UserError(f"a variance needs at least two differences that are numbers, one a split, got {differences!r}")
    for name, size in (("train", num_train), ("test", num_test)):
        if not 0 < size < math.inf:
            raise UserError(f"{name} must be a positive number of examples, got {size!r}")
    return float((1 / len(values) + num_test / num_train) * values.var(ddof=1))


@final
@dataclass(frozen=True)
class ResplitDifferences:
    """Holds the differences over random splits, at one client or as a mean over clients.

    Attributes:
        values: difference of each split, at least two.
        num_train: training examples of each split, or any number in that ratio to `num_test`.
        num_test: test examples of each split.
        num_units: the examples, or groups of them, that the splits divide; infinite for many.
    """

    values: Sequence[float]
    num_train: float
    num_test: float
    num_units: float = math.inf

    @property
    def variance_factor_of_mean(self) -> float:
        """Returns 1/K + test/train, the factor from a difference's variance to the mean's; 0 if all are equal."""
        if self.sample_variance:
            return variance_of_mean_over_resplits(self.values, self.num_train, self.num_test) / self.sample_variance
        return 0.0

    @property
    def degrees_of_freedom(self) -> float:
        """Returns K − 1 for K splits, or 1/(1/(K − 1) + 1/(n − 1)) for n < 20 units.

        However many splits of n units there are, their variance is known no better than from n numbers.
        """
        free = len(self.values) - 1
        return free if self.num_units >= _MANY_UNITS else 1 / (1 / free + 1 / max(self.num_units - 1, 1e-3))

    @property
    def sample_variance(self) -> float:
        """Returns the sample variance of the differences over the splits."""
        return float(np.var(self.values, ddof=1))


def estimate_client_means_over_resplits(
    differences_by_client: Sequence[ResplitDifferences], *, num_tests: int = 1, alpha: float = ALPHA
) -> list[Estimate]:
    """Estimates each client's mean over random splits by the corrected resampled t-test.

    The variance is that of Nadeau and Bengio (2003), which corrects for the examples that the splits share. As in
    `estimate_client_means`, the clients pool their variance, since a few splits give a poor estimate of it.

    Args:
        differences_by_client: differences of each client, at least one, with the same number of splits each.
        num_tests: how many methods have intervals for these clients.
        alpha: the share of comparisons in which one interval or more may miss the truth.
    """
    num_claims, free = len(differences_by_client) * num_tests, sum(s.degrees_of_freedom for s in differences_by_client)
    common = float(np.mean([site.sample_variance for site in differences_by_client]))

    def half_width(site: ResplitDifferences, alpha: float) -> float:
        together = t_quantile(alpha / num_claims, free) ** 2 * max(common, site.sample_variance)
        alone = t_quantile(alpha, site.degrees_of_freedom) ** 2 * site.sample_variance
        return math.sqrt(site.variance_factor_of_mean * max(together, alone))

    means = [float(np.mean(site.values)) for site in differences_by_client]
    return [
        estimate_from_half_width(mean, mean, partial(half_width, site), alpha)
        for mean, site in zip(means, differences_by_client, strict=True)
    ]
