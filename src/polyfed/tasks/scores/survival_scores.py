"""Scores predictions of survival: concordance of risks with times, and the Brier score of survival curves.

Targets are (time, event) of each patient, shape (n, 2), with event 1, or 0 for a patient who was censored at this time.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.evaluation.simple_model import Floats

_BLOCK = 4_000_000  # pairs of patients that are compared at a time


def read_times_and_events(targets: Tensor) -> tuple[Floats, NDArray[np.bool_]]:
    """Splits survival targets into times (float64) and whether each ended with the event, both of shape (n,)."""
    values = np.asarray(targets.double().cpu().numpy())
    return values[:, 0], values[:, 1] > 0.5


def survival_of_logits(logits: Tensor) -> Floats:
    """Returns survival until each interval's end from hazards' logits, (n, intervals).

    It falls from left to right: the product of 1 - hazard.
    """
    scores = np.asarray(logits.double().cpu().numpy())
    return np.asarray(np.exp(np.cumsum(-np.logaddexp(0.0, scores), axis=1)))


def risk_of_outputs(outputs: Tensor) -> Floats:
    """Returns a number per patient, higher for earlier events, shape (n,).

    A single output is the risk itself. Hazards in intervals give minus the expected number of intervals without the event.
    """
    if outputs.shape[1] == 1:
        return np.asarray(outputs[:, 0].double().cpu().numpy())
    return np.asarray(-survival_of_logits(outputs).sum(axis=1))


def c_index(outputs: Tensor, targets: Tensor) -> float:
    """Returns Harrell's C-index, the share of comparable pairs that are ranked correctly.

    Of a comparable pair one patient is known to have had the event first.

    Equal risks count half. Pairs with the event at the same time are not compared; a patient who was censored at the time
    of the other's event counts as later. NaN without such a pair. Source: Harrell et al. 1982.

    >>> import torch
    >>> c_index(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([[1.0, 1], [3.0, 1], [2.0, 0]]))
    1.0
    """
    time, event = read_times_and_events(targets)
    return _weighted_concordance(risk_of_outputs(outputs), time, event, np.ones(len(time)))


def uno_c_index(outputs: Tensor, targets: Tensor) -> float:
    """Returns Uno's C-index, with weights 1/p² of pairs.

    p is the probability of not being censored before the earlier event.

    This probability is the Kaplan-Meier estimate from the same patients, so that heavy censoring late in a study does not
    favour early events. Source: Uno et al. 2011. NaN as for `c_index`.
    """
    time, event = read_times_and_events(targets)
    uncensored = _probability_uncensored(time, event, time)
    weights = np.divide(1.0, uncensored**2, out=np.zeros(len(time)), where=event & (uncensored > 0))
    return _weighted_concordance(risk_of_outputs(outputs), time, event, weights)


def _weighted_concordance(risk: Floats, time: Floats, event: NDArray[np.bool_], weights: Floats) -> float:
    """Returns the weighted share of concordant pairs; `weights` are those of the earlier patient of a pair."""
    if not np.isfinite(risk).all():
        return math.nan
    concordant = compared = 0.0
    first = np.flatnonzero(event)
    for rows in np.array_split(first, max(1, len(first) * len(time) // _BLOCK)):
        later = (time > time[rows, None]) | ((time == time[rows, None]) & ~event)
        wins = (risk[rows, None] > risk) + 0.5 * (risk[rows, None] == risk)
        compared += float(weights[rows] @ later.sum(axis=1))
        concordant += float(weights[rows] @ (wins * later).sum(axis=1))
    return concordant / compared if compared > 0 else math.nan


def kaplan_meier(time: Floats, event: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Returns event times, ascending, and the Kaplan-Meier survival from each on.

    Both have shape (different times,). Source: Kaplan and Meier 1958.

    >>> kaplan_meier(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, True]))
    (array([1., 3., 4.]), array([0.75 , 0.375, 0.   ]))
    """
    times, events = np.unique(time[event], return_counts=True)
    at_risk = len(time) - np.searchsorted(np.sort(time), times)
    return times, np.asarray(np.cumprod(1 - events / at_risk), dtype=np.float64)


def value_of_step_curve(times: Floats, values: Floats, at: Floats, *, just_before: bool = False) -> Floats:
    """Evaluates a curve, 1 at first and `values` from `times` on, at the times `at` or just before them."""
    steps = np.searchsorted(times, at, side="left" if just_before else "right")
    return np.concatenate([[1.0], values])[steps]


def _probability_uncensored(time: Floats, event: NDArray[np.bool_], at: Floats) -> Floats:
    """Returns the probability of not being censored before the times `at`.

    A censored patient is at risk of censoring after those who had the event at the same time.
    """
    times, number = np.unique(time[~event], return_counts=True)
    ordered, ordered_events = np.sort(time), np.sort(time[event])
    num_before = np.searchsorted(ordered, times) + (
        np.searchsorted(ordered_events, times, side="right") - np.searchsorted(ordered_events, times)
    )
    return value_of_step_curve(times, np.cumprod(1 - number / (len(time) - num_before)), at, just_before=True)


def integrated_brier(logits: Tensor, targets: Tensor, cuts: Sequence[float]) -> float:
    """Returns the Brier score of survival, averaged until the last observed interval's end.

    The score at a time is the mean squared difference between the predicted probability of survival and survival (1 or 0),
    in which patients count by the inverse probability, from the same patients, of not being censored (Graf et al. 1999).
    It is 0 at time 0, is computed at the end of each interval before the last observed time, and is linear between.

    Returns:
        A number of at least 0, lower for better curves; NaN if no interval ends before the last observed time.
    """
    time, event = read_times_and_events(targets)
    survival, ends = survival_of_logits(logits), np.asarray(cuts, dtype=np.float64)
    is_observed = ends < time.max()
    if not is_observed.any() or not np.isfinite(survival).all():
        return math.nan
    survival, ends = survival[:, is_observed], ends[is_observed]
    at_event = _probability_uncensored(time, event, time)
    at_end = _probability_uncensored(time, event, np.nextafter(ends, np.inf))
    died = (time[:, None] <= ends) & event[:, None]
    alive = time[:, None] > ends
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.where(died, survival**2 / at_event[:, None], 0) + np.where(alive, (1 - survival) ** 2 / at_end, 0)
    by_time = np.concatenate([[0.0], scores.mean(axis=0)])
    grid = np.concatenate([[0.0], ends])
    # The trapezoidal rule; NumPy calls it `trapz` before version 2 and `trapezoid` from there.
    area = (np.diff(grid) * (by_time[1:] + by_time[:-1]) / 2.0).sum()
    return float(area / grid[-1])
