"""Computes how well scores tell members of a training set from non-members, with intervals."""

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True)
class AttackRate:
    """Holds a share from 0 to 1 with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def attack_auc(scores: Floats, members: NDArray[np.bool_], units: NDArray[np.int64]) -> AttackRate:
    """Returns the area under the ROC curve: how often a member has a higher score than a non-member; ties count half.

    Args:
        scores: a higher one says "member", shape (n,).
        members: which of them were members; both kinds occur. Shape (n,).
        units: the example, or patient, that each score belongs to; scores of one unit depend on one another. Shape (n,).

    Returns:
        Its interval is Clopper and Pearson's, for as many trials as have the variance over units (Obuchowski 1997).

    >>> attack_auc(np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, True, False, False]), np.arange(4)).value
    0.75
    """
    inside, outside = np.sort(scores[members]), np.sort(scores[~members])
    beaten = _share_below(outside, scores[members])
    beating = 1 - _share_below(inside, scores[~members])
    value = float(beaten.mean())
    influence = np.empty(len(scores))
    influence[members] = (beaten - value) / len(inside)
    influence[~members] = (beating - value) / len(outside)
    return _rate_with_interval(value, influence, units, most_trials=len(scores))


def true_positive_rate(
    scores: Floats, members: NDArray[np.bool_], units: NDArray[np.int64], false_positive_rate: float
) -> AttackRate:
    """Returns the share of members found at the threshold with this share of false positives.

    Arguments are as for `attack_auc`. The interval combines Clopper and Pearson's, for at most as many trials as there are
    units, with that of the threshold (order statistics of non-members) by the method of Zou and Donner 2008. Without enough
    non-members to bound the threshold from above, it begins at 0.

    >>> true_positive_rate(np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, True, False, False]), np.arange(4), 0.1).value
    0.5
    """
    from scipy.special import bdtr, bdtrik  # imported late: it takes a while

    outside = np.sort(scores[~members])[::-1]
    num_outside = len(outside)

    def members_above(place: int) -> NDArray[np.bool_]:
        """Returns which members have a higher score than the non-member at this place from the top; -1 is above all."""
        threshold = np.inf if place < 0 else outside[place] if place < num_outside else -np.inf
        above: NDArray[np.bool_] = scores[members] > threshold
        return above

    hits = members_above(math.floor(false_positive_rate * num_outside + 1e-9))
    own_units = units[members]
    influence = (hits - hits.mean()) / len(hits)
    rate = _rate_with_interval(float(hits.mean()), influence, own_units, most_trials=len(np.unique(own_units)))
    if false_positive_rate >= 1:
        return rate
    fewest, most = (
        0
        if bdtr(0, num_outside, false_positive_rate) >= tail
        else math.ceil(bdtrik(tail, num_outside, false_positive_rate))
        for tail in (0.025, 0.975)
    )
    strictest, loosest = float(members_above(fewest - 1).mean()), float(members_above(most).mean())
    low = rate.value - math.hypot(rate.value - rate.low, rate.value - strictest)
    high = rate.value + math.hypot(rate.high - rate.value, loosest - rate.value)
    return AttackRate(rate.value, max(low, 0.0), min(high, 1.0))


def share_of_right_guesses(right: Floats, units: NDArray[np.int64]) -> AttackRate:
    """Returns the mean of 1 for each right guess and 0 for each wrong one; guesses of one unit depend on one another.

    >>> share_of_right_guesses(np.array([1.0, 1.0, 0.0, 1.0]), np.arange(4)).value
    0.75
    """
    value = float(right.mean())
    return _rate_with_interval(value, (right - value) / len(right), units, most_trials=len(np.unique(units)))


def _share_below(ordered: Floats, values: Floats) -> Floats:
    below, up_to = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    share: Floats = (below + up_to) / (2 * len(ordered))
    return share


def _rate_with_interval(value: float, influence: Floats, units: NDArray[np.int64], most_trials: int) -> AttackRate:
    """Returns the rate with the interval of as many independent trials as would have its variance."""
    _, places = np.unique(units, return_inverse=True)
    sums = np.bincount(places, influence)
    num_units = len(sums)
    variance = float((sums**2).sum()) * num_units / max(num_units - 1, 1)
    trials = value * (1 - value) / variance if variance > 0 else float(num_units)
    return AttackRate(value, *_clopper_pearson(value, min(max(trials, 1.0), most_trials)))


def _clopper_pearson(rate: float, trials: float) -> tuple[float, float]:
    """Returns the 95 % interval of a share of `trials`, which need not be a whole number.

    >>> [round(end, 4) for end in _clopper_pearson(0.0, 10)]
    [0.0, 0.3085]
    """
    from scipy.special import betaincinv  # imported late, as in the rest of polyfed: it takes a while

    hits = rate * trials
    low = 0.0 if hits <= 0 else float(betaincinv(hits, trials - hits + 1, 0.025))
    high = 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 0.975))
    return low, high
