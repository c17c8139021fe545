"""Computes ROC curves, counts at thresholds, and calibration curves of binary predictions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
BinaryPredictions = tuple[Floats, Bools]
"""Predictions of n examples: probabilities of the positive class, and whether each example is positive; each (n,)."""

THRESHOLDS = np.arange(1, 100) / 100
# False positive rates at which a ROC curve is known; 5, 10 and 20 % are among them.
FALSE_ALARM_GRID = np.arange(61) / 60
_FEWEST = 10  # examples of a point of a calibration curve
_POINTS = 10


@final
@dataclass(frozen=True)
class CalibrationPoint:
    """Holds the mean predicted probability and the share of positives (with interval) of a group of examples."""

    mean_probability: float
    positive_share: float
    low: float
    high: float
    examples: float


@final
class RocCurve(NamedTuple):
    """Holds a ROC curve (the sensitivity at each false positive rate in `FALSE_ALARM_GRID`) and the area under it."""

    sensitivity: Floats
    area: float


@final
class PositiveCounts(NamedTuple):
    """Holds the numbers of true and of false positives at each probability threshold in `THRESHOLDS`."""

    true_positives: NDArray[np.int64]
    false_positives: NDArray[np.int64]


def roc_curve_and_area(predictions: BinaryPredictions) -> RocCurve | None:
    """Computes the ROC curve of binary predictions and the area under it; None if all examples belong to one class.

    The curve has shape (61,): the sensitivity at each false positive rate of `FALSE_ALARM_GRID`.

    Examples of equal probability are decided together.

    >>> curve, area = roc_curve_and_area((np.array([0.9, 0.8, 0.3, 0.1]), np.array([True, False, True, False])))
    >>> curve[[0, 30]].tolist(), area
    ([0.5, 1.0], 0.75)
    """
    score, positive = predictions
    yes = int(positive.sum())
    no = len(positive) - yes
    if not yes or not no:
        return None
    order = np.argsort(-score, kind="stable")
    last = np.append(np.flatnonzero(np.diff(score[order])), len(order) - 1)  # of each group of equals
    sensitivity = np.concatenate([[0], np.cumsum(positive[order])[last]]) / yes
    false_alarms = np.concatenate([[0], np.cumsum(~positive[order])[last]]) / no
    at = np.minimum(np.searchsorted(false_alarms, FALSE_ALARM_GRID + 1e-12, side="right") - 1, len(false_alarms) - 2)
    width = false_alarms[at + 1] - false_alarms[at]
    share = np.divide(FALSE_ALARM_GRID - false_alarms[at], width, out=np.zeros_like(FALSE_ALARM_GRID), where=width > 0)
    curve = np.where(
        FALSE_ALARM_GRID >= 1, 1.0, sensitivity[at] + np.clip(share, 0, 1) * (sensitivity[at + 1] - sensitivity[at])
    )
    return RocCurve(curve, float(np.sum(np.diff(false_alarms) * (sensitivity[1:] + sensitivity[:-1]) / 2)))


def count_true_and_false_positives(predictions: BinaryPredictions) -> PositiveCounts:
    """Counts true and false positives at each threshold in `THRESHOLDS`.

    An example counts as positive if its probability is at least the threshold.

    >>> hits, alarms = count_true_and_false_positives((np.array([0.9, 0.2]), np.array([True, False])))
    >>> hits[[9, 89, 90]].tolist(), alarms[[9, 89]].tolist()
    ([1, 1, 0], [1, 0])
    """
    score, positive = predictions
    reached = score[:, None] >= THRESHOLDS[None] - 1e-12
    return PositiveCounts(reached[positive].sum(axis=0), reached[~positive].sum(axis=0))


def calibration_points(
    predictions_by_seed: Sequence[BinaryPredictions], level: float, units_per_example: float = 1.0
) -> list[CalibrationPoint]:
    """Sorts predictions into up to ten equal groups; returns a calibration point for each.

    The list is empty for fewer than 20 examples.

    Args:
        predictions_by_seed: one a seed. They are of the same examples, so that an interval counts those of one part.
        level: of Wilson's intervals.
        units_per_example: share of the examples that count in intervals: groups (patients, say) per example.
    """
    score = np.concatenate([predictions[0] for predictions in predictions_by_seed])
    positive = np.concatenate([predictions[1] for predictions in predictions_by_seed])
    size = len(score) / len(predictions_by_seed)
    number = min(_POINTS, int(size // _FEWEST))
    if number < 2:
        return []
    order = np.argsort(score, kind="stable")
    groups = []
    for rows in np.array_split(order, number):
        share, examples = float(positive[rows].mean()), len(rows) / len(predictions_by_seed)
        units = examples * units_per_example
        low, high = wilson_interval(share * units, units, level)
        groups.append(CalibrationPoint(float(score[rows].mean()), share, low, high, examples))
    return groups


def wilson_interval(hits: float, examples: float, level: float) -> tuple[float, float]:
    """Computes a share's interval by Wilson's method (1927); NaN without examples.

    >>> [round(end, 3) for end in wilson_interval(8, 10, 0.95)]
    [0.49, 0.943]
    """
    if examples <= 0:
        return math.nan, math.nan
    z2 = z_of_confidence_level(level) ** 2
    share = hits / examples
    middle = (share + z2 / (2 * examples)) / (1 + z2 / examples)
    half = math.sqrt(z2 * (share * (1 - share) / examples + z2 / (4 * examples**2))) / (1 + z2 / examples)
    return max(0.0, middle - half), min(1.0, middle + half)


def auc_interval(area: float, positives: float, negatives: float, level: float) -> tuple[float, float]:
    """Computes the confidence interval (low, high) of an AUC from the numbers of positive and negative examples.

    It holds the areas from which `area` is not too far by their own standard errors, so that it has a width at an area of 1
    too. Source: Newcombe 2006 (part 2, method 5), with the variance of Hanley and McNeil 1982.

    >>> [round(end, 3) for end in auc_interval(0.9, 50, 50, 0.95)], round(auc_interval(1.0, 3, 3, 0.95)[0], 3)
    ([0.816, 0.946], 0.501)
    """
    z, others = z_of_confidence_level(level), (positives + negatives) / 2 - 1

    def is_near(true: float) -> bool:
        variance = true * (1 - true) * (1 + others * ((1 - true) / (2 - true) + true / (1 + true)))
        return abs(area - true) <= z * math.sqrt(variance / (positives * negatives))

    return _last_within(is_near, area, 0.0), _last_within(is_near, area, 1.0)


def _last_within(is_within: Callable[[float], bool], inside: float, outside: float) -> float:
    """Finds by bisection the last number from `inside` towards `outside` for which `is_within` holds."""
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if is_within(middle) else (inside, middle)
    return inside


def z_of_confidence_level(level: float) -> float:
    """Returns how many standard deviations around the mean hold a normal share `level`: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + level) / 2)
