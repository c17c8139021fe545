"""Computes jackknife pseudo-values of groups of test examples, such as the recordings of one patient.

Examples of a group resemble one another, so that n examples of G groups say little more than G independent examples. The
delete-a-group jackknife leaves out one group at a time: the pseudo-value of group g is G·A − (G − 1)·A₍₋g₎, A being the
score of all examples. The variance of the G pseudo-values covers any dependence within groups (Quenouille 1956; for the
AUC of clustered data see Obuchowski 1997). With one example a group these are the pseudo-values of the module `jackknife`.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.evaluation.metric import Metric
from polyfed.tasks.scores.score_functions import split_into_binary_problems

Values = NDArray[np.float64]
Groups = NDArray[np.int64]
_PAIRS = 1_000_000  # positive x negative examples up to which all pairs are compared at once


def assign_group_numbers(groups: NDArray[Any] | None, num_examples: int) -> Groups | None:
    """Returns the group of each example as a number from 0; None if every example is the only one of its group.

    >>> assign_group_numbers(np.array([7, 9, 7]), 3), assign_group_numbers(np.array([7, 9, 8]), 3)
    (array([0, 1, 0]), None)
    """
    if groups is None:
        return None
    different, numbers = np.unique(groups, return_inverse=True)
    return None if len(different) == num_examples else numbers


def jackknife_pseudo_values_by_group(
    metric: Metric, outputs: Tensor, targets: Tensor, groups: Groups, max_blocks: int, classes: Tensor
) -> tuple[float, Values]:
    """Returns the score of outputs, and a pseudo-value (contribution) of each group of examples.

    Args:
        metric: the score.
        outputs, targets: of the n examples.
        groups: from `assign_group_numbers`, shape (n,).
        max_blocks: number of blocks of groups that are left out in turn, for metrics without a closed form.
        classes: of the examples, within which they vary, or the targets; each block gets its share of them.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> outputs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> targets, groups = torch.tensor([0, 1, 1]), np.array([0, 0, 1])
    >>> jackknife_pseudo_values_by_group(METRICS["accuracy"], outputs, targets, groups, 50, targets)
    (0.666..., array([0.333..., 0.833...]))
    """
    count = int(groups.max()) + 1
    if metric.per_example is not None:
        values = np.asarray(metric.per_example(outputs, targets), dtype=np.float64)
        score, without = float(values.mean()), _ratio_without_groups(values, np.ones(len(values)), groups)
    elif metric.name == "auc":
        score, without = _auc_without_groups(outputs, targets, groups)
    elif metric.name == "r2":
        score, without = _r2_without_groups(outputs, targets, groups)
    else:
        groups = block_of_each_group(classes, groups, max_blocks)[groups]
        count = int(groups.max()) + 1
        score = metric(outputs, targets)
        rests = [torch.from_numpy(np.flatnonzero(groups != group)) for group in range(count)]
        without = np.array([metric(outputs[rest], targets[rest]) for rest in rests], dtype=np.float64)
    return score, count * score - (count - 1) * without


def classes_of_groups(targets: Tensor, groups: Groups) -> NDArray[np.int64]:
    """Returns the class of each group if every group has examples of one class only; otherwise 0 for all groups."""
    none = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    if targets.dim() != 1 or targets.is_floating_point():
        return none
    labels, least, largest = np.asarray(targets.numpy()), np.full(len(none), np.iinfo(np.int64).max), none.copy()
    np.minimum.at(least, groups, labels)
    np.maximum.at(largest, groups, labels)
    return largest if bool((least == largest).all()) else none


def count_groups_of_classes(positive: NDArray[np.bool_], groups: Groups) -> tuple[int, int]:
    """Returns two numbers: how many groups have a positive example, and how many have a negative one."""
    return len(np.unique(groups[positive])), len(np.unique(groups[~positive]))


def _sum_by_group(values: Values, groups: Groups) -> Values:
    return np.asarray(np.bincount(groups, weights=values, minlength=int(groups.max()) + 1), dtype=np.float64)


def _ratio_without_groups(numerator: Values, denominator: Values, groups: Groups) -> Values:
    """Returns, for each group, the ratio of the sums over all other examples."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = numerator.sum() - _sum_by_group(numerator, groups)
        return np.asarray(rest / (denominator.sum() - _sum_by_group(denominator, groups)))


def _auc_without_groups(outputs: Tensor, targets: Tensor, groups: Groups) -> tuple[float, Values]:
    """Returns the AUC, averaged over two-class problems, and the same without each group.

    The AUC is the share of pairs of a positive and a negative example that are ranked correctly. Without a group, the pairs
    of its examples with all others are missing; those within the group are in both of these sums, and are added once.
    """
    count = int(groups.max()) + 1
    if not bool(torch.isfinite(outputs).all()):
        return math.nan, np.full(count, np.nan)
    areas, withouts = [], []
    for score, positive in split_into_binary_problems(outputs, targets):
        wins = count_wins(score[positive], score[~positive])
        of_positive, of_negative = groups[positive], groups[~positive]
        wins_of_group = np.bincount(of_positive, weights=wins[0], minlength=count)
        wins_of_group += np.bincount(of_negative, weights=wins[1], minlength=count)
        for group in np.intersect1d(of_positive, of_negative):
            scores_of_group = score[positive][of_positive == group], score[~positive][of_negative == group]
            wins_of_group[group] -= count_wins(*scores_of_group)[0].sum()
        pairs = (int(positive.sum()) - np.bincount(of_positive, minlength=count)) * (
            int((~positive).sum()) - np.bincount(of_negative, minlength=count)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            areas.append(float(wins[0].sum() / (positive.sum() * (~positive).sum())))
            withouts.append((wins[0].sum() - wins_of_group) / pairs)
    if not areas:
        return math.nan, np.full(count, np.nan)
    return float(np.mean(areas)), np.mean(withouts, axis=0)


def count_wins(positive: Values, negative: Values) -> tuple[Values, Values]:
    """Returns each positive's negatives ranked below it, and the reverse; ties count half."""
    if len(positive) * len(negative) <= _PAIRS:
        difference = positive[:, None] - negative
        table = (difference > 0) + 0.5 * (difference == 0)
        return table.sum(axis=1), table.sum(axis=0)
    ordered_negative, ordered_positive = np.sort(negative), np.sort(positive)
    below = np.searchsorted(ordered_negative, positive) + np.searchsorted(ordered_negative, positive, side="right")
    not_above = np.searchsorted(ordered_positive, negative) + np.searchsorted(ordered_positive, negative, side="right")
    return below / 2, len(positive) - not_above / 2


def _r2_without_groups(outputs: Tensor, targets: Tensor, groups: Groups) -> tuple[float, Values]:
    """Returns R² = 1 − Σe²/Σ(y − ȳ)², and the same without each group."""
    y = np.asarray(targets.double().numpy()).reshape(len(targets), -1)
    errors = ((y - np.asarray(outputs.double().numpy()).reshape(len(y), -1)) ** 2).sum(axis=1)
    centred = y - y.mean(axis=0)
    squares = (centred**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        remaining = len(y) - np.bincount(groups)
        sums = np.stack([_sum_by_group(column, groups) for column in centred.T])  # the sums over all are 0
        spread = squares.sum() - _sum_by_group(squares, groups) - (sums**2).sum(axis=0) / remaining
        without = 1 - (errors.sum() - _sum_by_group(errors, groups)) / spread
        return float(1 - errors.sum() / squares.sum()), np.asarray(without)


def block_of_each_group(classes: Tensor, groups: Groups, max_blocks: int) -> Groups:
    """Returns the block of each group, of at most `max_blocks`, each with its share of groups of small and large classes."""
    count = int(groups.max()) + 1
    flat = np.asarray(classes.double().numpy()).reshape(len(classes), -1).mean(axis=1)
    block: Groups = np.arange(count)
    if count > max_blocks:
        block[np.argsort(_sum_by_group(flat, groups) / np.bincount(groups), kind="stable")] = (
            np.arange(count) % max_blocks
        )
    return block
