"""Scores of a network's outputs against targets: what each is, which way is better, and how people read it.

Every score takes a network's outputs as it gives them (logits, shape (n, classes) or (n, labels); numbers, (n, outputs),
for regression) and the targets of the same examples. A score that is not defined for these examples, such as the AUC of
one class alone, is NaN.
"""

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io import trusted_code

ScoreFunction = Callable[[Tensor, Tensor], float]
Unit = Literal["%", ""]
_ALL_TASKS = frozenset({"classification", "multilabel", "regression"})
_CLASSIFICATION_TASKS = frozenset({"classification", "multilabel"})
_REGRESSION_TASKS = frozenset({"regression"})
_SENSITIVITY_NAME = re.compile(r"sensitivity_at_(\d{1,2}(?:\.\d+)?)")
_BINS = 10  # of the calibration error
_RESERVED_PREFIXES = ("val_", "global_", "loss")  # which the names of other columns begin with
_RESERVED_NAMES = frozenset(
    {"client", "num_examples", "train_loss", "seconds", "bytes_down", "bytes_up", "update_norm", "mean"}
)


@final
@dataclass(frozen=True)
class Metric:
    """A score by its name.

    Args:
        name: of its column in tables and files; a word of letters, digits, "_", "." and "-".
        function: outputs and targets of n examples -> the score.
        higher_is_better: False for errors and losses.
        unit: "%" for shares, which are shown in per cent and whose differences are points; "" for all others.
        label: for people; empty takes the name.
        tasks: for which it is defined.
        per_example: where the score is the mean of one value an example, these values, shape (n,); None otherwise.

    Raises:
        UserError: a name that cannot be a column.

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
        is_word = isinstance(self.name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,60}", self.name)
        if not is_word or self.name.startswith(_RESERVED_PREFIXES):
            raise UserError(
                f"a metric's name must be a word of letters, digits, '_', '.' and '-', and not begin with "
                f"{', '.join(_RESERVED_PREFIXES)}, got {self.name!r}; give a Metric with another name"
            )
        if self.name in _RESERVED_NAMES:
            raise UserError(f"a metric cannot be called {self.name!r}, which is another column; give it another name")
        if not callable(self.function):
            raise UserError(f"the function of metric {self.name!r} must be callable, got {self.function!r}")
        if self.unit not in get_args(Unit):
            raise UserError(f"the unit of metric {self.name!r} must be '%' or '', got {self.unit!r}")
        if not self.label:
            object.__setattr__(self, "label", self.name)

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """The score; NaN where it is not defined."""
        if not len(targets):
            return float("nan")
        if self.per_example is not None:
            return float(self.per_example(outputs, targets).mean())
        return float(self.function(outputs, targets))


def resolve_metrics(choice: Any, task: str) -> tuple[Metric, ...]:
    """The metrics that are asked for, the first of which decides.

    Args:
        choice: None for the task's own; or a list of names (built in, or `module:name` of the user's code), functions
            `f(outputs, targets) -> float` and `Metric` objects, or one of these. A function's score is better the higher it
            is; give a `Metric` if it is not.
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
    """The built-in metric of a name.

    Raises:
        UserError: there is none, with the nearest.

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
    """Whether a metric can be had by this name alone.

    >>> is_built_in_metric("auc"), is_built_in_metric("sensitivity_at_95"), is_built_in_metric("cost")
    (True, True, False)
    """
    return name in METRICS or _SENSITIVITY_NAME.fullmatch(name) is not None


def unpicklable_metric_error(metrics: Sequence[Metric]) -> str | None:
    """Why a metric cannot be given to a process that was not forked, as a sentence; None if all can.

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
        # By its name it would be another function when the run is resumed.
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
    """A metric of the user's by `module:name`: a function f(outputs, targets) -> float, or a `Metric`; it has this name."""
    obj, name = trusted_code.import_object(path, "metric"), path.rpartition(":")[2].rpartition(".")[2]
    if isinstance(obj, Metric):
        return obj if obj.name == name else replace(obj, name=name, label=obj.label)
    return _resolve_metric(Metric(name, obj, higher_is_better=bool(getattr(obj, "higher_is_better", True))))


def metric_path_or_name(metric: Metric) -> str:
    """How a configuration holds a metric: by `module:name` if it was given so, else by its name."""
    return trusted_code.import_path_of(metric) or trusted_code.import_path_of(metric.function) or metric.name


# -- what they compute ------------------------------------------------------------------------------------------------


def probabilities(outputs: Tensor, task: str) -> NDArray[np.float64]:
    """Of logits: softmax over classes, or a sigmoid a label; shape (n, classes) or (n, labels).

    >>> probabilities(torch.zeros(1, 2), "classification")
    array([[0.5, 0.5]])
    """
    logits = outputs.double()
    values = logits.softmax(1) if task == "classification" else logits.sigmoid()
    return np.asarray(values.numpy(), dtype=np.float64)


def binary_problems(outputs: Tensor, targets: Tensor) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """The two-class problems in these outputs that have examples of both: (score, is positive), each of shape (n,). Two
    classes are one problem (class 1 is positive); more are one against the rest each; labels are one each."""
    values = outputs.detach().double()
    if targets.dim() == 2:
        pairs = [(values[:, k].numpy(), (targets[:, k] > 0.5).numpy()) for k in range(targets.shape[1])]
    elif outputs.shape[1] == 2:
        pairs = [((values[:, 1] - values[:, 0]).numpy(), (targets == 1).numpy())]
    else:
        share = values.softmax(1)
        pairs = [(share[:, k].numpy(), (targets == k).numpy()) for k in range(outputs.shape[1])]
    return [(score, positive) for score, positive in pairs if 0 < int(positive.sum()) < len(positive)]


def _mean_over_binary_problems(score: Callable[[Any, Any], float], outputs: Tensor, targets: Tensor) -> float:
    """Mean over the two-class problems of `score(is positive, value)`."""
    if not bool(torch.isfinite(outputs).all()):
        return float("nan")
    pairs = binary_problems(outputs, targets)
    return float(np.mean([score(positive, value) for value, positive in pairs])) if pairs else float("nan")


# scikit-learn's functions take milliseconds to check their input, as long as an epoch of a small network on a small table.
def _auc(outputs: Tensor, targets: Tensor) -> float:
    return _mean_over_binary_problems(_binary_auc, outputs, targets)


def _binary_auc(positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Share of the pairs of a positive and a negative in which the positive has the higher value; equal ones count half."""
    _, place, count = np.unique(value, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # from 1; equal values have the mean of theirs
    m = int(positive.sum())
    return float((ranks[positive].sum() - m * (m + 1) / 2) / (m * (len(positive) - m)))


def _average_precision(outputs: Tensor, targets: Tensor) -> float:
    return _mean_over_binary_problems(_binary_average_precision, outputs, targets)


def _binary_average_precision(positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Precision at each threshold, weighted by the recall that is gained there."""
    order = np.argsort(-value)
    true_positives = np.cumsum(positive[order])
    last_of_ties = np.flatnonzero(np.diff(value[order], append=-np.inf))  # the last of equal values
    return float(
        (np.diff(true_positives[last_of_ties], prepend=0) * true_positives[last_of_ties] / (last_of_ties + 1)).sum()
        / true_positives[-1]
    )


def _sensitivity_at_specificity(percent: float, positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    negatives = np.sort(value[~positive])
    # The lowest threshold with at least this share of the negatives at or below it; positives must lie above.
    threshold = negatives[max(0, int(np.ceil(percent / 100 * len(negatives) - 1e-9)) - 1)]
    return float((value[positive] > threshold).mean())


@cache  # one object a name, so that a metric equals itself
def _sensitivity_metric(name: str, percent: float) -> Metric:
    if not 0 < percent < 100:
        raise UserError(f"{name}: the specificity must be above 0 and below 100 per cent, got {percent:g}")
    score = partial(_mean_over_binary_problems, partial(_sensitivity_at_specificity, percent))
    return Metric(name, score, unit="%", label=f"sensitivity at {percent:g} % specificity", tasks=_CLASSIFICATION_TASKS)


def _predicted_and_true(outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    if targets.dim() == 2:
        return (outputs > 0).numpy(), (targets > 0.5).numpy()
    return outputs.argmax(1).numpy(), targets.numpy()


def _correct_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    predicted, true = _predicted_and_true(outputs, targets)
    correct = np.asarray(predicted == true, dtype=np.float64)
    return correct if correct.ndim == 1 else correct.mean(axis=1)


def _balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes that occur of the share found (recall); for labels over both values of each."""
    predicted, true = _predicted_and_true(outputs, targets)
    columns = [(predicted, true)] if true.ndim == 1 else [(predicted[:, k], true[:, k]) for k in range(true.shape[1])]
    return float(np.mean([np.mean([np.mean(p[t == c] == c) for c in np.unique(t)]) for p, t in columns]))


def _f1(outputs: Tensor, targets: Tensor) -> float:
    """Of class 1 where there are two; else the mean over the classes or labels that occur."""
    predicted, true = _predicted_and_true(outputs, targets)
    if true.ndim == 1:
        classes = [1] if outputs.shape[1] == 2 else np.unique(true).tolist()
        columns = [(predicted == c, true == c) for c in classes]
    else:
        columns = [(predicted[:, k], true[:, k]) for k in range(true.shape[1])]
    scores = [2 * np.sum(p & t) / (np.sum(p) + np.sum(t)) for p, t in columns if np.any(t)]
    return float(np.mean(scores)) if scores else float("nan")


def _task_of_targets(targets: Tensor) -> str:
    return "multilabel" if targets.dim() == 2 else "classification"


def _brier_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    """Squared error of the probability of class 1 where there are two, of all classes together otherwise; of labels the
    mean."""
    share = probabilities(outputs, _task_of_targets(targets))
    if targets.dim() == 2:
        return np.asarray(((share - targets.numpy()) ** 2).mean(axis=1))
    if share.shape[1] == 2:
        return np.asarray((share[:, 1] - targets.numpy()) ** 2)
    return np.asarray(((share - np.eye(share.shape[1])[targets.numpy()]) ** 2).sum(axis=1))


def _log_loss_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    values = outputs.double()
    if targets.dim() == 2:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(values, targets.double(), reduction="none").mean(1)
    else:
        loss = torch.nn.functional.cross_entropy(values, targets, reduction="none")
    return np.asarray(loss.numpy())


def _calibration_error(outputs: Tensor, targets: Tensor) -> float:
    """Expected calibration error over ten bins of equal width (Guo et al. 2017): of the probability of the predicted class;
    of labels the mean over them."""
    share = probabilities(outputs, _task_of_targets(targets))
    if not np.isfinite(share).all():
        return float("nan")
    if targets.dim() == 2:
        columns = [(share[:, k], targets[:, k].numpy() > 0.5) for k in range(share.shape[1])]
    else:
        columns = [(share.max(axis=1), share.argmax(axis=1) == targets.numpy())]
    errors = []
    for confidence, correct in columns:
        bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
        gaps = [
            abs(correct[bins == b].mean() - confidence[bins == b].mean()) * np.mean(bins == b) for b in np.unique(bins)
        ]
        errors.append(sum(gaps))
    return float(np.mean(errors))


def _errors(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    return np.asarray((outputs.double() - targets.double()).numpy()).reshape(len(targets), -1)


def _absolute_error_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    return np.asarray(np.abs(_errors(outputs, targets)).mean(axis=1))


def _rmse(outputs: Tensor, targets: Tensor) -> float:
    return float(np.sqrt((_errors(outputs, targets) ** 2).mean()))


def _r2(outputs: Tensor, targets: Tensor) -> float:
    true = np.asarray(targets.double().numpy()).reshape(len(targets), -1)
    spread = float(((true - true.mean(axis=0)) ** 2).sum())
    return 1 - float((_errors(outputs, targets) ** 2).sum()) / spread if spread else float("nan")


def _mean_per_example(
    parts: Callable[[Tensor, Tensor], NDArray[np.float64]], outputs: Tensor, targets: Tensor
) -> float:
    return float(parts(outputs, targets).mean())


def _mean_score(parts: Callable[[Tensor, Tensor], NDArray[np.float64]]) -> ScoreFunction:
    return partial(_mean_per_example, parts)  # not a lambda, which could not be sent to another process


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "accuracy", _mean_score(_correct_per_example), unit="%", tasks=_CLASSIFICATION_TASKS,
            per_example=_correct_per_example,
        ),
        Metric(
            "balanced_accuracy", _balanced_accuracy, unit="%", label="balanced accuracy", tasks=_CLASSIFICATION_TASKS
        ),
        Metric("auc", _auc, label="AUC", tasks=_CLASSIFICATION_TASKS),
        Metric("average_precision", _average_precision, label="average precision", tasks=_CLASSIFICATION_TASKS),
        Metric("f1", _f1, label="F1", tasks=_CLASSIFICATION_TASKS), _sensitivity_metric("sensitivity_at_90", 90.0),
        Metric(
            "brier", _mean_score(_brier_per_example), higher_is_better=False, label="Brier score",
            tasks=_CLASSIFICATION_TASKS, per_example=_brier_per_example,
        ),
        Metric(
            "log_loss", _mean_score(_log_loss_per_example), higher_is_better=False, label="log loss",
            tasks=_CLASSIFICATION_TASKS, per_example=_log_loss_per_example,
        ),
        Metric(
            "ece", _calibration_error, higher_is_better=False, label="calibration error", tasks=_CLASSIFICATION_TASKS
        ),
        Metric("r2", _r2, label="R²", tasks=_REGRESSION_TASKS),
        Metric(
            "mae", _mean_score(_absolute_error_per_example), higher_is_better=False, label="mean absolute error",
            tasks=_REGRESSION_TASKS, per_example=_absolute_error_per_example,
        ),
        Metric("rmse", _rmse, higher_is_better=False, label="root mean squared error", tasks=_REGRESSION_TASKS),
    )
}  # fmt: skip
"""By name; `sensitivity_at_95` and the like are made when they are asked for."""
DEFAULT_METRICS = {"classification": "accuracy", "multilabel": "auc", "regression": "r2"}
"""The metric of each task that decides if none is asked for."""
COMPARISON_METRICS = {"regression": ("mae", "r2")}
"""Those of a comparison, by task, where it is not that metric: the interval of an R² of 30 examples can be hundreds wide."""
