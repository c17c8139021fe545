"""The variance of a mean over splits of one data set: its formula, and how often tests with it are wrong."""

import numpy as np
import pytest
from scipy import stats

from polyfed.comparison.statistics.cross_validation.resplits import variance_of_mean_over_resplits
from polyfed.core.errors import UserError

SPLITS, EXAMPLES, TEST = 10, 100, 20


def test_the_formula():
    """Differences 1, 2, 3 and 6 have s² = 14/3; a quarter of it for four splits, and half of it for twice the training."""
    assert variance_of_mean_over_resplits([1, 2, 3, 6], num_train=80, num_test=40) == pytest.approx(14 / 3 * 0.75)
    assert variance_of_mean_over_resplits([1, 2, 3, 6], num_train=2 / 3, num_test=1 / 3) == pytest.approx(14 / 3 * 0.75)
    assert variance_of_mean_over_resplits([0.5, 0.5], num_train=9, num_test=1) == 0


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
