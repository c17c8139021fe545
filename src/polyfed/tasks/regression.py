"""Defines the task of predicting one or more numbers for each example."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import ConstantModel, Floats, SimpleModel
from polyfed.core.tasks.task import Task
from polyfed.tasks.scores import score_functions as scores
from polyfed.tasks.simple_models.linear_models import LIBRARY, fit_ridge
from polyfed.tasks.simple_models.tree_models import fit_regression_trees

_TASKS = frozenset({"regression"})
_METRICS = (
    Metric("r2", scores.r2, label="R²", tasks=_TASKS),
    Metric(
        "mae", scores.mean_over_examples(scores.absolute_error_per_example), higher_is_better=False,
        label="mean absolute error", tasks=_TASKS, per_example=scores.absolute_error_per_example,
    ),
    Metric("rmse", scores.rmse, higher_is_better=False, label="root mean squared error", tasks=_TASKS),
)  # fmt: skip


@final
@dataclass(frozen=True)
class Regression(Task):
    """Defines the task of predicting K numbers for each example: targets are floats, shape (n, K), or (n,) for one;
    outputs have shape (n, K).

    >>> import torch
    >>> Regression().prepare_targets(torch.tensor([1, 2])).tolist()
    [[1.0], [2.0]]
    """

    name: ClassVar[str] = "regression"
    standardises_targets: ClassVar[bool] = True
    counts_title: ClassVar[str] = "and their targets"
    has_target_moments: ClassVar[bool] = True
    outputs_meaning: ClassVar[str] = "the targets."
    no_curves_reason: ClassVar[str] = "ROC curves and counts are of classes; these networks predict numbers."

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics R² (the default), mean absolute error and root mean squared error."""
        return _METRICS

    @property
    def comparison_metrics(self) -> tuple[Metric, ...]:
        """Returns the mean absolute error, which decides; R² can have wide intervals on 30 examples."""
        return (_METRICS[1], _METRICS[0])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns half the mean squared error."""
        return 0.5 * F.mse_loss(outputs, targets)

    def elementwise_loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns half the squared error of each target, shape (n, K)."""
        return 0.5 * F.mse_loss(outputs, targets, reduction="none")

    def constant_model(self) -> ConstantModel:
        """Returns the model that answers every example with the mean of the training targets."""
        return ConstantModel("mean", "mean", "always answering the mean", _mean_target)

    def simple_models(self) -> tuple[SimpleModel, ...]:
        """Returns the models without a network: ridge regression and gradient-boosted trees."""
        return (
            SimpleModel("ridge", "ridge regression", fit_ridge, library=LIBRARY),
            SimpleModel(
                "gradient_boosting",
                "gradient-boosted trees",
                fit_regression_trees,
                is_trees=True,
                library="scikit-learn",
            ),
        )


def _mean_target(targets: NDArray[Any], num_outputs: int) -> Floats:
    return np.asarray(targets.astype(np.float64).mean(axis=0))
