"""What predictions of yes or no are worth: ROC curves, counts at a threshold, and calibration, as plain numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Part = tuple[Floats, Bools]
"""Of n examples: probabilities of yes, and whether it is yes; each of shape (n,)."""

THRESHOLDS = np.arange(1, 100) / 100
GRID = np.arange(61) / 60  # shares of false alarms at which a ROC curve is known; 5, 10 and 20 % are among them
_FEWEST = 10  # examples of a point of a calibration curve
_POINTS = 10


@final
@dataclass(frozen=True)
class Group:
    """A point of a calibration curve: mean probability of its examples, share that is yes with its interval, and how many
    examples it has (mean over the parts)."""

    predicted: float
    observed: float
    low: float
    high: float
    examples: float


def roc(part: Part) -> tuple[Floats, float] | None:
    """Sensitivity at the shares of false alarms `GRID`, shape (61,), and the area under the curve; None if all examples are
    yes, or all no. Examples of the same probability are decided together.

    >>> curve, area = roc((np.array([0.9, 0.8, 0.3, 0.1]), np.array([True, False, True, False])))
    >>> curve[[0, 30]].tolist(), area
    ([0.5, 1.0], 0.75)
    """
    score, positive = part
    yes = int(positive.sum())
    no = len(positive) - yes
    if not yes or not no:
        return None
    order = np.argsort(-score, kind="stable")
    last = np.append(np.flatnonzero(np.diff(score[order])), len(order) - 1)  # of each group of equals
    found = np.concatenate([[0], np.cumsum(positive[order])[last]]) / yes
    alarms = np.concatenate([[0], np.cumsum(~positive[order])[last]]) / no
    at = np.minimum(np.searchsorted(alarms, GRID + 1e-12, side="right") - 1, len(alarms) - 2)
    width = alarms[at + 1] - alarms[at]
    share = np.divide(GRID - alarms[at], width, out=np.zeros_like(GRID), where=width > 0)
    curve = np.where(GRID >= 1, 1.0, found[at] + np.clip(share, 0, 1) * (found[at + 1] - found[at]))
    return curve, float(np.sum(np.diff(alarms) * (found[1:] + found[:-1]) / 2))


def counts(part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Yes and no examples that are called yes at each of `THRESHOLDS`: those whose probability is at least the threshold.

    >>> hits, alarms = counts((np.array([0.9, 0.2]), np.array([True, False])))
    >>> hits[[9, 89, 90]].tolist(), alarms[[9, 89]].tolist()
    ([1, 1, 0], [1, 0])
    """
    score, positive = part
    reached = score[:, None] >= THRESHOLDS[None] - 1e-12
    return reached[positive].sum(axis=0), reached[~positive].sum(axis=0)


def calibration(parts: Sequence[Part], level: float) -> list[Group]:
    """Examples in up to ten groups of equal size by their probability; fewer than 20 examples give none.

    Args:
        parts: one a seed. They are of the same examples, so that an interval counts those of one part.
        level: of Wilson's intervals.
    """
    score = np.concatenate([part[0] for part in parts])
    positive = np.concatenate([part[1] for part in parts])
    size = len(score) / len(parts)
    number = min(_POINTS, int(size // _FEWEST))
    if number < 2:
        return []
    order = np.argsort(score, kind="stable")
    groups = []
    for rows in np.array_split(order, number):
        share, examples = float(positive[rows].mean()), len(rows) / len(parts)
        low, high = wilson(share * examples, examples, level)
        groups.append(Group(float(score[rows].mean()), share, low, high, examples))
    return groups


def wilson(hits: float, examples: float, level: float) -> tuple[float, float]:
    """Interval of a share (Wilson 1927); NaN without examples.

    >>> [round(end, 3) for end in wilson(8, 10, 0.95)]
    [0.49, 0.943]
    """
    if examples <= 0:
        return math.nan, math.nan
    z2 = normal(level) ** 2
    share = hits / examples
    middle = (share + z2 / (2 * examples)) / (1 + z2 / examples)
    half = math.sqrt(z2 * (share * (1 - share) / examples + z2 / (4 * examples**2))) / (1 + z2 / examples)
    return max(0.0, middle - half), min(1.0, middle + half)


def area_interval(area: float, yes: float, no: float, level: float) -> tuple[float, float]:
    """Interval of an area under a ROC curve by the number of examples (Hanley and McNeil 1982), within 0 and 1.

    >>> [round(end, 3) for end in area_interval(0.9, 50, 50, 0.95)]
    [0.837, 0.963]
    """
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (yes - 1) * (first - area**2) + (no - 1) * (second - area**2)
    half = normal(level) * math.sqrt(max(variance, 0.0) / (yes * no))
    return max(0.0, area - half), min(1.0, area + half)


def normal(level: float) -> float:
    """How many standard deviations an interval of a level reaches to each side."""
    return NormalDist().inv_cdf((1 + level) / 2)
