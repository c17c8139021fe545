"""Computes the variance of a mean over repeated random splits of one data set, corrected for the overlap of the
training sets."""

import math
from collections.abc import Sequence

import numpy as np

from polyfed.core.errors import UserError


def variance_of_mean_over_resplits(differences: Sequence[float], num_train: float, num_test: float) -> float:
    """Returns the variance of the mean difference over several random splits of one data set, corrected for overlapping
    training sets; raises a `UserError` for fewer than two differences.

    It is (1/K + test/train)·s², where s² is the sample variance of the differences.

    The splits share most of their training examples and many of their test examples, so that their differences are
    correlated. s²/K, which takes them as independent, is several times too small, and tests with it find differences
    where there are none. s² is the sample variance of the differences (K − 1). Confidence interval: mean ± t(K − 1) ·
    the root of the result.

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
