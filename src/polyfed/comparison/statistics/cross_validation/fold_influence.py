"""Computes the score of a method from cross-validation, and how much each test example and each fold contributes to it.

In k-fold cross-validation every example is tested once, by the network whose training did not have it. The score is that of
one network, averaged over the k networks: for an AUC, pairs of examples are compared within a fold only, since outputs of
two networks have no common scale, and folds count by their number of pairs (LeDell et al. 2015); R² takes the errors of all
folds together; all other metrics are means over folds, weighed by examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.pseudo_values.cluster_jackknife import count_wins
from polyfed.comparison.statistics.pseudo_values.jackknife import FloatArray
from polyfed.core.evaluation.metric import Metric
from polyfed.tasks.scores.score_functions import split_into_binary_problems

_MIXED = -1  # class of a unit with examples of several classes


@final
@dataclass(frozen=True, eq=False)
class FoldScores:
    """Holds the cross-validated scores of one method at one client, one for each repeat of the folds.

    A unit is what is drawn independently: an example, or all examples of one group (the rows of a patient).

    Attributes:
        metric: the metric.
        values: score of each repeat of the cross-validation, shape (R,).
        folds: contribution of each fold, shape (R, K); its mean over a repeat is the repeat's score.
        influence: influence of each unit on the repeat's score within its fold, shape (R, G). Their sum of squares
            estimates the variance of the score due to test examples.
        classes: class of each unit, shape (G,).
        min_example_variance: lower bound of the variance due to test examples.
        is_share_of_examples: True if the score is a share of examples that are right, and every unit is one example.
    """

    metric: Metric
    values: FloatArray
    folds: FloatArray
    influence: FloatArray
    classes: NDArray[np.int64]
    min_example_variance: float
    is_share_of_examples: bool = False


@final
@dataclass(frozen=True, eq=False)
class _JoinedFolds:
    """Holds the test examples of one repeat, joined over its folds: outputs, targets, fold and unit of each."""

    outputs: Tensor
    targets: Tensor
    fold: NDArray[np.int64]
    unit: NDArray[np.int64]
    num_folds: int


_Parts = tuple[float, FloatArray, FloatArray]  # score, contribution of each fold, influence of each row within its fold


def score_folds(
    metric: Metric, outputs: Sequence[Tensor], targets: Sequence[Tensor], units: Sequence[NDArray[Any]], num_folds: int
) -> FoldScores | None:
    """Computes a method's cross-validated scores at a client; None if undefined.

    Args:
        metric: the metric.
        outputs: of the network of each run on its test examples; runs are ordered by repeat, then by fold.
        targets: of the same examples.
        units: name of the unit of each of these examples.
        num_folds: folds of a repeat.

    Returns:
        None where the score is not defined: an AUC without a fold in which both classes are tested, say.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> right, labels = torch.eye(2), torch.tensor([0, 1])
    >>> names = [np.array(["a", "b"]), np.array(["c", "d"])]
    >>> score_folds(METRICS["accuracy"], [right, right.flip(0)], [labels, labels], names, 2).values
    array([0.5])
    """
    names = np.unique(np.concatenate(units[:num_folds]))
    scores, contributions, influences = [], [], []
    for start in range(0, len(outputs), num_folds):
        part = slice(start, start + num_folds)
        rows = _join_folds(outputs[part], targets[part], units[part], names)
        if rows is None or not bool(torch.isfinite(rows.outputs).all()):
            return None
        parts = _score_and_influences(metric, rows)
        if parts is None or not np.isfinite(parts[0]):
            return None
        score, contribution, influence = parts
        scores.append(score)
        contributions.append(contribution)
        influences.append(np.bincount(rows.unit, influence, len(names)))
    assert rows is not None
    return FoldScores(
        metric,
        np.array(scores),
        np.array(contributions),
        np.array(influences),
        _classes_of_units(metric, rows, len(names)),
        _min_example_variance(metric, rows, len(names)),
        _is_share(metric) and len(names) == len(rows.unit),
    )


def _join_folds(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], units: Sequence[NDArray[Any]], names: NDArray[Any]
) -> _JoinedFolds | None:
    unit_names = np.concatenate(units)
    unit = np.searchsorted(names, unit_names)
    if unit.max(initial=0) >= len(names) or not bool((names[unit] == unit_names).all()):
        return None  # another repeat tested other examples
    fold = np.repeat(np.arange(len(outputs)), [len(fold_targets) for fold_targets in targets])
    return _JoinedFolds(torch.cat(list(outputs)), torch.cat(list(targets)), fold, unit, len(outputs))


def _score_and_influences(metric: Metric, rows: _JoinedFolds) -> _Parts | None:
    if metric.per_example is not None:
        return _mean_in_folds(np.asarray(metric.per_example(rows.outputs, rows.targets), dtype=np.float64), rows)
    if metric.name == "auc":
        problems = split_into_binary_problems(rows.outputs, rows.targets)
        parts = [_auc_in_folds(score, positive, rows) for score, positive in problems]
        defined = [part for part in parts if part is not None]
        if not defined:
            return None
        return (
            float(np.mean([score for score, _, _ in defined])),
            np.mean([folds for _, folds, _ in defined], axis=0),
            np.mean([influence for _, _, influence in defined], axis=0),
        )
    return _r2_in_folds(rows) if metric.name == "r2" else _mean_of_fold_scores(metric, rows)


def _mean_in_folds(values: FloatArray, rows: _JoinedFolds) -> _Parts:
    score = float(values.mean())
    return score, *_fold_and_row_parts((values - score) / len(values), score, rows)


def _fold_and_row_parts(influence: FloatArray, score: float, rows: _JoinedFolds) -> tuple[FloatArray, FloatArray]:
    """Splits influences, which sum to 0, into the contribution of each fold and the influence of rows within their fold."""
    sums = np.bincount(rows.fold, influence, rows.num_folds)
    sizes = np.bincount(rows.fold, minlength=rows.num_folds)
    within = influence - (sums / np.maximum(sizes, 1))[rows.fold]
    contributions = np.asarray(score + rows.num_folds * sums, dtype=np.float64)
    return contributions, within * _correction_of_rows(np.zeros(len(rows.fold), bool), rows)


def _correction_of_rows(positive: NDArray[np.bool_], rows: _JoinedFolds) -> FloatArray:
    """Returns each row's factor √(G/(G − K)) for the means of K folds (and classes) of G units."""
    factor = np.empty(len(positive))
    for inside in (positive, ~positive):
        units = len(np.unique(rows.unit[inside]))
        factor[inside] = np.sqrt(units / max(units - rows.num_folds, 1))
    return factor


def _auc_in_folds(score: FloatArray, positive: NDArray[np.bool_], rows: _JoinedFolds) -> _Parts | None:
    wins, pairs = np.zeros(len(score)), np.zeros(len(score))
    wins_of_fold, pairs_of_fold = np.zeros(rows.num_folds), np.zeros(rows.num_folds)
    for k in range(rows.num_folds):
        above, below = np.flatnonzero((rows.fold == k) & positive), np.flatnonzero((rows.fold == k) & ~positive)
        if len(above) and len(below):
            wins[above], wins[below] = count_wins(score[above], score[below])
            pairs[above], pairs[below] = len(below), len(above)
            wins_of_fold[k], pairs_of_fold[k] = wins[above].sum(), len(above) * len(below)
    total = pairs_of_fold.sum()
    if not total:
        return None
    area = float(wins_of_fold.sum() / total)
    fold_area = np.divide(wins_of_fold, pairs_of_fold, out=np.full(rows.num_folds, area), where=pairs_of_fold > 0)
    contributions = area + rows.num_folds * (wins_of_fold - area * pairs_of_fold) / total
    within = (wins - fold_area[rows.fold] * pairs) / total
    return area, contributions, within * _correction_of_rows(positive, rows)


def _r2_in_folds(rows: _JoinedFolds) -> _Parts | None:
    targets = np.asarray(rows.targets.double().numpy()).reshape(len(rows.fold), -1)
    squared = ((targets - np.asarray(rows.outputs.double().numpy()).reshape(len(targets), -1)) ** 2).sum(axis=1)
    from_mean = ((targets - targets.mean(axis=0)) ** 2).sum(axis=1)
    if len(targets) < 3 or not from_mean.sum():
        return None
    score = float(1 - squared.sum() / from_mean.sum())
    return score, *_fold_and_row_parts((-squared + (1 - score) * from_mean) / from_mean.sum(), score, rows)


def _mean_of_fold_scores(metric: Metric, rows: _JoinedFolds) -> _Parts | None:
    """Scores each fold and each unit's influence on its own fold; folds without a score do not count."""
    scores, within = np.full(rows.num_folds, np.nan), np.zeros(len(rows.fold))
    sizes = np.zeros(rows.num_folds)
    for k in range(rows.num_folds):
        inside = np.flatnonzero(rows.fold == k)
        influences = _leave_units_out(metric, rows, inside)
        if influences is not None:
            scores[k], within[inside], sizes[k] = influences[0], influences[1] * len(inside), len(inside)
    if not sizes.sum():
        return None
    score = float(np.nansum(scores * sizes) / sizes.sum())
    contributions = score + rows.num_folds * np.nan_to_num(scores - score) * sizes / sizes.sum()
    return score, contributions, within / sizes.sum()


def _leave_units_out(metric: Metric, rows: _JoinedFolds, inside: NDArray[np.int64]) -> tuple[float, FloatArray] | None:
    outputs, targets, unit = rows.outputs[inside], rows.targets[inside], rows.unit[inside]
    names, first = np.unique(unit, return_index=True)
    if len(names) < 2:
        return None
    score = metric(outputs, targets)
    without = np.array([metric(outputs[torch.from_numpy(rest)], targets[torch.from_numpy(rest)])
                        for rest in (np.flatnonzero(unit != name) for name in names)])  # fmt: skip
    if not np.isfinite([score, *without]).all():
        return None
    influence = np.zeros(len(inside))  # that of a unit stands at its first row
    influence[first] = np.sqrt((len(names) - 1) / len(names)) * (without.mean() - without)
    return float(score), influence


def _classes_of_units(metric: Metric, rows: _JoinedFolds, num_units: int) -> NDArray[np.int64]:
    classes: NDArray[np.int64] = np.zeros(num_units, dtype=np.int64)
    if metric.name == "auc" and rows.targets.dim() == 1:
        labels = rows.targets.numpy().astype(np.int64)
        lowest = np.full(num_units, np.iinfo(np.int64).max)
        np.minimum.at(lowest, rows.unit, labels)
        np.maximum.at(classes, rows.unit, labels)
        classes[lowest != classes] = _MIXED
    return classes


def _min_example_variance(metric: Metric, rows: _JoinedFolds, num_units: int) -> float:
    """Returns a lower bound of the variance due to test examples, for data on which two methods never differ.

    It is 1/(4mq) for an AUC with m positive and q negative examples, and for a share that of two more examples, on which
    one method each is right (Bonett and Price 2012).
    """
    if metric.name == "auc":
        problems = split_into_binary_problems(rows.outputs, rows.targets)
        counts = [(int(positive.sum()), int((~positive).sum())) for _, positive in problems]
        return float(np.mean([1 / (4 * m * q) for m, q in counts])) / len(counts)
    return 2 / (num_units + 2) ** 2 if _is_share(metric) else 0.0


def _is_share(metric: Metric) -> bool:
    return metric.per_example is not None and metric.unit == "%"
