"""Bounds the variance of a score due to test examples from below, where the jackknife sees none or too little."""

import numpy as np
from torch import Tensor

from polyfed.comparison.statistics.pseudo_values.cluster_jackknife import Groups, count_groups_of_classes
from polyfed.core.evaluation.metric import Metric
from polyfed.tasks.scores.score_functions import (
    SENSITIVITY_PREFIX,
    sensitivity_at_specificity,
    split_into_binary_problems,
)


def least_example_variance(metric: Metric, outputs: Tensor, targets: Tensor, units: Groups | None) -> float:
    """Returns a lower bound of the variance due to examples of a method's score; 0 for most metrics.

    With m positive and q negative examples (groups, where there are any) it is for

    - an AUC 1/(4mq): if all examples are ordered correctly, the pseudo-values do not vary at all, and yet the next example
      may be ordered wrongly;
    - a sensitivity at a specificity s the square of half the step between the sensitivities at s ± √(s(1−s)/q), if negatives
      tie at the threshold: without one of them the threshold stays, and with other negatives it would jump.
    """
    is_sensitivity = metric.name.startswith(SENSITIVITY_PREFIX)
    if not (is_sensitivity or metric.name == "auc"):
        return 0.0
    variances = []
    for score, positive in split_into_binary_problems(outputs, targets):
        counts = (positive.sum(), (~positive).sum()) if units is None else count_groups_of_classes(positive, units)
        num_positive, num_negative = map(int, counts)
        if not is_sensitivity:
            variances.append(1 / (4 * num_positive * num_negative))
            continue
        specificity = float(metric.name.removeprefix(SENSITIVITY_PREFIX)) / 100
        negatives, error = np.sort(score[~positive]), (specificity * (1 - specificity) / num_negative) ** 0.5
        place = max(0, int(np.ceil(specificity * len(negatives) - 1e-9)) - 1)
        if int((negatives == negatives[place]).sum()) < 2:
            continue
        low, high = (np.clip(100 * (specificity + sign * error), 1e-6, 100) for sign in (-1, 1))
        step = sensitivity_at_specificity(low, positive, score) - sensitivity_at_specificity(high, positive, score)
        variances.append((step / 2) ** 2)
    return sum(variances) / max(1, len(variances)) ** 2
