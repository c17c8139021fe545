"""Defines the task of predicting the next values of a series from its past values."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import ConstantModel, Floats, SimpleModel, SimpleModelInputs
from polyfed.core.examples.pytree import Inputs, first_leaf
from polyfed.core.io.text.number_format import format_batch_shape
from polyfed.core.tasks.task import Task
from polyfed.tasks.simple_models.linear_models import LIBRARY, fit_ridge
from polyfed.tasks.simple_models.tree_models import fit_regression_trees


@final
@dataclass(frozen=True)
class Forecasting(Task):
    """Defines the task of predicting the next values of a series: inputs are past values, targets the `horizons` values
    that follow.

    Inputs have the shape (n, past), or (n, past, features) with the series as the first feature, oldest first, in the unit
    of the targets; of inputs of several parts the first holds them. Targets are floats of shape (n, horizons), outputs too.
    For `mase`, clients keep after each example's targets its naive forecast, the values one season before: (n, 2·horizons).

    Args:
        horizons: how many values are predicted.
        season: period of the series, in steps; 1 makes the last value the naive forecast.

    >>> Forecasting(horizons=2).complete_targets(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0]])).tolist()
    [[4.0, 5.0, 3.0, 3.0]]
    """

    horizons: int = 1
    season: int = 1

    name: ClassVar[str] = "forecasting"
    outputs_meaning: ClassVar[str] = "the next values of the series, the nearest first."
    no_curves_reason: ClassVar[str] = "ROC curves and counts are of classes; these networks predict numbers."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizons < 1 or self.season < 1:
            raise UserError(f"horizons and season must be at least 1, got {self.horizons} and {self.season}")

    # -- targets --------------------------------------------------------------------------------------------------

    def complete_targets(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Returns the targets followed by naive forecasts from the inputs.

        Raises:
            UserError: the inputs hold too few past values.
        """
        targets = targets.unsqueeze(1) if targets.dim() == 1 else targets
        if targets.dim() != 2 or targets.shape[1] != self.horizons:
            return targets  # complete already, or wrong, which `check_targets` says
        past = first_leaf(inputs)
        past = past[..., 0] if past.dim() == 3 else past
        if past.dim() != 2 or past.shape[1] < self.season:
            raise UserError(
                f"inputs must be past values of shape (num, past) or (num, past, features), at least season={self.season} "
                f"of them, got {tuple(first_leaf(inputs).shape)}"
            )
        ahead = torch.arange(self.horizons, device=past.device) % self.season
        naive = past[:, past.shape[1] - self.season + ahead]
        return torch.cat(
            [self.prepare_targets(targets), naive.to(targets.dtype if targets.is_floating_point() else None)], 1
        )

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Raises a `UserError` unless there is one target for each horizon."""
        if targets.dim() != 2 or targets.shape[1] not in (self.horizons, 2 * self.horizons):
            raise UserError(
                f"{name} targets must be the next {self.horizons} values of each example, shape (num, {self.horizons}), got "
                f"{tuple(targets.shape)}; give pf.tasks.Forecasting(horizons=...) as many as there are"
            )

    def num_outputs(self, targets: Tensor, names: Any = ()) -> int:
        """Returns the number of horizons, since a network has one output for each."""
        return self.horizons

    def check_outputs(self, shape: tuple[int, ...], targets: Tensor, name: str) -> None:
        """Raises a `UserError` unless the network has one output for each horizon."""
        if shape != (self.horizons,):
            raise UserError(
                f"{name}: the network's output is {format_batch_shape(shape)}, and {self.horizons} horizons need "
                f"{format_batch_shape((self.horizons,))}"
            )

    # -- loss and scores ------------------------------------------------------------------------------------------

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns half the mean squared error over all horizons."""
        return 0.5 * F.mse_loss(outputs, _targets_without_forecasts(outputs, targets))

    def elementwise_loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns half the squared error of each horizon, shape (n, horizons)."""
        return 0.5 * F.mse_loss(outputs, _targets_without_forecasts(outputs, targets), reduction="none")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics: first, by default, the error relative to the naive forecast, then others."""
        return _METRICS

    def find_metric(self, name: str) -> Metric | None:
        """Returns the metric of this name, such as "mae", or "mae_at_3" for the third horizon; or None."""
        if (match := re.fullmatch(r"(mae|rmse|mase)_at_([1-9]\d{0,3})", name)) is None:
            return super().find_metric(name)
        kind, horizon = match[1], int(match[2])
        error = ForecastError(kind, horizon)  # type: ignore[arg-type]
        return Metric(name, error, higher_is_better=False, label=f"{_LABELS[kind]}, horizon {horizon}", tasks=_TASKS)

    # -- models without a network ---------------------------------------------------------------------------------

    def constant_model(self) -> ConstantModel:
        """Returns the model that answers every example with the training targets' mean at each horizon."""
        return ConstantModel("mean", "mean of each horizon", "always answering the mean", _mean_of_horizons)

    def simple_models(self) -> tuple[SimpleModel, ...]:
        """Returns the models without a network: ridge regression and gradient-boosted trees on the past values."""
        return (
            SimpleModel("ridge", "ridge regression", _fit_ridge, library=LIBRARY),
            SimpleModel(
                "gradient_boosting", "gradient-boosted trees", _fit_trees, is_trees=True, library="scikit-learn"
            ),
        )


@final
@dataclass(frozen=True)
class ForecastError:
    """Scores forecasts by the mean absolute error, the root mean squared error, or the mean absolute error relative to
    that of the naive forecast.

    Args:
        kind: "mae"; "rmse"; or "mase", the mean absolute error divided by that of the naive forecast for the same examples.
        horizon: counted from 1; 0 for all.
    """

    kind: Literal["mae", "rmse", "mase"]
    horizon: int = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the score of outputs, (n, h), for true values and naive forecasts, (n, 2h).

        Raises:
            UserError: no output has this horizon.
        """
        number = outputs.shape[1]
        if self.horizon > number:
            raise UserError(
                f"{self.kind}_at_{self.horizon}: forecasts have the horizons 1 to {number}; give one of these"
            )
        columns = slice(None) if not self.horizon else slice(self.horizon - 1, self.horizon)
        true, naive = targets[:, :number].double()[:, columns], targets[:, number:].double()[:, columns]
        errors = outputs.double()[:, columns] - true
        if self.kind == "rmse":
            return float(errors.square().mean().sqrt())
        error = float(errors.abs().mean())
        if self.kind == "mae":
            return error
        scale = float((naive - true).abs().mean())
        return error / scale if scale else float("nan")


def _targets_without_forecasts(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the targets without the naive forecasts that clients keep beside them."""
    return targets[..., : outputs.shape[-1]]


def _mean_of_horizons(targets: NDArray[Any], num_outputs: int) -> Floats:
    return np.asarray(targets[:, :num_outputs].astype(np.float64).mean(axis=0))


def _fit_ridge(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    return fit_ridge(replace(table, y=table.y[:, :outputs]), outputs, seed)


def _fit_trees(table: SimpleModelInputs, outputs: int, seed: int) -> Floats:
    return fit_regression_trees(replace(table, y=table.y[:, :outputs]), outputs, seed)


_TASKS = frozenset({"forecasting"})
_LABELS = {
    "mase": "error relative to the naive forecast",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
}
_METRICS = (
    Metric("mase", ForecastError("mase"), higher_is_better=False, label=_LABELS["mase"], tasks=_TASKS),
    Metric("forecast_mae", ForecastError("mae"), higher_is_better=False, label=_LABELS["mae"], tasks=_TASKS),
    Metric("forecast_rmse", ForecastError("rmse"), higher_is_better=False, label=_LABELS["rmse"], tasks=_TASKS),
)
