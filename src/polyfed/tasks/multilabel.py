"""Defines the task of deciding for each of several labels whether an example has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import ConstantModel, SimpleModel
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.core.tasks.task import Loss, Task
from polyfed.tasks.classification import CLASS_METRICS, find_class_metric, fixed_class_weights, softened_divergence
from polyfed.tasks.scores.score_functions import label_probabilities
from polyfed.tasks.simple_models.linear_models import LIBRARY, fit_logistic_by_label, label_share_logits
from polyfed.tasks.simple_models.tree_models import fit_trees_by_label

_MOST_LABELS = 200  # above which one simple model per label takes minutes


@final
@dataclass(frozen=True)
class Multilabel(Task):
    """Defines the task of deciding for each of K labels whether an example has it: targets are 0 or 1, shape (n, K),
    outputs are logits, shape (n, K).

    >>> Multilabel().to_predictions(torch.zeros(1, 2))
    array([[0.5, 0.5]])
    """

    name: ClassVar[str] = "multilabel"
    rarest_limits_score: ClassVar[bool] = True
    counts_title: ClassVar[str] = "that have each label"
    target_word: ClassVar[str] = "label"
    outputs_meaning: ClassVar[str] = "logits, whose sigmoid is the probability of each label."

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics of classification, each computed as a mean over the labels."""
        return CLASS_METRICS

    @property
    def default_metric(self) -> Metric:
        """Returns the metric AUC, averaged over the labels."""
        return next(metric for metric in CLASS_METRICS if metric.name == "auc")

    def find_metric(self, name: str) -> Metric | None:
        """Returns the metric with this name, which may be `sensitivity_at_95` and the like; None if there is none."""
        return find_class_metric(name)

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Returns the targets as floats; those of another form unchanged, for `check_targets` to refuse."""
        return targets if targets.is_floating_point() or targets.dim() != 2 else targets.to(torch.float32)

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Raises a `UserError` unless targets are 0 or 1, of shape (n, labels)."""
        are_labels = bool(((targets == 0) | (targets == 1)).all())
        if num_outputs is not None:
            if targets.dim() != 2 or targets.shape[1] != num_outputs:
                raise UserError(
                    f"{name} labels have shape {tuple(targets.shape)}; {num_outputs} labels need (num, {num_outputs})"
                )
            if not are_labels:
                raise UserError(f"{name} labels of a multi-label task must be 0 or 1")
        elif targets.dim() != 2 or not are_labels:
            raise UserError(f"{name} labels must be 0 or 1 of shape (n, labels), {multilabel_labels_error(targets)}")

    def check_table_column(self, values: NDArray[np.float64], name: str) -> None:
        """Raises a `UserError` if a target column of a table has a value other than 0 or 1."""
        odd = np.flatnonzero((values != 0) & (values != 1))
        if len(odd):
            raise UserError(
                f"target {name!r} of several labels must be 0 or 1, and is not in {format_row_numbers(odd)}"
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the binary cross-entropy, averaged over examples and labels."""
        return F.binary_cross_entropy_with_logits(outputs, targets)

    def elementwise_loss(self, outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns the binary cross-entropy of each label, shape (n, K)."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    def training_loss(self, targets: Tensor, class_weights: Any = None, label_smoothing: float = 0.0) -> Loss:
        """Returns (outputs, targets) -> mean binary cross-entropy, positives weighted if asked.

        Raises:
            UserError: label smoothing, which is of the cross-entropy of classes.
        """
        if class_weights is None or label_smoothing:
            return super().training_loss(targets, None, label_smoothing)

        def weighted_loss(outputs: Tensor, labels: Tensor) -> Tensor:
            weights = _resolve_positive_weights(class_weights, targets, outputs.shape[1])
            weights = weights.to(outputs.device, outputs.dtype)
            return F.binary_cross_entropy_with_logits(outputs, labels, pos_weight=weights)

        return weighted_loss

    def output_distance(self, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """Returns the mean divergence of each label's two probabilities, softened by a temperature."""
        # Each label is a binary choice with logits z and 0.
        teacher, student = (F.pad(z.unsqueeze(-1), (0, 1)) for z in (teacher, student))
        return softened_divergence(teacher, student, temperature)

    def to_predictions(self, outputs: Tensor) -> NDArray[np.float64]:
        """Returns the probability of each label, shape (n, K)."""
        return label_probabilities(outputs)

    def prediction_columns(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns `{label: probability of each row}`."""
        shares = self.to_predictions(outputs)
        return {f"probability of {name}": shares[:, i].tolist() for i, name in enumerate(names)}

    def yes_no_columns(self, num_outputs: int) -> tuple[int, ...]:
        """Returns the outputs that each answer a yes/no question: those of all labels."""
        return tuple(range(num_outputs))

    def class_counts(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        """Returns the number of examples that have each label."""
        return tuple(targets.sum(0).long().tolist())

    def rarest_class(self, targets: Tensor) -> tuple[int, int]:
        """Returns (smallest count of 0 or 1 in a label, label); (0, 0) if none takes both values.

        >>> Multilabel().rarest_class(torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]))
        (1, 0)
        """
        positive = (targets > 0).reshape(len(targets), -1).sum(0)
        least = positive.minimum(len(targets) - positive)
        two_sided = (least > 0).nonzero()[:, 0]
        if not len(two_sided):
            return 0, 0
        label = int(two_sided[least[two_sided].argmin()])
        return int(least[label]), label

    def describe_rarest(self, number: int, class_name: str, num_classes: int) -> str:
        """Returns words for the count of `rarest_class`, such as "12 on the rarer side of a label"."""
        return f"{number} on the rarer side of a label" if number else "no label both ways"

    def constant_model(self) -> ConstantModel:
        """Returns the model that answers every example with the share of training examples that have each label."""
        return ConstantModel(
            "majority", "share of each label", "the share of each label", lambda y, _: label_share_logits(y)
        )

    def simple_models(self) -> tuple[SimpleModel, ...]:
        """Returns the models without a network: logistic regression and gradient-boosted trees, fitted for each label."""
        return (
            SimpleModel("logistic_regression", "logistic regression", fit_logistic_by_label, library=LIBRARY),
            SimpleModel(
                "gradient_boosting", "gradient-boosted trees", fit_trees_by_label, is_trees=True, library="scikit-learn"
            ),
        )

    def simple_models_obstacle(self, num_outputs: int) -> str | None:
        """Returns why very many labels get no models without a network, in a sentence; else None."""
        if num_outputs <= _MOST_LABELS:
            return None
        return (
            f"There are more than {_MOST_LABELS} labels, so that logistic regression and gradient-boosted trees alone, with "
            "a model a label, are not among the alternatives."
        )


def multilabel_labels_error(labels: Tensor) -> str:
    """Returns a sentence that says why labels are not multi-label targets (0 or 1, shape (n, labels)), and what to do.

    >>> multilabel_labels_error(torch.tensor([1, 0]))
    'got torch.int64 of shape (2,); give labels.unsqueeze(1) for one label an example'
    """
    description = f"got {labels.dtype} of shape {tuple(labels.shape)}"
    if not bool(((labels == 0) | (labels == 1)).all()):
        return f"{description}, with other values than 0 and 1"
    if labels.dim() == 1:
        return f"{description}; give labels.unsqueeze(1) for one label an example"
    return f"{description}; flatten labels and the network's output: labels.flatten(1)"


def _resolve_positive_weights(class_weights: Any, labels: Tensor, num_outputs: int) -> Tensor:
    if class_weights != "balanced":
        return fixed_class_weights(class_weights, num_outputs)
    number, positive = len(labels), labels.sum(0, dtype=torch.float64)
    return torch.where((positive > 0) & (positive < number), (number - positive) / positive, 1.0)
