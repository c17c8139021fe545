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

from polyfed.core import code
from polyfed.core.errors import UserError, nearest

Score = Callable[[Tensor, Tensor], float]
Unit = Literal["%", ""]
_ALL = frozenset({"classification", "multilabel", "regression"})
_CLASSES = frozenset({"classification", "multilabel"})
_NUMBERS = frozenset({"regression"})
_SENSITIVITY = re.compile(r"sensitivity_at_(\d{1,2}(?:\.\d+)?)")
_BINS = 10  # of the calibration error
_PREFIXES = ("val_", "global_", "loss")  # which the names of other columns begin with
_TAKEN = frozenset({"client", "num_examples", "train_loss", "seconds", "bytes_down", "bytes_up", "update_norm", "mean"})


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
        parts: where the score is the mean of one value an example, these values, shape (n,); None otherwise.

    Raises:
        UserError: a name that cannot be a column.

    >>> cost = Metric("cost", lambda outputs, targets: float((outputs - targets).abs().mean()), higher_is_better=False)
    >>> cost(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
    1.0
    """

    name: str
    function: Score
    higher_is_better: bool = True
    unit: Unit = ""
    label: str = ""
    tasks: frozenset[str] = _ALL
    parts: Callable[[Tensor, Tensor], NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        word = isinstance(self.name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,60}", self.name)
        if not word or self.name.startswith(_PREFIXES):
            raise UserError(
                f"a metric's name must be a word of letters, digits, '_', '.' and '-', and not begin with "
                f"{', '.join(_PREFIXES)}, got {self.name!r}; give a Metric with another name"
            )
        if self.name in _TAKEN:
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
        if self.parts is not None:
            return float(self.parts(outputs, targets).mean())
        return float(self.function(outputs, targets))


def metrics_of(asked: Any, task: str) -> tuple[Metric, ...]:
    """The metrics that are asked for, the first of which decides.

    Args:
        asked: None for the task's own; or a list of names (built in, or `module:name` of the user's code), functions
            `f(outputs, targets) -> float` and `Metric` objects, or one of these. A function's score is better the higher it
            is; give a `Metric` if it is not.
        task: "classification", "multilabel" or "regression".

    Raises:
        UserError: an unknown name, a name twice, or a metric of another task.

    >>> [metric.name for metric in metrics_of(["auc", "brier"], "classification")]
    ['auc', 'brier']
    >>> metrics_of(None, "regression")[0].label
    'R²'
    """
    if asked is None or (isinstance(asked, Sequence) and not len(asked)):
        return (METRICS[DEFAULT[task]],)
    several = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    found = [_one(metric) for metric in several]
    for metric in found:
        if task not in metric.tasks:
            possible = sorted(name for name, known in METRICS.items() if task in known.tasks)
            raise UserError(
                f"{metric.name} is no metric of a task of {task}; choose of {', '.join(possible)}, or give a function"
            )
    names = [metric.name for metric in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"metrics has {twice[0]!r} twice; give each a name of its own (polyfed.Metric)")
    return tuple(found)


def named(name: str) -> Metric:
    """The built-in metric of a name.

    Raises:
        UserError: there is none, with the nearest.

    >>> named("sensitivity_at_95").label
    'sensitivity at 95 % specificity'
    """
    name = "sensitivity_at_90" if name == "sensitivity_at_specificity" else name
    if name not in METRICS and (share := _SENSITIVITY.fullmatch(name)):
        return _sensitivity(name, float(share[1]))
    if name not in METRICS:
        raise UserError(f"unknown metric {name!r}; {nearest(name, METRICS)}")
    return METRICS[name]


def is_built_in(name: str) -> bool:
    """Whether a metric can be had by this name alone.

    >>> is_built_in("auc"), is_built_in("sensitivity_at_95"), is_built_in("cost")
    (True, True, False)
    """
    return name in METRICS or _SENSITIVITY.fullmatch(name) is not None


def unsendable(metrics: Sequence[Metric]) -> str | None:
    """Why a metric cannot be given to a process that was not forked, as a sentence; None if all can.

    >>> unsendable([METRICS["auc"]]), unsendable([Metric("mine", lambda outputs, targets: 0.0)])[:35]
    (None, "metric 'mine' cannot be sent to ano")
    """
    for metric in metrics:
        try:
            pickle.dumps(metric)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"metric {metric.name!r} cannot be sent to another process ({error})"
    return None


def _one(asked: Any) -> Metric:
    if isinstance(asked, Metric):
        # By its name it would be another function when the run is resumed.
        if is_built_in(asked.name) and asked != named(asked.name):
            raise UserError(f"{asked.name!r} is the name of a built-in metric; give yours another name")
        return asked
    if isinstance(asked, str):
        return _of_user(asked) if ":" in asked else named(asked)
    if not callable(asked):
        raise UserError(
            f"metrics must be names, functions f(outputs, targets) -> float or Metric objects, got {asked!r}"
        )
    name = getattr(asked, "__name__", type(asked).__name__)
    if name == "<lambda>":
        raise UserError("a metric needs a name; give polyfed.Metric('my_name', lambda outputs, targets: ...)")
    return _one(Metric(name, asked, higher_is_better=bool(getattr(asked, "higher_is_better", True))))


def _of_user(path: str) -> Metric:
    """A metric of the user's by `module:name`: a function f(outputs, targets) -> float, or a `Metric`; it has this name."""
    found, name = code.named(path, "metric"), path.rpartition(":")[2].rpartition(".")[2]
    if isinstance(found, Metric):
        return found if found.name == name else replace(found, name=name, label=found.label)
    return _one(Metric(name, found, higher_is_better=bool(getattr(found, "higher_is_better", True))))


def written(metric: Metric) -> str:
    """How a configuration holds a metric: by `module:name` if it was given so, else by its name."""
    return code.written(metric) or code.written(metric.function) or metric.name


# -- what they compute ------------------------------------------------------------------------------------------------


def probabilities(outputs: Tensor, task: str) -> NDArray[np.float64]:
    """Of logits: softmax over classes, or a sigmoid a label; shape (n, classes) or (n, labels).

    >>> probabilities(torch.zeros(1, 2), "classification")
    array([[0.5, 0.5]])
    """
    logits = outputs.double()
    found = logits.softmax(1) if task == "classification" else logits.sigmoid()
    return np.asarray(found.numpy(), dtype=np.float64)


def binary_columns(outputs: Tensor, targets: Tensor) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
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


def _over_columns(score: Callable[[Any, Any], float], outputs: Tensor, targets: Tensor) -> float:
    """Mean over the two-class problems of `score(is positive, value)`."""
    if not bool(torch.isfinite(outputs).all()):
        return float("nan")
    pairs = binary_columns(outputs, targets)
    return float(np.mean([score(positive, value) for value, positive in pairs])) if pairs else float("nan")


# scikit-learn's functions take milliseconds to check their input, as long as an epoch of a small network on a small table.
def _auc(outputs: Tensor, targets: Tensor) -> float:
    return _over_columns(_share_in_order, outputs, targets)


def _share_in_order(positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Share of the pairs of a positive and a negative in which the positive has the higher value; equal ones count half."""
    _, place, count = np.unique(value, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # from 1; equal values have the mean of theirs
    m = int(positive.sum())
    return float((ranks[positive].sum() - m * (m + 1) / 2) / (m * (len(positive) - m)))


def _average_precision(outputs: Tensor, targets: Tensor) -> float:
    return _over_columns(_mean_precision, outputs, targets)


def _mean_precision(positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Precision at each threshold, weighted by the recall that is gained there."""
    order = np.argsort(-value)
    found = np.cumsum(positive[order])
    at = np.flatnonzero(np.diff(value[order], append=-np.inf))  # the last of equal values
    return float((np.diff(found[at], prepend=0) * found[at] / (at + 1)).sum() / found[-1])


def _share_found(percent: float, positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    negatives = np.sort(value[~positive])
    # The lowest threshold with at least this share of the negatives at or below it; positives must lie above.
    threshold = negatives[max(0, int(np.ceil(percent / 100 * len(negatives) - 1e-9)) - 1)]
    return float((value[positive] > threshold).mean())


@cache  # one object a name, so that a metric equals itself
def _sensitivity(name: str, percent: float) -> Metric:
    if not 0 < percent < 100:
        raise UserError(f"{name}: the specificity must be above 0 and below 100 per cent, got {percent:g}")
    found = partial(_over_columns, partial(_share_found, percent))
    return Metric(name, found, unit="%", label=f"sensitivity at {percent:g} % specificity", tasks=_CLASSES)


def _predicted(outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    if targets.dim() == 2:
        return (outputs > 0).numpy(), (targets > 0.5).numpy()
    return outputs.argmax(1).numpy(), targets.numpy()


def _hits(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    predicted, true = _predicted(outputs, targets)
    right = np.asarray(predicted == true, dtype=np.float64)
    return right if right.ndim == 1 else right.mean(axis=1)


def _balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Mean over the classes that occur of the share found (recall); for labels over both values of each."""
    predicted, true = _predicted(outputs, targets)
    columns = [(predicted, true)] if true.ndim == 1 else [(predicted[:, k], true[:, k]) for k in range(true.shape[1])]
    return float(np.mean([np.mean([np.mean(p[t == c] == c) for c in np.unique(t)]) for p, t in columns]))


def _f1(outputs: Tensor, targets: Tensor) -> float:
    """Of class 1 where there are two; else the mean over the classes or labels that occur."""
    predicted, true = _predicted(outputs, targets)
    if true.ndim == 1:
        classes = [1] if outputs.shape[1] == 2 else np.unique(true).tolist()
        columns = [(predicted == c, true == c) for c in classes]
    else:
        columns = [(predicted[:, k], true[:, k]) for k in range(true.shape[1])]
    scores = [2 * np.sum(p & t) / (np.sum(p) + np.sum(t)) for p, t in columns if np.any(t)]
    return float(np.mean(scores)) if scores else float("nan")


def _task(targets: Tensor) -> str:
    return "multilabel" if targets.dim() == 2 else "classification"


def _brier(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    """Squared error of the probability of class 1 where there are two, of all classes together otherwise; of labels the
    mean."""
    share = probabilities(outputs, _task(targets))
    if targets.dim() == 2:
        return np.asarray(((share - targets.numpy()) ** 2).mean(axis=1))
    if share.shape[1] == 2:
        return np.asarray((share[:, 1] - targets.numpy()) ** 2)
    return np.asarray(((share - np.eye(share.shape[1])[targets.numpy()]) ** 2).sum(axis=1))


def _log_loss(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    values = outputs.double()
    if targets.dim() == 2:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(values, targets.double(), reduction="none").mean(1)
    else:
        loss = torch.nn.functional.cross_entropy(values, targets, reduction="none")
    return np.asarray(loss.numpy())


def _calibration_error(outputs: Tensor, targets: Tensor) -> float:
    """Expected calibration error over ten bins of equal width (Guo et al. 2017): of the probability of the predicted class;
    of labels the mean over them."""
    share = probabilities(outputs, _task(targets))
    if not np.isfinite(share).all():
        return float("nan")
    if targets.dim() == 2:
        columns = [(share[:, k], targets[:, k].numpy() > 0.5) for k in range(share.shape[1])]
    else:
        columns = [(share.max(axis=1), share.argmax(axis=1) == targets.numpy())]
    found = []
    for sure, right in columns:
        bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
        gaps = [abs(right[bins == b].mean() - sure[bins == b].mean()) * np.mean(bins == b) for b in np.unique(bins)]
        found.append(sum(gaps))
    return float(np.mean(found))


def _errors(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    return np.asarray((outputs.double() - targets.double()).numpy()).reshape(len(targets), -1)


def _absolute(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    return np.asarray(np.abs(_errors(outputs, targets)).mean(axis=1))


def _rmse(outputs: Tensor, targets: Tensor) -> float:
    return float(np.sqrt((_errors(outputs, targets) ** 2).mean()))


def _r2(outputs: Tensor, targets: Tensor) -> float:
    true = np.asarray(targets.double().numpy()).reshape(len(targets), -1)
    spread = float(((true - true.mean(axis=0)) ** 2).sum())
    return 1 - float((_errors(outputs, targets) ** 2).sum()) / spread if spread else float("nan")


def _mean(parts: Callable[[Tensor, Tensor], NDArray[np.float64]], outputs: Tensor, targets: Tensor) -> float:
    return float(parts(outputs, targets).mean())


def _mean_of(parts: Callable[[Tensor, Tensor], NDArray[np.float64]]) -> Score:
    return partial(_mean, parts)  # not a lambda, which could not be sent to another process


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _mean_of(_hits), unit="%", tasks=_CLASSES, parts=_hits),
        Metric("balanced_accuracy", _balanced_accuracy, unit="%", label="balanced accuracy", tasks=_CLASSES),
        Metric("auc", _auc, label="AUC", tasks=_CLASSES),
        Metric("average_precision", _average_precision, label="average precision", tasks=_CLASSES),
        Metric("f1", _f1, label="F1", tasks=_CLASSES),
        _sensitivity("sensitivity_at_90", 90.0),
        Metric("brier", _mean_of(_brier), higher_is_better=False, label="Brier score", tasks=_CLASSES, parts=_brier),
        Metric("log_loss", _mean_of(_log_loss), higher_is_better=False, label="log loss", tasks=_CLASSES,
               parts=_log_loss),
        Metric("ece", _calibration_error, higher_is_better=False, label="calibration error", tasks=_CLASSES),
        Metric("r2", _r2, label="R²", tasks=_NUMBERS),
        Metric("mae", _mean_of(_absolute), higher_is_better=False, label="mean absolute error", tasks=_NUMBERS,
               parts=_absolute),
        Metric("rmse", _rmse, higher_is_better=False, label="root mean squared error", tasks=_NUMBERS),
    )
}  # fmt: skip
"""By name; `sensitivity_at_95` and the like are made when they are asked for."""
DEFAULT = {"classification": "accuracy", "multilabel": "auc", "regression": "r2"}
"""The metric of each task that decides if none is asked for."""
COMPARED = {"regression": ("mae", "r2")}
"""Those of a comparison, by task, where it is not that metric: the interval of an R² of 30 examples can be hundreds wide."""
