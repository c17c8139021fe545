"""The variance of a mean over splits of one data set: its formula, and how often tests with it are wrong."""

import numpy as np
import pytest
import torch
from scipy import stats

from polyfed.comparison.statistics.cross_validation.resplits import (
    ResplitDifferences,
    estimate_client_means_over_resplits,
    variance_of_mean_over_resplits,
)
from polyfed.comparison.statistics.mrmc import estimate_mean_over_clients, estimate_variance_components
from polyfed.comparison.statistics.random_effects import SiteGain, fit_random_effects
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metrics import METRICS

SPLITS, EXAMPLES, TEST = 10, 100, 20


def test_the_formula():
    """Differences 1, 2, 3 and 6 have s² = 14/3; a quarter of it for four splits, and half of it for twice the training."""
    assert variance_of_mean_over_resplits([1, 2, 3, 6], num_train=80, num_test=40) == pytest.approx(14 / 3 * 0.75)
    assert variance_of_mean_over_resplits([1, 2, 3, 6], num_train=2 / 3, num_test=1 / 3) == pytest.approx(14 / 3 * 0.75)
    assert variance_of_mean_over_resplits([0.5, 0.5], num_train=9, num_test=1) == 0


def test_equal_differences_that_rounding_tells_apart_decide_nothing():
    """Of six test examples one method has one more right than another in each split."""
    differences = [4 / 6 - 3 / 6, 3 / 6 - 2 / 6, 4 / 6 - 3 / 6]
    assert len(set(differences)) > 1
    (estimate,) = estimate_client_means_over_resplits([ResplitDifferences(differences, 20, 6)])
    assert (estimate.low, estimate.high, estimate.p) == (-np.inf, np.inf, 1.0)
    (estimate,) = estimate_client_means_over_resplits([ResplitDifferences([0.1, 0.1001], 20, 6)])
    assert np.isfinite(estimate.low)


def test_variances_that_are_rounding_errors_are_no_weights():
    gains = [SiteGain(value, 0.001) for value in (0.1, 0.2, 0.0)]
    assert fit_random_effects([*gains, SiteGain(1 / 6, 1e-34)]) is None
    assert fit_random_effects([*gains, SiteGain(1 / 6, 1e-6)]) is not None


def test_outputs_that_are_off_by_a_constant_decide_nothing():
    targets = torch.linspace(0, 1, 10).view(-1, 1)  # in 32 bits, so that the errors are not all 0.1
    components = estimate_variance_components(METRICS["mae"], [targets + 0.1] * 2, [targets + 0.4] * 2, targets)
    assert components.variance > 0
    assert estimate_mean_over_clients([components]).p == 1.0


@pytest.mark.parametrize(
    ("differences", "train", "test", "sentence"),
    [
        ([0.1], 9, 1, "at least two differences"),
        ([0.1, float("nan")], 9, 1, "that are numbers"),
        ([0.1, 0.2], 0, 1, "train must be a positive"),
        ([0.1, 0.2], 9, -1, "test must be a positive"),
    ],
)
def test_errors(differences, train, test, sentence):
    with pytest.raises(UserError, match=sentence):
        variance_of_mean_over_resplits(differences, train, test)


def differences_of_equal_rules(rng):
    """Accuracies of one nearest-centroid rule on ten features less those of another on ten others that are distributed
    alike, over random splits of one small data set."""
    y = rng.permutation(EXAMPLES) % 2
    x = rng.normal(size=(EXAMPLES, 20)) + 0.25 * (2 * y[:, None] - 1)
    found = []
    for _ in range(SPLITS):
        order = rng.permutation(EXAMPLES)
        test, train = order[:TEST], order[TEST:]
        centres = np.stack([x[train][y[train] == c].mean(axis=0) for c in (0, 1)])
        distances = ((x[test][None] - centres[:, None]) ** 2).reshape(2, TEST, 2, 10).sum(axis=-1)
        found.append(((distances[1] < distances[0]) == y[test][:, None]).mean(axis=0))
    return np.subtract(*np.transpose(found))


def test_how_often_equal_methods_are_found_to_differ():
    """At most about 5 % with the corrected variance; much more often with the variance of independent values."""
    rng, quantile, repetitions = np.random.default_rng(0), stats.t.ppf(0.975, SPLITS - 1), 400
    corrected = naive = 0
    for _ in range(repetitions):
        values = differences_of_equal_rules(rng)
        variance = variance_of_mean_over_resplits(values, num_train=EXAMPLES - TEST, num_test=TEST)
        corrected += abs(values.mean()) > quantile * np.sqrt(variance)
        naive += abs(values.mean()) > quantile * np.sqrt(values.var(ddof=1) / SPLITS)
    assert corrected <= 0.07 * repetitions
    assert naive > 0.15 * repetitions


@pytest.mark.parametrize(("units", "splits"), [(2, 10), (4, 3), (4, 30), (6, 10)])
@pytest.mark.thorough
def test_intervals_hold_with_few_units(units, splits):
    """However often four patients are divided, they are four: the true difference is 0, and 5 % of intervals may miss it."""
    generator, num_test, misses = np.random.default_rng(units), max(1, round(0.3 * units)), 0
    for _ in range(150):
        gains = generator.normal(size=units)
        values = [generator.choice(gains, num_test, replace=False).mean() for _ in range(splits)]
        if np.var(values) < 1e-12:
            continue  # no interval
        differences = ResplitDifferences(values, units - num_test, num_test, units)
        (estimate,) = estimate_client_means_over_resplits([differences], alpha=0.05)
        misses += not estimate.low <= 0 <= estimate.high
    assert misses <= 18  # of 150; 5 % are 8


def test_many_units_change_nothing():
    values = [0.1, 0.2, 0.4]
    assert ResplitDifferences(values, 70, 30, 100).degrees_of_freedom == 2
    assert ResplitDifferences(values, 70, 30).degrees_of_freedom == 2
    assert ResplitDifferences(values, 2, 1, 3).degrees_of_freedom == 1
