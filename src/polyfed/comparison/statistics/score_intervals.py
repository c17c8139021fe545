"""Returns scores of one method, and differences of two methods' scores, with the ends of their confidence intervals."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.estimate import ALPHA, CONFIDENCE_LEVEL
from polyfed.comparison.statistics.mrmc import (
    VarianceComponents,
    estimate_mean_over_clients,
    estimate_variance_components,
)
from polyfed.core.evaluation.metric import Metric


@final
class ValueWithInterval(NamedTuple):
    """Holds a score, or a difference of scores, and the two ends of its confidence interval."""

    value: float
    low: float
    high: float


def mean_score_with_interval(
    metric: Metric,
    outputs_by_seed: Sequence[Tensor],
    targets: Tensor,
    level: float = CONFIDENCE_LEVEL,
    groups: NDArray[Any] | None = None,
) -> ValueWithInterval | None:
    """Returns a method's mean score over seeds with its interval; None if undefined.

    Args:
        metric, targets, groups: as for `estimate_variance_components`.
        outputs_by_seed: one tensor per seed.
        level: the confidence level.

    Returns:
        None where the score or its variance is not defined.
    """
    return _interval_of_one(estimate_variance_components(metric, outputs_by_seed, None, targets, groups), level)


def mean_gain_with_interval(
    metric: Metric,
    outputs_by_seed: Sequence[Tensor],
    rival_outputs_by_seed: Sequence[Tensor],
    targets: Tensor,
    level: float = CONFIDENCE_LEVEL,
    groups: NDArray[Any] | None = None,
) -> ValueWithInterval | None:
    """Returns the mean difference of two methods over seeds with its interval; None if undefined.

    It is positive where the first method is better than its rival.
    """
    return _interval_of_one(
        estimate_variance_components(metric, outputs_by_seed, rival_outputs_by_seed, targets, groups), level
    )


def _interval_of_one(components: VarianceComponents | None, level: float) -> ValueWithInterval | None:
    if components is None:
        return None
    estimate = estimate_mean_over_clients([components], alpha=(1 - level) * ALPHA / (1 - CONFIDENCE_LEVEL))
    return ValueWithInterval(estimate.value, estimate.low, estimate.high) if math.isfinite(estimate.low) else None
