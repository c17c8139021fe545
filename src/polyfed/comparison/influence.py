"""What each test example contributes to a score: jackknife pseudo-values, for any metric.

The pseudo-value of example j is n·A − (n − 1)·A₍₋ⱼ₎, A being the score of all n examples and A₍₋ⱼ₎ that without example j
(Quenouille 1956, Tukey 1958). Their mean is A up to a bias of order 1/n, and their variance says how far A varies with
the draw of the examples. For a mean of one value an example they are these values; for the AUC they give the variance of
DeLong et al. (1988) times m/(m − 1) in each class of m examples.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.metrics import Metric, binary_columns

GROUPS = 50
"""Scores without a closed form are computed again without each example, or, of more examples than these, without each of
so many groups."""
_PAIRS = 40_000  # up to which comparing all is faster than ranking
Values = NDArray[np.float64]


def pseudo_values(metric: Metric, outputs: Tensor, targets: Tensor) -> tuple[float, Values] | None:
    """The score, and one value an example, shape (n,), or one a group of examples, shape (GROUPS,), for n examples.

    Groups depend on the targets alone, so that the values of two networks on the same examples can be compared one by one.

    Returns:
        None if the score, or that without one of the examples, is not defined: an AUC with one positive example, say.

    >>> from polyfed.core.metrics import METRICS
    >>> outputs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> pseudo_values(METRICS["accuracy"], outputs, torch.tensor([0, 1, 1]))
    (0.666..., array([1., 0., 1.]))
    """
    if metric.parts is not None:
        found = np.asarray(metric.parts(outputs, targets), dtype=np.float64)
        score = float(found.mean())
    elif metric.name == "auc":
        score, found = _of_auc(outputs, targets)
    elif metric.name == "r2":
        score, found = _of_r2(outputs, targets)
    else:
        score, found = _left_out(metric, outputs, targets)
    return (score, found) if len(found) > 1 and bool(np.isfinite([score, *found]).all()) else None


def strata(metric: Metric, targets: Tensor) -> NDArray[np.int64]:
    """The class of what each pseudo-value stands for, where the score is made within classes; 0 for all otherwise."""
    n = len(targets)
    if metric.parts is None and n <= GROUPS and targets.dim() == 1 and not targets.is_floating_point():
        return np.asarray(targets.numpy(), dtype=np.int64)
    if metric.name == "auc" and targets.dim() == 1:
        return np.asarray(targets.numpy(), dtype=np.int64)
    return np.zeros(n if metric.parts is not None or metric.name in ("auc", "r2") else min(n, GROUPS), dtype=np.int64)


def _of_auc(outputs: Tensor, targets: Tensor) -> tuple[float, Values]:
    """Of the mean over two-class problems. Without the positive example j, which beats the share p_j of the negatives, the
    AUC of m positives is (m·A − p_j)/(m − 1)."""
    if not bool(torch.isfinite(outputs).all()):
        return math.nan, np.full(len(targets), np.nan)
    from scipy.stats import rankdata  # takes half a second to import

    found, areas = [], []
    for score, positive in binary_columns(outputs, targets):
        n, m, q = len(score), int(positive.sum()), int((~positive).sum())
        beaten = np.empty(n)  # the share of the other class that the example is on the right side of, ties by half
        if m * q <= _PAIRS:
            above = score[positive][:, None] - score[~positive]
            wins = (above > 0) + 0.5 * (above == 0)
            beaten[positive], beaten[~positive] = wins.mean(axis=1), wins.mean(axis=0)
        else:
            ranks = rankdata(score)
            beaten[positive] = (ranks[positive] - rankdata(score[positive])) / q
            beaten[~positive] = 1 - (ranks[~positive] - rankdata(score[~positive])) / m
        area, size = float(beaten[positive].mean()), np.where(positive, m, q)
        with np.errstate(divide="ignore", invalid="ignore"):
            without = (size * area - beaten) / (size - 1)
        areas.append(area)
        found.append(n * area - (n - 1) * without)
    if not found:
        return math.nan, np.full(len(targets), np.nan)
    return float(np.mean(areas)), np.mean(found, axis=0)


def _of_r2(outputs: Tensor, targets: Tensor) -> tuple[float, Values]:
    """1 − Σe²/Σ(y − ȳ)², without one example after the other."""
    y = np.asarray(targets.double().numpy()).reshape(len(targets), -1)
    squared = ((y - np.asarray(outputs.double().numpy()).reshape(len(y), -1)) ** 2).sum(axis=1)
    from_mean = ((y - y.mean(axis=0)) ** 2).sum(axis=1)
    n, errors, spread = len(y), squared.sum(), from_mean.sum()
    if n < 3:
        return math.nan, np.full(n, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        without = 1 - (errors - squared) / (spread - n / (n - 1) * from_mean)
        score = 1 - errors / spread
        return float(score), np.asarray(n * score - (n - 1) * without)


def _left_out(metric: Metric, outputs: Tensor, targets: Tensor) -> tuple[float, Values]:
    n = len(targets)
    groups = min(n, GROUPS)
    order = np.arange(n)
    if targets.dim() == 1 and n > GROUPS:  # each group with its share of the classes, or of small and large values
        order = np.argsort(targets.numpy(), kind="stable")
    group_of = np.empty(n, dtype=np.int64)
    group_of[order] = np.arange(n) % groups
    whole = metric(outputs, targets)
    found = []
    for group in range(groups):
        kept = torch.from_numpy(np.flatnonzero(group_of != group))
        found.append(groups * whole - (groups - 1) * metric(outputs[kept], targets[kept]))
    return whole, np.asarray(found, dtype=np.float64)
