"""Computes jackknife pseudo-values of any metric: the contribution of each test example to the score.

The pseudo-value of example j is n·A − (n − 1)·A₍₋ⱼ₎, A being the score of all n examples and A₍₋ⱼ₎ that without example j
(Quenouille 1956, Tukey 1958). Their mean is A up to a bias of order 1/n, and their variance says how far A varies with
the draw of the examples. For a mean of one value an example they are these values; for the AUC they give the variance of
DeLong et al. (1988) times m/(m − 1) in each class of m examples.
"""

import math
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.pseudo_values.cluster_jackknife import (
    Groups,
    block_of_each_group,
    classes_of_groups,
    jackknife_pseudo_values_by_group,
)
from polyfed.core.evaluation.metric import Metric
from polyfed.core.tasks.task_lookup import registered_tasks
from polyfed.tasks.scores.score_functions import split_into_binary_problems

NUM_GROUPS = 50
"""Most groups of examples that are left out in turn, for metrics without a closed form: one example each up to this
number."""
# Blocks without a class that suffice for the others to be a class (false sentences: benchmarks/verdicts_shapes.py)
_FEW_BLOCKS = 6
_PAIRS = 40_000  # positive x negative examples up to which comparing all pairs is faster than ranking
FloatArray = NDArray[np.float64]


@final
class ScoreWithPseudoValues(NamedTuple):
    """Holds a score and the pseudo-value (contribution) of each test example or group."""

    score: float
    pseudo_values: FloatArray


def score_with_pseudo_values(
    metric: Metric, outputs: Tensor, targets: Tensor, groups: Groups | None = None
) -> ScoreWithPseudoValues | None:
    """Returns the score of outputs and each example's pseudo-value; None if undefined without one.

    For n examples these have shape (n,), one per example, or (NUM_GROUPS,), one per group of examples. Groups depend
    on the targets alone, so that the values of two networks on the same examples can be compared one by one. With `groups`
    (from `cluster_jackknife.assign_group_numbers`: the rows of a patient, say) there is one value per group in place of one
    per example.

    Returns:
        Both. None if the score is not defined, or is not once an example is left out: an AUC with one positive example,
            say.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> outputs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> score_with_pseudo_values(METRICS["accuracy"], outputs, torch.tensor([0, 1, 1]))
    ScoreWithPseudoValues(score=0.666..., pseudo_values=array([1., 0., 1.]))
    """
    if groups is not None:
        classes = _classes_of_examples(metric, targets)
        score, values = jackknife_pseudo_values_by_group(metric, outputs, targets, groups, NUM_GROUPS, classes)
    elif metric.per_example is not None:
        values = np.asarray(metric.per_example(outputs, targets), dtype=np.float64)
        score = float(values.mean())
    elif metric.name == "auc":
        score, values = _auc_pseudo_values(outputs, targets)
    elif metric.name == "r2":
        score, values = _r2_pseudo_values(outputs, targets)
    else:
        score, values = _leave_group_out_pseudo_values(metric, outputs, targets)
    if len(values) < 2 or not np.isfinite([score, *values]).all():
        return None
    return ScoreWithPseudoValues(score, values)


def example_class_of_each_pseudo_value(
    metric: Metric, targets: Tensor, groups: Groups | None = None
) -> NDArray[np.int64]:
    """Returns the class of each pseudo-value's example (a patient's event, say); 0 without classes."""
    n, targets = len(targets), _classes_of_examples(metric, targets)
    if groups is not None:
        count = int(groups.max()) + 1
        if metric.per_example is None and (metric.name == "auc" or count <= NUM_GROUPS):
            return classes_of_groups(targets, groups)
        if metric.per_example is not None or metric.name == "r2":
            return np.zeros(count, dtype=np.int64)
        return _classes_of_blocks(classes_of_groups(targets, groups), block_of_each_group(targets, groups, NUM_GROUPS))
    has_classes = targets.dim() == 1 and not targets.is_floating_point()
    if metric.per_example is not None or metric.name in ("auc", "r2"):
        return (targets if has_classes and metric.name == "auc" else torch.zeros(n, dtype=torch.int64)).numpy()
    if has_classes:
        return _classes_of_blocks(targets.numpy(), _blocks_of_examples(targets))
    return np.zeros(min(n, NUM_GROUPS), dtype=np.int64)


def _classes_of_blocks(classes: NDArray[np.int64], block: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns each block's rarest class, if not (nearly) every block has an example or group of it; else 0.

    Without `_FEW_BLOCKS` few blocks without a class would be taken for a rare class, with next to no degrees of freedom.
    """
    number = int(block.max()) + 1
    most = number if number == len(block) else number - _FEW_BLOCKS + 1
    _, code, counts = np.unique(classes, return_inverse=True, return_counts=True)
    class_of_block: NDArray[np.int64] = np.zeros(number, dtype=np.int64)
    for place in np.argsort(-counts, kind="stable"):
        if counts[place] < most:
            class_of_block[block[code == place]] = place + 1
    return class_of_block


def _blocks_of_examples(classes: Tensor) -> NDArray[np.int64]:
    """Returns each example's block: its own for up to `NUM_GROUPS` examples, else one like all in class or value."""
    n = len(classes)
    order = np.arange(n)
    if classes.dim() == 1 and n > NUM_GROUPS:
        order = np.argsort(classes.numpy(), kind="stable")
    block: NDArray[np.int64] = np.empty(n, dtype=np.int64)
    block[order] = np.arange(n) % min(n, NUM_GROUPS)
    return block


def _classes_of_examples(metric: Metric, targets: Tensor) -> Tensor:
    """Returns the classes within which examples vary, shape (n,), or the targets where there are none.

    For survival it is whether the event happened, since a few events decide a C-index however many patients were censored.
    """
    tasks = [task for task in registered_tasks() if task.name in metric.tasks and task.rarest_limits_score]
    for task in tasks if targets.dim() > 1 else ():
        if (strata := task.strata(targets)).ndim == 1:
            return torch.from_numpy(strata)
    return targets


def _auc_pseudo_values(outputs: Tensor, targets: Tensor) -> tuple[float, FloatArray]:
    """Returns the AUC, averaged over two-class problems, and its pseudo-values.

    Without the positive example j, which ranks above the share p_j of the negatives, the AUC A of m positives is (m·A −
    p_j)/(m − 1).
    """
    if not bool(torch.isfinite(outputs).all()):
        return math.nan, np.full(len(targets), np.nan)
    from scipy.stats import rankdata  # takes half a second to import

    values_by_problem, areas = [], []
    for score, positive in split_into_binary_problems(outputs, targets):
        n, m, q = len(score), int(positive.sum()), int((~positive).sum())
        beaten = np.empty(n)  # share of the other class that is ranked correctly against the example; ties count half
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
        values_by_problem.append(n * area - (n - 1) * without)
    if not values_by_problem:
        return math.nan, np.full(len(targets), np.nan)
    return float(np.mean(areas)), np.mean(values_by_problem, axis=0)


def _r2_pseudo_values(outputs: Tensor, targets: Tensor) -> tuple[float, FloatArray]:
    """Returns the coefficient of determination R² and its leave-one-out pseudo-values.

    R² = 1 − Σe²/Σ(y − ȳ)².
    """
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


def _leave_group_out_pseudo_values(metric: Metric, outputs: Tensor, targets: Tensor) -> tuple[float, FloatArray]:
    """Returns the score and the pseudo-values from leaving out one group of examples at a time."""
    block = _blocks_of_examples(_classes_of_examples(metric, targets))
    number, full_score = int(block.max()) + 1, metric(outputs, targets)
    values = []
    for left_out in range(number):
        remaining = torch.from_numpy(np.flatnonzero(block != left_out))
        values.append(number * full_score - (number - 1) * metric(outputs[remaining], targets[remaining]))
    return full_score, np.asarray(values, dtype=np.float64)
