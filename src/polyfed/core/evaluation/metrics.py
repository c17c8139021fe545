"""Defines the metrics that compare a network's outputs with targets: name, function, direction and unit of each.

Every metric takes a network's outputs as it returns them (logits, shape (n, classes) or (n, labels); numbers, (n, outputs),
for regression) and the targets of the same examples. A metric that is undefined for these examples, such as the AUC of a
single class, is NaN.
"""

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.score_functions import (
    ScoreFunction,
    absolute_error_per_example,
    auc,
    average_precision,
    balanced_accuracy,
    brier_per_example,
    calibration_error,
    correct_per_example,
    f1,
    log_loss_per_example,
    mean_over_binary_problems,
    mean_over_examples,
    r2,
    rmse,
    sensitivity_at_specificity,
)
from polyfed.core.io import trusted_code
from polyfed.core.io.validation import check_field_types

Unit = Literal["%", ""]
_ALL_TASKS = frozenset({"classification", "multilabel", "regression"})
_CLASSIFICATION_TASKS = frozenset({"classification", "multilabel"})
_REGRESSION_TASKS = frozenset({"regression"})
_SENSITIVITY_NAME = re.compile(r"sensitivity_at_(\d{1,2}(?:\.\d+)?)")
_RESERVED_PREFIXES = ("val_", "global_", "loss")  # the names of other columns begin with these
_RESERVED_NAMES = frozenset(
    {"client", "num_examples", "train_loss", "seconds", "bytes_down", "bytes_up", "update_norm", "mean"}
)


@final
@dataclass(frozen=True)
class Metric:
    """Describes a metric: a named function of outputs and targets, whether higher values are better, and its unit.

    Args:
        name: its column in tables and files; a word of letters, digits, "_", "." and "-".
        function: outputs and targets of n examples -> the value.
        higher_is_better: False for errors and losses.
        unit: "%" for shares, which are shown in per cent and whose differences are points; "" for all others.
        label: the name shown to people; empty for `name`.
        tasks: the tasks for which it is defined.
        per_example: if the metric is a mean over examples, the function of these values, shape (n,); None otherwise.

    Raises:
        UserError: a field has another type, or the name cannot be that of a column.

    >>> import torch
    >>> cost = Metric("cost", lambda outputs, targets: float((outputs - targets).abs().mean()), higher_is_better=False)
    >>> cost(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
    1.0
    """

    name: str
    function: ScoreFunction
    higher_is_better: bool = True
    unit: Unit = ""
    label: str = ""
    tasks: frozenset[str] = _ALL_TASKS
    per_example: Callable[[Tensor, Tensor], NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        is_word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,60}", self.name)
        if not is_word or self.name.startswith(_RESERVED_PREFIXES):
            raise UserError(
                f"a metric's name must be a word of letters, digits, '_', '.' and '-', and not begin with "
                f"{', '.join(_RESERVED_PREFIXES)}, got {self.name!r}; give a Metric with another name"
            )
        if self.name in _RESERVED_NAMES:
            raise UserError(f"a metric cannot be called {self.name!r}, which is another column; give it another name")
        if not self.label:
            object.__setattr__(self, "label", self.name)

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the metric's value for outputs and targets; NaN if it is undefined for them."""
        if not len(targets):
            return float("nan")
        if self.per_example is not None:
            return float(self.per_example(outputs, targets).mean())
        return float(self.function(outputs, targets))


def resolve_metrics(choice: Any, task: str) -> tuple[Metric, ...]:
    """Returns the `Metric` objects that the user chose by name; the first is the main metric.

    Args:
        choice: None for the task's default; or a list of names (built in, or `module:name` of the user's code), functions
            `f(outputs, targets) -> float` and `Metric` objects, or one of these. For a function higher values are better;
            give a `Metric` if they are not.
        task: "classification", "multilabel" or "regression".

    Raises:
        UserError: an unknown name, a name twice, or a metric of another task.

    >>> [metric.name for metric in resolve_metrics(["auc", "brier"], "classification")]
    ['auc', 'brier']
    >>> resolve_metrics(None, "regression")[0].label
    'R²'
    """
    if choice is None or (isinstance(choice, Sequence) and not len(choice)):
        return (METRICS[DEFAULT_METRICS[task]],)
    choices = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else [choice]
    resolved = [_resolve_metric(metric) for metric in choices]
    for metric in resolved:
        if task not in metric.tasks:
            possible = sorted(name for name, built_in in METRICS.items() if task in built_in.tasks)
            raise UserError(
                f"{metric.name} is no metric of a task of {task}; choose of {', '.join(possible)}, or give a function"
            )
    names = [metric.name for metric in resolved]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"metrics has {twice[0]!r} twice; give each a name of its own (polyfed.Metric)")
    return tuple(resolved)


def metric_by_name(name: str) -> Metric:
    """Returns the built-in metric with a given name.

    Raises:
        UserError: there is none; the message has the nearest names.

    >>> metric_by_name("sensitivity_at_95").label
    'sensitivity at 95 % specificity'
    """
    name = "sensitivity_at_90" if name == "sensitivity_at_specificity" else name
    if name not in METRICS and (share := _SENSITIVITY_NAME.fullmatch(name)):
        return _sensitivity_metric(name, float(share[1]))
    if name not in METRICS:
        raise UserError(f"unknown metric {name!r}; {did_you_mean(name, METRICS)}")
    return METRICS[name]


def is_built_in_metric(name: str) -> bool:
    """Returns whether `name` is the name of a built-in metric.

    >>> is_built_in_metric("auc"), is_built_in_metric("sensitivity_at_95"), is_built_in_metric("cost")
    (True, True, False)
    """
    return name in METRICS or _SENSITIVITY_NAME.fullmatch(name) is not None


def unpicklable_metric_error(metrics: Sequence[Metric]) -> str | None:
    """Returns why a metric cannot be pickled for another process, as a sentence; None if all metrics can.

    >>> (unpicklable_metric_error([METRICS["auc"]]),
    ...  unpicklable_metric_error([Metric("mine", lambda outputs, targets: 0.0)])[:35])
    (None, "metric 'mine' cannot be sent to ano")
    """
    for metric in metrics:
        try:
            pickle.dumps(metric)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"metric {metric.name!r} cannot be sent to another process ({error})"
    return None


def _resolve_metric(choice: Any) -> Metric:
    if isinstance(choice, Metric):
        # A resumed run would take the built-in metric of this name.
        if is_built_in_metric(choice.name) and choice != metric_by_name(choice.name):
            raise UserError(f"{choice.name!r} is the name of a built-in metric; give yours another name")
        return choice
    if isinstance(choice, str):
        return _import_metric(choice) if ":" in choice else metric_by_name(choice)
    if not callable(choice):
        raise UserError(
            f"metrics must be names, functions f(outputs, targets) -> float or Metric objects, got {choice!r}"
        )
    name = getattr(choice, "__name__", type(choice).__name__)
    if name == "<lambda>":
        raise UserError("a metric needs a name; give polyfed.Metric('my_name', lambda outputs, targets: ...)")
    return _resolve_metric(Metric(name, choice, higher_is_better=bool(getattr(choice, "higher_is_better", True))))


def _import_metric(path: str) -> Metric:
    """Imports a user's metric by `module:name`, and gives it this name: a function f(outputs, targets) -> float, or a
    `Metric`.
    """
    obj, name = trusted_code.import_trusted_callable(path, "metric"), path.rpartition(":")[2].rpartition(".")[2]
    if isinstance(obj, Metric):
        return obj if obj.name == name else replace(obj, name=name, label=obj.label)
    return _resolve_metric(Metric(name, obj, higher_is_better=bool(getattr(obj, "higher_is_better", True))))


def metric_path_or_name(metric: Metric) -> str:
    """Returns the text by which a configuration refers to a metric: `module:name` if the metric was imported, else its
    name.
    """
    return (
        trusted_code.recorded_import_path(metric) or trusted_code.recorded_import_path(metric.function) or metric.name
    )


# -- computation ------------------------------------------------------------------------------------------------------


@cache  # one object per name, so that two look-ups are equal
def _sensitivity_metric(name: str, percent: float) -> Metric:
    if not 0 < percent < 100:
        raise UserError(f"{name}: the specificity must be above 0 and below 100 per cent, got {percent:g}")
    score = partial(mean_over_binary_problems, partial(sensitivity_at_specificity, percent))
    return Metric(name, score, unit="%", label=f"sensitivity at {percent:g} % specificity", tasks=_CLASSIFICATION_TASKS)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "accuracy", mean_over_examples(correct_per_example), unit="%", tasks=_CLASSIFICATION_TASKS,
            per_example=correct_per_example,
        ),
        Metric(
            "balanced_accuracy", balanced_accuracy, unit="%", label="balanced accuracy", tasks=_CLASSIFICATION_TASKS
        ),
        Metric("auc", auc, label="AUC", tasks=_CLASSIFICATION_TASKS),
        Metric("average_precision", average_precision, label="average precision", tasks=_CLASSIFICATION_TASKS),
        Metric("f1", f1, label="F1", tasks=_CLASSIFICATION_TASKS), _sensitivity_metric("sensitivity_at_90", 90.0),
        Metric(
            "brier", mean_over_examples(brier_per_example), higher_is_better=False, label="Brier score",
            tasks=_CLASSIFICATION_TASKS, per_example=brier_per_example,
        ),
        Metric(
            "log_loss", mean_over_examples(log_loss_per_example), higher_is_better=False, label="log loss",
            tasks=_CLASSIFICATION_TASKS, per_example=log_loss_per_example,
        ),
        Metric(
            "ece", calibration_error, higher_is_better=False, label="calibration error", tasks=_CLASSIFICATION_TASKS
        ),
        Metric("r2", r2, label="R²", tasks=_REGRESSION_TASKS),
        Metric(
            "mae", mean_over_examples(absolute_error_per_example), higher_is_better=False, label="mean absolute error",
            tasks=_REGRESSION_TASKS, per_example=absolute_error_per_example,
        ),
        Metric("rmse", rmse, higher_is_better=False, label="root mean squared error", tasks=_REGRESSION_TASKS),
    )
}  # fmt: skip
"""Built-in metrics by name; `metric_by_name` builds `sensitivity_at_95` and the like on demand."""
DEFAULT_METRICS = {"classification": "accuracy", "multilabel": "auc", "regression": "r2"}
"""Default metric of each task."""
COMPARISON_METRICS = {"regression": ("mae", "r2")}
"""Default metrics of a comparison where they differ: the confidence interval of R² on 30 examples can be hundreds wide."""
