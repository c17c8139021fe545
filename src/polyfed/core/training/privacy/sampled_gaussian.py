"""Computes the privacy loss of Gaussian noise on sums of randomly sampled units, by Rényi differential privacy."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

from polyfed.core.errors import UserError

_ORDERS = (*range(2, 65), *range(68, 257, 4), *range(272, 1025, 16))
_MOST_NOISE = 1e5
_LEAST_NOISE = 1e-6  # below, numbers overflow, and ε is far above a million


def renyi_divergences(sampling_rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    """Returns the Rényi differential privacy of one step for each order α of `_ORDERS`.

    For whole α it is log(A_α)/(α − 1) with A_α = Σ_k C(α, k) (1 − q)^(α−k) q^k exp(k(k − 1)/(2σ²)) (Mironov, Talwar and
    Zhang 2019, section 3.3); with q = 1 it is α/(2σ²).
    """
    if noise_multiplier < _LEAST_NOISE:
        return np.full(len(_ORDERS), math.inf)
    if sampling_rate >= 1:
        return np.asarray(_ORDERS, float) / (2 * noise_multiplier**2)
    log_q, log_rest = math.log(sampling_rate), math.log1p(-sampling_rate)
    divergences = []
    for order in _ORDERS:
        k = np.arange(order + 1)
        log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = log_binomial + (order - k) * log_rest + k * log_q + k * (k - 1) / (2 * noise_multiplier**2)
        divergences.append(float(logsumexp(terms)) / (order - 1))
    return np.asarray(divergences)


@lru_cache(maxsize=4096)
def epsilon_of_steps(sampling_rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """Returns ε of (ε, δ)-differential privacy after this many steps, each on a Poisson sample.

    Steps add up in each order; ε is the least over the orders of RDP + log((α−1)/α) − (log δ + log α)/(α−1) (Canonne, Kamath
    and Steinke 2020, proposition 12).

    Args:
        sampling_rate: q, the probability with which a step takes a unit.
        noise_multiplier: σ, the noise's standard deviation over the largest norm of a unit's gradient.
        steps: number of steps.
        delta: δ.

    >>> round(epsilon_of_steps(0.01, 1.0, 1000, 1e-5), 2)
    2.11
    """
    return epsilon_of_divergences(steps * renyi_divergences(sampling_rate, noise_multiplier), delta) if steps else 0.0


def epsilon_of_divergences(divergences: NDArray[np.float64], delta: float) -> float:
    """Returns ε at `delta` of Rényi divergences at `_ORDERS` (Canonne et al. 2020, proposition 12)."""
    orders = np.asarray(_ORDERS, float)
    candidates = divergences + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(candidates.min()))


@lru_cache(maxsize=4096)
def noise_multiplier_for_epsilon(epsilon: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Returns the least noise multiplier σ, up to 0.1 %, with which this many steps have at most this ε.

    Raises:
        UserError: no amount of noise gives so small an ε with these orders.

    >>> sigma = noise_multiplier_for_epsilon(2.0, 0.01, 1000, 1e-5)
    >>> 1.99 < epsilon_of_steps(0.01, sigma, 1000, 1e-5) <= 2.0
    True
    """
    low, high = 0.05, 1.0
    while epsilon_of_steps(sampling_rate, high, steps, delta) > epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise UserError(
                f"privacy: no noise gives epsilon {epsilon:g} with delta {delta:g} for {steps} steps, each on a share "
                f"{sampling_rate:.3g} of the units; take a larger target_epsilon or delta, fewer rounds or smaller batches"
            )
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle) if epsilon_of_steps(sampling_rate, middle, steps, delta) <= epsilon else (middle, high)
        )
    return high
