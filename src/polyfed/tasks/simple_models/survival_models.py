"""Fits Cox regression with a ridge penalty to rows of numbers, by Newton's method."""

import math
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.evaluation.simple_model import Floats, SimpleModelInputs

_PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)  # that cross-validation tries
_USUAL_PENALTY = 10.0  # with too few events to choose one
_FOLDS = 5
_STEPS = 50  # of Newton's method, at most
_TOLERANCE = 1e-9
_ROUNDING = 1e-6  # probabilities nearer to 0 or 1 are moved to this distance


@final
class _RiskSets(NamedTuple):
    """Holds the risk sets of patients, who are sorted by descending time.

    Attributes:
        events: positions of the patients who had the event.
        end: for each event, the number of patients who are still followed at its time.
        first_tied: for each event, the position in `events` of the first one at the same time.
        num_tied: for each event, the number of events at the same time.
        share: part of the tied events' risks that is left out of the event's risk set; 0 for Breslow's treatment of ties.
    """

    events: NDArray[np.int64]
    end: NDArray[np.int64]
    first_tied: NDArray[np.int64]
    num_tied: NDArray[np.int64]
    share: Floats


def _risk_sets(time: Floats, event: NDArray[np.bool_], *, efron: bool) -> _RiskSets:
    events = np.flatnonzero(event)
    end = np.searchsorted(-time, -time[events], side="right")
    _, first, number = np.unique(-time[events], return_index=True, return_counts=True)
    first_tied, num_tied = np.repeat(first, number), np.repeat(number, number)
    share = (np.arange(len(events)) - first_tied) / num_tied if efron else np.zeros(len(events))
    return _RiskSets(events, end, first_tied, num_tied, share)


def fit_cox_coefficients(x: Floats, targets: Floats, penalty: float, *, efron: bool = True) -> Floats:
    """Fits a Cox regression with this ridge penalty, and returns the coefficients of the log-risk, shape (features,).

    They minimise minus the log partial likelihood, summed over events, plus penalty/2 times their squared length, by
    Newton's method with halved steps.

    Args:
        x: inputs of shape (n, features).
        targets: time and event, shape (n, 2).
        penalty: at least 0; with 0 the minimum need not exist.
        efron: as in `polyfed.tasks.survival_losses.cox_loss`.

    >>> x = np.array([[0.0], [1.0], [0.0], [1.0]])
    >>> fit_cox_coefficients(x, np.array([[4.0, 1], [3.0, 1], [2.0, 1], [1.0, 1]]), 0.0).round(2)
    array([0.94])
    """
    order = np.argsort(-targets[:, 0], kind="stable")
    x = x[order]
    sets = _risk_sets(targets[order, 0], targets[order, 1] > 0.5, efron=efron)
    beta = np.zeros(x.shape[1])
    value, gradient, curvature = _penalised_likelihood(x, sets, beta, penalty)
    for _ in range(_STEPS):
        step = np.linalg.lstsq(curvature, gradient, rcond=None)[0]
        if float(gradient @ step) < _TOLERANCE:
            break
        for halvings in range(30):
            candidate = _penalised_likelihood(x, sets, beta + step / 2**halvings, penalty)
            if candidate[0] > value:
                beta = beta + step / 2**halvings
                value, gradient, curvature = candidate
                break
        else:
            break
    return beta


def _penalised_likelihood(x: Floats, sets: _RiskSets, beta: Floats, penalty: float) -> tuple[float, Floats, Floats]:
    """Returns the penalised log partial likelihood, its gradient, and minus its matrix of second derivatives."""
    log_risk = x @ beta
    log_risk = log_risk - log_risk.max(initial=-math.inf)
    risk = np.exp(log_risk)
    events, end, first, number, share = sets
    weighted = risk[:, None] * x
    # Sums over the risk set of each event, without the share of those who have the event at the same time.
    tied_risk, tied_sums = (
        np.concatenate([np.zeros((1, *v.shape[1:])), np.cumsum(v[events], axis=0)]) for v in (risk, weighted)
    )
    totals = np.cumsum(risk)[end - 1] - share * (tied_risk[first + number] - tied_risk[first])
    sums = np.cumsum(weighted, axis=0)[end - 1] - share[:, None] * (tied_sums[first + number] - tied_sums[first])
    totals = np.maximum(totals, np.finfo(float).tiny)
    means = sums / totals[:, None]
    # How much each patient counts: the expected number of events.
    counts = np.zeros(len(x) + 1)
    np.add.at(counts, end - 1, 1 / totals)
    counts = np.cumsum(counts[:-1][::-1])[::-1].copy()
    left_out = np.concatenate([[0.0], np.cumsum(share / totals)])
    counts[events] -= left_out[first + number] - left_out[first]
    expected = risk * counts
    value = float(log_risk[events].sum() - np.log(totals).sum() - 0.5 * penalty * beta @ beta)
    gradient = x[events].sum(axis=0) - expected @ x - penalty * beta
    return value, gradient, (x.T * expected) @ x - means.T @ means + penalty * np.eye(x.shape[1])


def log_partial_likelihood(x: Floats, targets: Floats, beta: Floats, *, efron: bool = True) -> float:
    """Returns Cox's log partial likelihood of the coefficients `beta`, summed over events."""
    order = np.argsort(-targets[:, 0], kind="stable")
    sets = _risk_sets(targets[order, 0], targets[order, 1] > 0.5, efron=efron)
    return _penalised_likelihood(x[order], sets, beta, 0.0)[0]


def choose_penalty(table: SimpleModelInputs, seed: int, *, efron: bool = True) -> float:
    """Returns the ridge penalty with the highest cross-validated partial likelihood (Verweij and van Houwelingen 1993).

    A fold counts by the likelihood of all patients minus that of the others, with the coefficients of the others. Folds
    have like numbers of events, or whole groups. With fewer than five events it is the usual penalty.
    """
    y = table.y.astype(np.float64)
    if int(y[:, 1].sum()) < _FOLDS:
        return _USUAL_PENALTY
    generator = np.random.default_rng(seed)
    if table.groups is None:
        rows = generator.permutation(len(y))
        fold = np.empty(len(y), dtype=np.int64)
        fold[rows[np.argsort(-y[rows, 1], kind="stable")]] = np.arange(len(y)) % _FOLDS
    else:
        names, member = np.unique(table.groups, return_inverse=True)
        fold = (generator.permutation(len(names)) % _FOLDS)[member]

    def cross_validated(penalty: float) -> float:
        total = 0.0
        for k in range(_FOLDS):
            others = fold != k
            beta = fit_cox_coefficients(table.fit[others], y[others], penalty, efron=efron)
            total += log_partial_likelihood(table.fit, y, beta, efron=efron)
            total -= log_partial_likelihood(table.fit[others], y[others], beta, efron=efron)
        return total

    return max(_PENALTIES, key=cross_validated)


def fit_cross_validated_cox_coefficients(table: SimpleModelInputs, seed: int, *, efron: bool = True) -> Floats:
    """Fits Cox regression with a cross-validated ridge penalty; returns coefficients, (features,).

    They are 0, all risks alike, without an event.
    """
    y = table.y.astype(np.float64)
    if not y[:, 1].any() or not table.fit.shape[1]:
        return np.zeros(table.fit.shape[1])
    return fit_cox_coefficients(table.fit, y, choose_penalty(table, seed, efron=efron), efron=efron)


def hazard_logits_of_cox(table: SimpleModelInputs, beta: Floats, cuts: Floats) -> Floats:
    """Returns test examples' hazards by interval as logits, from Cox coefficients `beta`.

    The baseline is Breslow's (1974), of the examples for fitting: H(t) = sum over events until t of 1 / sum of risks.

    Returns:
        Shape (test examples, intervals).
    """
    time, event = table.y[:, 0].astype(np.float64), table.y[:, 1] > 0.5
    log_risk = table.fit @ beta
    largest = float(log_risk.max())
    order = np.argsort(-time, kind="stable")
    events = np.flatnonzero(event[order])
    followed = np.searchsorted(-time[order], -time[order][events], side="right")
    steps = 1 / np.cumsum(np.exp(log_risk[order] - largest))[followed - 1]
    baseline = np.array([steps[time[order][events] <= cut].sum() for cut in cuts])
    in_interval = np.diff(baseline, prepend=0.0) * np.exp(table.test @ beta - largest)[:, None]
    hazard = np.clip(-np.expm1(-in_interval), _ROUNDING, 1 - _ROUNDING)
    return np.asarray(np.log(hazard) - np.log1p(-hazard))
