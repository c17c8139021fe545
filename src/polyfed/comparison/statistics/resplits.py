"""Estimates confidence intervals of differences over repeated random splits of the data, by the corrected resampled
t-test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from polyfed.comparison.statistics.estimate import ALPHA, Estimate, estimate_from_half_width, t_quantile
from polyfed.comparison.statistics.nadeau_bengio import variance_of_mean_over_resplits


@final
@dataclass(frozen=True)
class ResplitDifferences:
    """Holds the difference of two methods for each of several random splits of the data, at one client or as a mean
    over clients.

    Attributes:
        values: difference of each split, at least two.
        num_train: training examples of each split, or any number in that ratio to `num_test`.
        num_test: test examples of each split.
    """

    values: Sequence[float]
    num_train: float
    num_test: float

    @property
    def variance_factor_of_mean(self) -> float:
        """Returns the factor that converts the variance of one difference to the variance of their mean: 1/K +
        test/train for K splits; 0 if all differences are equal."""
        return (
            variance_of_mean_over_resplits(self.values, self.num_train, self.num_test) / self.sample_variance
            if self.sample_variance
            else 0.0
        )

    @property
    def sample_variance(self) -> float:
        """Returns the sample variance of the differences over the splits."""
        return float(np.var(self.values, ddof=1))


def estimate_client_means_over_resplits(
    differences_by_client: Sequence[ResplitDifferences], *, num_tests: int = 1, alpha: float = ALPHA
) -> list[Estimate]:
    """Estimates each client's mean difference of two methods over repeated random splits of the data, with a confidence
    interval by the corrected resampled t-test.

    The variance is that of Nadeau and Bengio (2003), which corrects for the examples that the splits share. As in
    `estimate_client_means`, the clients pool their variance, since a few splits give a poor estimate of it.

    Args:
        differences_by_client: differences of each client, at least one, with the same number of splits each.
        num_tests: how many methods have intervals for these clients.
        alpha: the share of comparisons in which one interval or more may miss the truth.
    """
    free, num_claims = len(differences_by_client[0].values) - 1, len(differences_by_client) * num_tests
    common = float(np.mean([site.sample_variance for site in differences_by_client]))

    def half_width(site: ResplitDifferences, alpha: float) -> float:
        together = t_quantile(alpha / num_claims, len(differences_by_client) * free) ** 2 * max(
            common, site.sample_variance
        )
        return math.sqrt(
            site.variance_factor_of_mean * max(together, t_quantile(alpha, free) ** 2 * site.sample_variance)
        )

    means = [float(np.mean(site.values)) for site in differences_by_client]
    return [
        estimate_from_half_width(mean, mean, partial(half_width, site), alpha)
        for mean, site in zip(means, differences_by_client, strict=True)
    ]
