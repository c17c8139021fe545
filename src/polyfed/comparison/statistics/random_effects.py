"""Models the gains of sites as a mean and a deviation of each site (a random-effects meta-analysis).

A site's estimated gain is μ + θ + e: the mean over sites like these, the site's deviation of variance τ², and the error of
its estimate. The mean's interval takes sites as units (Hartung and Knapp 2001), so that it holds for new sites of the same
kind. Partial pooling shrinks each site's gain towards the mean, most where a site has few examples (empirical Bayes,
Morris 1983): its intervals hold in 95 of 100 cases on average over sites, not for each site.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from polyfed.comparison.statistics.estimate import (
    ALPHA,
    Estimate,
    estimate_from_half_width,
    is_rounding_error,
    t_quantile,
)
from polyfed.comparison.statistics.pseudo_values.jackknife import FloatArray

MIN_SITES = 4
"""Fewest sites for this model: with three the variance between sites is hardly known."""


@final
@dataclass(frozen=True)
class RandomEffects:
    """Holds the mean gain, the deviation between sites, and each site's gain by partial pooling.

    Attributes:
        mean: with sites as units.
        deviation: τ, the estimated standard deviation of the true gains between sites.
        sites: the gain of each site by partial pooling.
    """

    mean: Estimate
    deviation: float
    sites: tuple[Estimate, ...]


@final
@dataclass(frozen=True)
class SiteGain:
    """Holds the estimated gain of one site, and the variance of this estimate.

    Attributes:
        value: the gain.
        variance: of the estimate, at least what is known of it: that due to test examples and seeds.
        further_variance: what may come on top, such as that due to training examples. It widens the site's interval, and
            does not draw the gain to the mean.
    """

    value: float
    variance: float
    further_variance: float = 0.0


@final
@dataclass(frozen=True)
class SharedError:
    """Holds variance and degrees of freedom of an error that sites share, such as that of runs' seeds."""

    variance: float = 0.0
    freedom: float = 1.0


def fit_random_effects(gains: Sequence[SiteGain], shared: SharedError | None = None) -> RandomEffects | None:
    """Fits a mean gain and sites' deviations; None for fewer than `MIN_SITES` or no variance.

    τ² is DerSimonian and Laird's (1986). The interval of the mean is Hartung and Knapp's, never narrower than with the
    estimated variances taken as known.

    Args:
        gains: of the sites.
        shared: the error that all sites share; None for none.

    >>> fitted = fit_random_effects([SiteGain(gain, 0.001) for gain in (0.1, 0.12, 0.08, 0.1)])
    >>> round(fitted.mean.value, 3), fitted.deviation
    (0.1, 0.0)
    """
    gain = np.array([site.value for site in gains], dtype=np.float64)
    variance = np.array([site.variance for site in gains], dtype=np.float64)
    if len(gain) < MIN_SITES or not np.isfinite([*gain, *variance]).all() or variance.min() <= 0:
        return None
    if any(is_rounding_error(math.sqrt(site.variance), site.value) for site in gains):
        return None
    between = _variance_between_sites(gain, variance)
    weights = 1 / (variance + between)
    mean = float(weights @ gain / weights.sum())
    spread = float(weights @ (gain - mean) ** 2) / (len(gain) - 1)
    free, shared_error = len(gain) - 1, shared or SharedError()

    def variance_of_mean(alpha: float) -> float:  # for a t quantile of `free` degrees of freedom
        few_seeds = (t_quantile(alpha, shared_error.freedom) / t_quantile(alpha, free)) ** 2
        return max(spread, 1.0) / float(weights.sum()) + few_seeds * shared_error.variance

    def half_width(alpha: float) -> float:
        return t_quantile(alpha, free) * math.sqrt(variance_of_mean(alpha)) if alpha < 1 else 0.0

    sites = [_pool_partially(site, mean, variance_of_mean(ALPHA), between, variance) for site in gains]
    return RandomEffects(estimate_from_half_width(mean, mean, half_width, ALPHA), math.sqrt(between), tuple(sites))


def _variance_between_sites(gain: FloatArray, variance: FloatArray) -> float:
    weights = 1 / variance
    mean = float(weights @ gain / weights.sum())
    heterogeneity = float(weights @ (gain - mean) ** 2) - (len(gain) - 1)
    return max(heterogeneity / float(weights.sum() - (weights**2).sum() / weights.sum()), 0.0)


def _pool_partially(
    site: SiteGain, mean: float, mean_variance: float, between: float, variances: FloatArray
) -> Estimate:
    num_sites = len(variances)
    towards_mean = (num_sites - 3) / (num_sites - 1) * site.variance / (site.variance + between)
    centre = site.value + towards_mean * (mean - site.value)
    # The share that is drawn to the mean is estimated too (Morris 1983, equation 5.5).
    uncertain_share = 2 / (num_sites - 3) * towards_mean**2 * (site.value - mean) ** 2
    uncertain_share *= (float(variances.mean()) + between) / (site.variance + between)
    own_part = (site.variance + site.further_variance) * (1 - towards_mean)
    site_variance = own_part + towards_mean**2 * mean_variance + uncertain_share

    def half_width(alpha: float) -> float:
        return t_quantile(alpha, num_sites - 1) * math.sqrt(site_variance)

    return estimate_from_half_width(centre, centre, half_width, ALPHA)
