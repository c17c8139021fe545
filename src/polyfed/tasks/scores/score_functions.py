"""Computes accuracy, AUC, Brier score and other metrics from a network's outputs and targets.

Outputs are as the network returns them: logits, shape (n, classes) or (n, labels); numbers, (n, outputs), for regression.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import ScoreFunction

_BINS = 10  # bins of the calibration error


def _are_labels(outputs: Tensor, targets: Tensor) -> bool:
    """Returns True for targets of several labels, shape (n, labels), and False for classes, shape (n,)."""
    if targets.dim() == 2 and outputs.shape != targets.shape:
        raise UserError(
            f"targets of shape {tuple(targets.shape)} do not suit outputs of shape {tuple(outputs.shape)}; give classes, "
            "shape (n,), or one label for each output"
        )
    return targets.dim() == 2


def class_probabilities(logits: Tensor) -> NDArray[np.float64]:
    """Returns the probability of each class, the softmax of the logits, shape (n, classes).

    >>> class_probabilities(torch.zeros(1, 2))
    array([[0.5, 0.5]])
    """
    return np.asarray(logits.double().softmax(1).numpy(), dtype=np.float64)


def label_probabilities(logits: Tensor) -> NDArray[np.float64]:
    """Returns the probability of each label, the sigmoid of its logit, shape (n, labels)."""
    return np.asarray(logits.double().sigmoid().numpy(), dtype=np.float64)


def split_into_binary_problems(outputs: Tensor, targets: Tensor) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Splits a task into two-class problems of (scores, whether positive), both (n,).

    Two classes are one problem (class 1 is positive); more classes give one problem each, against the rest; labels give one
    each. Problems that lack examples of either class are left out.
    """
    values = outputs.detach().double()
    if _are_labels(outputs, targets):
        pairs = [(values[:, k].numpy(), (targets[:, k] > 0.5).numpy()) for k in range(targets.shape[1])]
    elif outputs.shape[1] == 2:
        pairs = [((values[:, 1] - values[:, 0]).numpy(), (targets == 1).numpy())]
    else:
        share = values.softmax(1)
        pairs = [(share[:, k].numpy(), (targets == k).numpy()) for k in range(outputs.shape[1])]
    return [(score, positive) for score, positive in pairs if 0 < int(positive.sum()) < len(positive)]


def mean_over_binary_problems(score: Callable[[Any, Any], float], outputs: Tensor, targets: Tensor) -> float:
    """Returns the mean of `score(is positive, value)` over the two-class problems of `split_into_binary_problems`.

    It is NaN if there are no problems, or an output is not finite.
    """
    if not bool(torch.isfinite(outputs).all()):
        return float("nan")
    pairs = split_into_binary_problems(outputs, targets)
    return float(np.mean([score(positive, value) for value, positive in pairs])) if pairs else float("nan")


# scikit-learn's functions check their input for milliseconds, as long as an epoch of a small network on a small table takes.
def auc(outputs: Tensor, targets: Tensor) -> float:
    """Returns the mean area under the ROC curves of each class against the rest, or each label."""
    return mean_over_binary_problems(_binary_auc, outputs, targets)


def _binary_auc(positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Returns the share of (positive, negative) pairs in which the positive has the higher value; ties count half."""
    _, place, count = np.unique(value, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # from 1; ties share their mean rank
    m = int(positive.sum())
    return float((ranks[positive].sum() - m * (m + 1) / 2) / (m * (len(positive) - m)))


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Returns the mean average precision of each class against the rest, or each label."""
    return mean_over_binary_problems(_binary_average_precision, outputs, targets)


def _binary_average_precision(positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Returns the mean precision over all thresholds, weighted by the gain in recall at each."""
    order = np.argsort(-value)
    true_positives = np.cumsum(positive[order])
    last_of_ties = np.flatnonzero(np.diff(value[order], append=-np.inf))  # one threshold for ties
    return float(
        (np.diff(true_positives[last_of_ties], prepend=0) * true_positives[last_of_ties] / (last_of_ties + 1)).sum()
        / true_positives[-1]
    )


SENSITIVITY_PREFIX = "sensitivity_at_"
"""Begins the names of metrics that are a sensitivity; the specificity follows, in per cent."""


def sensitivity_at_specificity(percent: float, positive: NDArray[np.bool_], value: NDArray[np.float64]) -> float:
    """Returns the sensitivity at the lowest threshold at which the specificity is at least `percent` per cent."""
    negatives = np.sort(value[~positive])
    # The lowest threshold with at least this share of the negatives at or below it; positives must lie above.
    threshold = negatives[max(0, int(np.ceil(percent / 100 * len(negatives) - 1e-9)) - 1)]
    return float((value[positive] > threshold).mean())


def _predicted_and_true(outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    if _are_labels(outputs, targets):
        return (outputs > 0).numpy(), (targets > 0.5).numpy()
    return outputs.argmax(1).numpy(), targets.numpy()


def correct_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    """Returns 1 for each correct example, else 0, (n,), or the share of correct labels; NaN for a NaN output."""
    predicted, true = _predicted_and_true(outputs, targets)
    correct = np.asarray(predicted == true, dtype=np.float64).reshape(len(true), -1).mean(axis=1)
    return np.where(outputs.isnan().flatten(1).any(1).numpy(), np.nan, correct)


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Returns the mean recall over classes that occur, or over labels' two values; NaN if an output is."""
    if bool(outputs.isnan().any()):
        return float("nan")
    predicted, true = _predicted_and_true(outputs, targets)
    columns = [(predicted, true)] if true.ndim == 1 else [(predicted[:, k], true[:, k]) for k in range(true.shape[1])]
    return float(np.mean([np.mean([np.mean(p[t == c] == c) for c in np.unique(t)]) for p, t in columns]))


def f1(outputs: Tensor, targets: Tensor) -> float:
    """Returns F1 of class 1 of two, else the mean over classes or labels that occur; NaN if an output is."""
    if bool(outputs.isnan().any()):
        return float("nan")
    predicted, true = _predicted_and_true(outputs, targets)
    if true.ndim == 1:
        classes = [1] if outputs.shape[1] == 2 else np.unique(true).tolist()
        columns = [(predicted == c, true == c) for c in classes]
    else:
        columns = [(predicted[:, k], true[:, k]) for k in range(true.shape[1])]
    scores = [2 * np.sum(p & t) / (np.sum(p) + np.sum(t)) for p, t in columns if np.any(t)]
    return float(np.mean(scores)) if scores else float("nan")


def _class_probabilities(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    return label_probabilities(outputs) if _are_labels(outputs, targets) else class_probabilities(outputs)


def brier_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    """Returns the Brier score of each example, shape (n,).

    This is the squared error of the probability of class 1 if there are two classes, the sum over classes if there are more,
    and the mean over labels.
    """
    share = _class_probabilities(outputs, targets)
    if _are_labels(outputs, targets):
        return np.asarray(((share - targets.numpy()) ** 2).mean(axis=1))
    if share.shape[1] == 2:
        return np.asarray((share[:, 1] - targets.numpy()) ** 2)
    return np.asarray(((share - np.eye(share.shape[1])[targets.numpy()]) ** 2).sum(axis=1))


def log_loss_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    """Returns each example's cross-entropy, (n,), or its labels' mean binary cross-entropy."""
    values = outputs.double()
    if _are_labels(outputs, targets):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(values, targets.double(), reduction="none").mean(1)
    else:
        loss = torch.nn.functional.cross_entropy(values, targets, reduction="none")
    return np.asarray(loss.numpy())


def calibration_error(outputs: Tensor, targets: Tensor) -> float:
    """Returns the expected calibration error over ten bins of equal width (Guo et al. 2017).

    It compares the probability of the predicted class with its accuracy; for labels it is the mean over them.
    """
    share = _class_probabilities(outputs, targets)
    if not np.isfinite(share).all():
        return float("nan")
    if _are_labels(outputs, targets):
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


def _prediction_errors(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    if outputs.numel() != targets.numel() or len(outputs) != len(targets):
        raise UserError(
            f"outputs of shape {tuple(outputs.shape)} do not suit targets of shape {tuple(targets.shape)}; give one output "
            "for each target"
        )
    # (n, 1) less (n,) would be all pairs, (n, n)
    return np.asarray((outputs.double().reshape(targets.shape) - targets.double()).numpy()).reshape(len(targets), -1)


def absolute_error_per_example(outputs: Tensor, targets: Tensor) -> NDArray[np.float64]:
    """Returns the absolute error of each example, averaged over its targets, shape (n,)."""
    return np.asarray(np.abs(_prediction_errors(outputs, targets)).mean(axis=1))


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Returns the root mean squared error over all examples and targets."""
    return float(np.sqrt((_prediction_errors(outputs, targets) ** 2).mean()))


def r2(outputs: Tensor, targets: Tensor) -> float:
    """Returns the coefficient of determination R² over all targets; NaN if the targets do not vary."""
    true = np.asarray(targets.double().numpy()).reshape(len(targets), -1)
    spread = float(((true - true.mean(axis=0)) ** 2).sum())
    return 1 - float((_prediction_errors(outputs, targets) ** 2).sum()) / spread if spread else float("nan")


def _mean_per_example(
    parts: Callable[[Tensor, Tensor], NDArray[np.float64]], outputs: Tensor, targets: Tensor
) -> float:
    return float(parts(outputs, targets).mean())


def mean_over_examples(score_per_example: Callable[[Tensor, Tensor], NDArray[np.float64]]) -> ScoreFunction:
    """Returns a metric that averages `score_per_example` over the examples, and can be pickled."""
    return partial(_mean_per_example, score_per_example)  # not a lambda, which could not be sent to another process
