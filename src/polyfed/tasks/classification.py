"""Defines the task of choosing one of several classes for each example."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import ConstantModel, Floats, SimpleModel
from polyfed.core.io.text.number_format import count_with_noun, format_batch_shape
from polyfed.core.tasks.task import Loss, Task
from polyfed.tasks.scores import score_functions as scores
from polyfed.tasks.simple_models.linear_models import LIBRARY, fit_logistic
from polyfed.tasks.simple_models.tree_models import fit_trees

_TASKS = frozenset({"classification", "multilabel"})
_SENSITIVITY_NAME = re.compile(scores.SENSITIVITY_PREFIX + r"(\d{1,2}(?:\.\d+)?)")


@cache  # one object per name, so that two look-ups are equal
def _sensitivity_metric(name: str, percent: float) -> Metric:
    if not 0 < percent < 100:
        raise UserError(f"{name}: the specificity must be above 0 and below 100 per cent, got {percent:g}")
    score = partial(scores.mean_over_binary_problems, partial(scores.sensitivity_at_specificity, percent))
    return Metric(name, score, unit="%", label=f"sensitivity at {percent:g} % specificity", tasks=_TASKS)


CLASS_METRICS = (
    Metric(
        "accuracy", scores.mean_over_examples(scores.correct_per_example), unit="%",
        tasks=_TASKS, per_example=scores.correct_per_example,
    ),
    Metric("balanced_accuracy", scores.balanced_accuracy, unit="%", label="balanced accuracy", tasks=_TASKS),
    Metric("auc", scores.auc, label="AUC", tasks=_TASKS),
    Metric("average_precision", scores.average_precision, label="average precision", tasks=_TASKS),
    Metric("f1", scores.f1, label="F1", tasks=_TASKS),
    _sensitivity_metric("sensitivity_at_90", 90.0),
    Metric(
        "brier", scores.mean_over_examples(scores.brier_per_example), higher_is_better=False, label="Brier score",
        tasks=_TASKS, per_example=scores.brier_per_example,
    ),
    Metric(
        "log_loss", scores.mean_over_examples(scores.log_loss_per_example), higher_is_better=False, label="log loss",
        tasks=_TASKS, per_example=scores.log_loss_per_example,
    ),
    Metric("ece", scores.calibration_error, higher_is_better=False, label="calibration error", tasks=_TASKS),
)  # fmt: skip
"""The metrics of classes and of labels."""


def find_class_metric(name: str) -> Metric | None:
    """Returns the metric of classes or labels of this name (`sensitivity_at_95`, say), or None."""
    name = "sensitivity_at_90" if name == "sensitivity_at_specificity" else name
    for metric in CLASS_METRICS:
        if metric.name == name:
            return metric
    share = _SENSITIVITY_NAME.fullmatch(name)
    return None if share is None else _sensitivity_metric(name, float(share[1]))


@final
@dataclass(frozen=True)
class Classification(Task):
    """Defines the task of choosing one of K classes: targets are integers from 0, shape (n,), outputs are logits, shape
    (n, K).

    >>> Classification().num_outputs(torch.tensor([0, 2, 1])), Classification() == "classification"
    (3, True)
    """

    name: ClassVar[str] = "classification"
    one_class_per_example: ClassVar[bool] = True
    counts_each_example_once: ClassVar[bool] = True
    outputs_are_classes: ClassVar[bool] = True
    rarest_limits_score: ClassVar[bool] = True
    counts_title: ClassVar[str] = "by class"
    target_word: ClassVar[str] = "class"
    outputs_meaning: ClassVar[str] = "logits, whose softmax is the probability of each class."

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics of classes; accuracy, the default, comes first."""
        return CLASS_METRICS

    def find_metric(self, name: str) -> Metric | None:
        """Returns the metric with this name, which may be `sensitivity_at_95` and the like; None if there is none."""
        return find_class_metric(name)

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Returns whole-number labels as int64, since torch's loss refuses others; else unchanged."""
        y = targets
        fits = y.dim() != 1 or y.is_floating_point() or y.is_complex() or y.dtype in (torch.int64, torch.uint8)
        return y if fits else y.to(torch.int64)

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Raises a `UserError` unless targets are integers of shape (n,), from 0 to below `num_outputs`."""
        if num_outputs is not None:
            _check_labels_of_data_set(targets, name, num_outputs)
            return
        if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
            raise UserError(f"{name} labels must be integers of shape (n,), {class_labels_error(targets)}")
        if int(targets.min()) < 0:
            raise UserError(f"{name} labels must count from 0, found {int(targets.min())}; "
                            "number the classes: names, y = numpy.unique(labels, return_inverse=True)")  # fmt: skip

    def num_outputs(self, targets: Tensor, names: Sequence[str] = ()) -> int:
        """Returns the number of classes: the number of `names` or, without names, the largest label plus one."""
        return len(names) or 1 + int(targets.max())

    def check_outputs(self, shape: tuple[int, ...], targets: Tensor, name: str) -> None:
        """Raises a `UserError` unless the network has one logit for each class that occurs in the targets."""
        if len(shape) != 1:
            raise UserError(
                f"{name}: the network must give logits of shape (batch, classes), got {format_batch_shape(shape)}"
            )
        smallest, largest = int(targets.min()), int(targets.max())
        if largest >= shape[0]:
            cure = "change the network's output size or the labels"
            if shape[0] == 1:
                cure = (
                    f"give it an output for each class, {largest + 1} or more: losses and metrics take a logit of each"
                )
            elif smallest >= 1 and largest == shape[0]:
                cure = "labels count from 0: subtract 1 if they begin at 1"
            raise UserError(
                f"{name} has label {largest}, but the network has {count_with_noun(shape[0], 'output')} (classes 0 to "
                f"{shape[0] - 1}); {cure}"
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the examples, a scalar tensor."""
        return F.cross_entropy(outputs, targets)

    def elementwise_loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns the cross-entropy of each example, shape (n,)."""
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)

    def training_loss(self, targets: Tensor, class_weights: Any = None, label_smoothing: float = 0.0) -> Loss:
        """Returns (outputs, targets) -> mean cross-entropy, with label smoothing and class weights if given."""
        if class_weights is None:
            return partial(F.cross_entropy, label_smoothing=label_smoothing)

        def weighted_loss(outputs: Tensor, labels: Tensor) -> Tensor:
            weights = resolve_class_weights(class_weights, targets, outputs.shape[1])
            weights = weights.to(outputs.device, outputs.dtype)
            if not bool(weights[labels].any()):  # torch would divide 0 by 0
                return outputs.sum() * 0
            return F.cross_entropy(outputs, labels, weight=weights, label_smoothing=label_smoothing)

        return weighted_loss

    def minibatch_weight(self, targets: Tensor, class_weights: Any = None) -> Callable[[Tensor], float]:
        """Returns the function (labels of a minibatch) -> the sum of their class weights."""
        return len if class_weights is None else sum_of_class_weights(class_weights, targets)

    def output_distance(self, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """Returns the mean KL(teacher ‖ student) of class probabilities, softened by a temperature."""
        return softened_divergence(teacher, student, temperature)

    def to_predictions(self, outputs: Tensor) -> NDArray[np.float64]:
        """Returns the probability of each class, shape (n, K)."""
        return scores.class_probabilities(outputs)

    def prediction_columns(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns `{column: values}` with each row's most probable class ("" for NaN) and probabilities."""
        shares = self.to_predictions(outputs)
        probabilities = {f"probability of {name}": shares[:, i].tolist() for i, name in enumerate(names)}
        predicted = ["" if np.isnan(row).any() else names[int(row.argmax())] for row in shares]
        return {"predicted": predicted, **probabilities}

    def yes_no_columns(self, num_outputs: int) -> tuple[int, ...]:
        """Returns the outputs that each answer a yes/no question: class 1 if there are two classes, else every class."""
        return (1,) if num_outputs == 2 else tuple(range(num_outputs))

    def strata(self, targets: Tensor) -> NDArray[Any]:
        """Returns each example's class, by which splits are stratified and partitions divide."""
        classes: NDArray[Any] = targets.cpu().numpy()
        return classes

    def class_counts(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        """Returns the number of examples of each class, as a tuple."""
        return tuple(targets.bincount(minlength=num_classes).tolist())

    def rarest_class(self, targets: Tensor) -> tuple[int, int]:
        """Returns (number of examples, class) for the rarest class that occurs; (0, class) if only one class occurs.

        >>> Classification().rarest_class(torch.tensor([0, 2, 2, 2])), Classification().rarest_class(torch.tensor([1, 1]))
        ((1, 0), (0, 1))
        """
        counts = targets.bincount()
        present = counts.nonzero()[:, 0]
        if len(present) < 2:
            return 0, int(present[0])
        rarest = int(present[counts[present].argmin()])
        return int(counts[rarest]), rarest

    def describe_rarest(self, number: int, class_name: str, num_classes: int) -> str:
        """Returns words for the number of examples of the rarest class, such as "12 of the rarer class (ill)"."""
        if not number:
            return "all of one class"
        suffix = f" ({class_name})" if class_name else ""
        return f"{number} of the {'rarest' if num_classes > 2 else 'rarer'} class{suffix}"

    def constant_model(self) -> ConstantModel:
        """Returns the model that answers every example with the frequencies of the classes in the training examples."""
        words = "always answering the most frequent class"
        return ConstantModel("majority", "share of each class", words, _log_class_shares)

    def simple_models(self) -> tuple[SimpleModel, ...]:
        """Returns the models without a network: logistic regression and gradient-boosted trees."""
        return (
            SimpleModel("logistic_regression", "logistic regression", fit_logistic, library=LIBRARY),
            SimpleModel(
                "gradient_boosting", "gradient-boosted trees", fit_trees, is_trees=True, library="scikit-learn"
            ),
        )


def class_labels_error(labels: Tensor) -> str:
    """Returns a sentence that says why labels are not class indices (integers of shape (n,)), and what to do.

    >>> class_labels_error(torch.tensor([[1], [0]]))
    'got torch.int64 of shape (2, 1); give labels.squeeze(1)'
    """
    description = f"got {labels.dtype} of shape {tuple(labels.shape)}"
    are_integers = not labels.is_floating_point() or bool((labels == labels.floor()).all())
    conversion = ".long()" if labels.is_floating_point() else ""
    if labels.dim() > 2:
        return f"{description}; give task='segmentation' if they are the class of each pixel, and else one class an example"
    if not are_integers:
        return f"{description}, with fractions; give task='regression' if they are amounts"
    if labels.dim() == 1:
        of_array = " of a tensor, labels.astype(int) of an array" if conversion else ""
        return f"{description}; give labels{conversion}{of_array}, or task='regression' if they are amounts"
    if labels.shape[1] == 1:
        return f"{description}; give labels.squeeze(1){conversion}"
    if bool(((labels == 0) | (labels == 1)).all()):
        one_hot = bool((labels.sum(1) == 1).all())
        return f"{description}; give labels.argmax(1)" if one_hot else f"{description}; give task='multilabel'"
    return (
        f"{description}; give one class an example, task='regression' if they are amounts, 'tokens' if they are the class "
        "of each token, or 'survival' if they are times and events"
    )


def softened_divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Returns the mean KL(teacher ‖ student) of logits along the last dimension, softened by a temperature."""
    log_p, log_q = (F.log_softmax(z / temperature, dim=-1) for z in (teacher, student))
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def _check_labels_of_data_set(labels: Tensor, name: str, num_classes: int) -> None:
    if labels.dim() != 1 or labels.is_floating_point():
        raise UserError(f"{name} labels must be one whole number per example, got {labels.dtype} {tuple(labels.shape)}")
    if not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise UserError(
            f"{name} labels run from {int(labels.min())} to {int(labels.max())}; with {num_classes} classes they must "
            f"run from 0 to {num_classes - 1}"
        )


def fixed_class_weights(class_weights: Sequence[float], num_outputs: int) -> Tensor:
    """Returns the user's class weights, one for each output, as float64.

    Raises:
        UserError: another number of weights than of outputs.
    """
    if len(class_weights) != num_outputs:
        raise UserError(
            f"class_weights has {len(class_weights)} numbers, but the network has {num_outputs} outputs; give one each"
        )
    return torch.tensor(class_weights, dtype=torch.float64)


def resolve_class_weights(class_weights: Any, labels: Tensor, num_outputs: int) -> Tensor:
    """Returns the user's class weights, or for "balanced" weights by which each class that occurs counts the same."""
    if class_weights != "balanced":
        return fixed_class_weights(class_weights, num_outputs)
    counts = torch.bincount(labels, minlength=num_outputs).to(torch.float64)
    return torch.where(counts > 0, len(labels) / (int((counts > 0).sum()) * counts), 1.0)


def sum_of_class_weights(class_weights: Any, labels: Tensor) -> Callable[[Tensor], float]:
    """Returns the function (some labels) -> the sum of their class weights, by which their weighted mean loss counts.

    Args:
        class_weights: as `resolve_class_weights` has them.
        labels: all training labels.
    """
    number = int(labels.max()) + 1 if class_weights == "balanced" else len(class_weights)
    weights = resolve_class_weights(class_weights, labels, number)
    return lambda some_labels: float(weights.to(some_labels.device)[some_labels].sum())


def _log_class_shares(labels: NDArray[Any], classes: int) -> Floats:
    """Returns the logarithm of each class's share; one pseudo-example, spread over all classes, keeps it finite."""
    counts = np.bincount(labels, minlength=classes) + 1 / classes
    return np.asarray(np.log(counts / counts.sum()))
