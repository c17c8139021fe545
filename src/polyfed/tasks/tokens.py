"""Defines the task of predicting a class for each token of a sequence: a tag, or the next token of a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.simple_model import ConstantModel, Floats
from polyfed.core.examples.pytree import Inputs, named_leaves, tree_map
from polyfed.core.io.text.number_format import format_batch_shape
from polyfed.core.tasks.task import Loss, Task
from polyfed.tasks.classification import resolve_class_weights, softened_divergence, sum_of_class_weights
from polyfed.tasks.scores.entities import BioTags, EntityF1, has_entities

IGNORED = -100
"""The target of tokens that neither train a network nor are scored, in the targets that clients keep."""


@final
@dataclass(frozen=True)
class Tokens(Task):
    """Defines the task of predicting a class for each token: targets are integers, shape (n, T), outputs are logits,
    shape (n, T, V).

    The loss is the mean cross-entropy over all tokens of a minibatch that are not ignored, so that each token counts the
    same, and a longer document more. Clients keep `IGNORED` as the target of ignored tokens.

    Args:
        kind: "tagging" for targets of their own; "next_token" to predict each token from those before it. Then targets may
            be left out, and are the inputs one position to the left.
        tags: the name of each class. Tags of the form "O", "B-kind", "I-kind" have the metric `entity_f1`.
        ignore_index: the target of tokens that do not count, such as padding.
        padding: the input token that fills up short sequences at their end. A minibatch for training is cut to its longest
            sequence; an input named `attention_mask` says that instead, if there is one, and what it masks at the beginning
            is no next token either. None never cuts.

    >>> Tokens(kind="next_token").complete_targets(torch.tensor([[5, 7, 6, 0, 0]]), torch.tensor([0])).tolist()
    [[7, 6, -100, -100, -100]]
    """

    kind: Literal["tagging", "next_token"] = "tagging"
    tags: tuple[str, ...] = ()
    ignore_index: int = IGNORED
    padding: int | None = 0

    name: ClassVar[str] = "tokens"
    outputs_are_classes: ClassVar[bool] = True
    output_axis: ClassVar[int] = 2
    counts_title: ClassVar[str] = "by client, and their tokens by class"
    target_word: ClassVar[str] = "class"
    outputs_meaning: ClassVar[str] = "logits of the classes of each token; softmax gives probabilities."
    no_curves_reason: ClassVar[str] = (
        "ROC curves and counts are of examples with one class; these networks tag each token."
    )

    def __post_init__(self) -> None:
        tags: Any = self.tags
        if isinstance(tags, list):  # as files give it
            object.__setattr__(self, "tags", tuple(tags))
        super().__post_init__()
        if has_entities(self.tags):
            BioTags(self.tags)

    # -- targets --------------------------------------------------------------------------------------------------

    @property
    def makes_targets(self) -> bool:
        """Returns whether the task makes the targets from the inputs: True if each target is the next token."""
        return self.kind == "next_token"

    def complete_targets(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Returns the targets, or for next tokens without any the inputs shifted left by one."""
        if not self.makes_targets or targets.dim() != 1:
            return targets
        tokens = _find_token_part(inputs)
        if tokens is None:
            raise UserError("inputs hold no integers of shape (num, length), whose next tokens could be predicted")
        mask = _attention_mask(inputs, tokens)
        is_real = _real_tokens(inputs, tokens, self.padding) if mask is None or self.padding is None else mask != 0
        targets = torch.full_like(tokens, IGNORED, dtype=torch.int64)
        targets[:, :-1] = torch.where(is_real[:, 1:], tokens[:, 1:].long(), IGNORED)
        return targets

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Returns the targets as int64, with the value `IGNORED` for tokens that do not count."""
        if targets.is_floating_point() or targets.is_complex() or targets.dim() != 2:
            return targets  # `check_targets` refuses it
        targets = targets if targets.dtype == torch.int64 else targets.long()
        if self.ignore_index == IGNORED or not bool((targets == self.ignore_index).any()):
            return targets
        return torch.where(targets == self.ignore_index, IGNORED, targets)

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Raises a `UserError` unless targets are one valid class per token, and each example has a token that counts."""
        if targets.dim() != 2 or targets.is_floating_point():
            raise UserError(
                f"{name} targets must be one class for each token, integers of shape (num, length), got {targets.dtype} of "
                f"shape {tuple(targets.shape)}"
            )
        limit = len(self.tags) or num_outputs
        is_counted = targets != IGNORED
        is_wrong = is_counted & ((targets < 0) | (targets >= (limit or torch.iinfo(torch.int64).max)))
        if bool(is_wrong.any()):
            row, place = is_wrong.nonzero()[0].tolist()
            range_text = f"with {limit} classes they run from 0 to {limit - 1}" if limit else "classes count from 0"
            raise UserError(
                f"{name} targets: row {row}, position {place} is {int(targets[row, place])}; {range_text}, and "
                f"{self.ignore_index} is ignored"
            )
        if not bool((has_counted := is_counted.any(1)).all()):
            row = int((~has_counted).nonzero()[0, 0])
            raise UserError(
                f"{name} targets: all tokens of row {row} are ignored ({self.ignore_index}); leave the row out, or give a "
                "token of it a class"
            )

    def num_outputs(self, targets: Tensor, names: Sequence[str] = ()) -> int:
        """Returns the number of classes: the number of `names` or tags or, without them, the largest class plus one."""
        return len(names) or len(self.tags) or 1 + int(targets.max())

    def check_outputs(self, shape: tuple[int, ...], targets: Tensor, name: str) -> None:
        """Raises a `UserError` unless the network returns logits for each token, with one for each class that occurs."""
        if len(shape) != 2 or shape[0] != targets.shape[1]:
            raise UserError(
                f"{name}: the network must give logits of shape (batch, {targets.shape[1]}, classes), one row for each "
                f"token of the targets, got {format_batch_shape(shape)}; targets are as long as the inputs"
            )
        if self.tags and shape[1] != len(self.tags):
            raise UserError(
                f"{name}: the network has {shape[1]} outputs for each token, and there are {len(self.tags)} tags; give it "
                "one output for each tag"
            )
        largest = int(targets.max())
        if largest >= shape[1]:
            row = int((targets == largest).nonzero()[0, 0])
            raise UserError(
                f"{name} has class {largest} in row {row}, but the network has {shape[1]} outputs for each token (classes 0 "
                f"to {shape[1] - 1}); all sites need one vocabulary, and outputs for all of it"
            )

    # -- loss -----------------------------------------------------------------------------------------------------

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy over the tokens that are not ignored; 0 if there are none."""
        return _mean_cross_entropy(outputs, targets)

    def training_loss(self, targets: Tensor, class_weights: Any = None, label_smoothing: float = 0.0) -> Loss:
        """Returns (outputs, targets) -> mean cross-entropy of tokens, smoothed and weighted if asked."""
        if class_weights is None:
            return partial(_mean_cross_entropy, label_smoothing=label_smoothing)
        classes = targets[targets != IGNORED]

        def weighted_loss(outputs: Tensor, some_targets: Tensor) -> Tensor:
            weights = resolve_class_weights(class_weights, classes, outputs.shape[2]).to(outputs.device, outputs.dtype)
            return _mean_cross_entropy(outputs, some_targets, weights, label_smoothing)

        return weighted_loss

    def minibatch_weight(self, targets: Tensor, class_weights: Any = None) -> Callable[[Tensor], float]:
        """Returns (targets) -> the number of tokens that count, or the sum of their class weights."""
        count = len if class_weights is None else sum_of_class_weights(class_weights, targets[targets != IGNORED])
        return lambda some_targets: count(some_targets[some_targets != IGNORED])

    def trim_minibatch(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        """Returns the minibatch without the last positions that are padding in all of its examples."""
        tokens = _find_token_part(inputs)
        if tokens is None or tokens.shape != targets.shape:
            return inputs, targets
        length = targets.shape[1]
        is_needed = (_real_tokens(inputs, tokens, self.padding) | (targets != IGNORED)).any(0)
        longest = int(is_needed.nonzero()[-1, 0]) + 1 if bool(is_needed.any()) else length
        if longest == length:
            return inputs, targets

        def cut(part: Tensor) -> Tensor:
            return part[:, :longest] if part.dim() > 1 and part.shape[1] == length else part

        return tree_map(cut, inputs), targets[:, :longest]

    def output_distance(self, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """Returns the mean KL(teacher ‖ student) over all positions, padding included, softened."""
        return softened_divergence(teacher, student, temperature)

    # -- what outputs mean ----------------------------------------------------------------------------------------

    def to_predictions(self, outputs: Tensor) -> NDArray[np.float64]:
        """Returns the probability of each class, shape (n, T, V)."""
        return np.asarray(outputs.double().softmax(-1).numpy())

    def prediction_columns(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns `{column: one text per example}` with the most probable class of each token, separated by spaces."""
        return {"predicted": [" ".join(names[i] for i in row) for row in outputs.argmax(2).tolist()]}

    # -- scores ---------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics, the default first: perplexity (next tokens), entity F1, or accuracy (tags)."""
        if self.makes_targets:
            return (*_PERPLEXITIES, _ACCURACY)
        entities = (self._entity_metric,) if has_entities(self.tags) else ()
        return (*entities, _ACCURACY, *_PERPLEXITIES)

    @property
    def comparison_metrics(self) -> tuple[Metric, ...]:
        """Returns the default metric, which decides, and accuracy."""
        return tuple(dict.fromkeys((self.default_metric, _ACCURACY)))

    def find_metric(self, name: str) -> Metric | None:
        """Returns the metric of this name, or None; `entity_f1` fails later if tags have no names."""
        return self._entity_metric if name == "entity_f1" else super().find_metric(name)

    @property
    def _entity_metric(self) -> Metric:
        return Metric("entity_f1", EntityF1(self.tags), label="entity F1", tasks=_TASKS)

    # -- counts and models without a network ----------------------------------------------------------------------

    def class_counts(self, targets: Tensor, num_classes: int) -> tuple[int, ...] | None:
        """Returns the number of tokens of each class."""
        return tuple(targets[targets != IGNORED].bincount(minlength=num_classes).tolist())

    def constant_model(self) -> ConstantModel:
        """Returns the model that gives every token the frequencies of the classes in the training examples."""
        words = "always answering the most frequent class"
        return ConstantModel("majority", "share of each class among the tokens", words, _log_class_shares)


def _find_token_part(inputs: Inputs) -> Tensor | None:
    """Returns the first part of inputs that holds integers of shape (n, T); `input_ids` if it is there; or None."""
    parts = {
        name: part for name, part in named_leaves(inputs) if part.dim() == 2 and not part.is_floating_point()
    }  # fmt: skip
    masks = [name for name in parts if name.rpartition("/")[2] == "attention_mask"]
    tokens = [name for name in parts if name not in masks]
    return (
        parts[next((name for name in tokens if name.rpartition("/")[2] == "input_ids"), tokens[0])] if tokens else None
    )


def _attention_mask(inputs: Inputs, tokens: Tensor) -> Tensor | None:
    """Returns the part of the inputs named `attention_mask`, which says which tokens are not padding; None without one."""
    mask = next((part for name, part in named_leaves(inputs) if name.rpartition("/")[2] == "attention_mask"), None)
    return mask if mask is not None and mask.shape == tokens.shape else None


def _real_tokens(inputs: Inputs, tokens: Tensor, padding: int | None) -> Tensor:
    """Returns which positions are at or before the last token of their row that is not padding, shape (n, T)."""
    if padding is None:
        is_token = torch.ones_like(tokens, dtype=torch.bool)
    elif (mask := _attention_mask(inputs, tokens)) is not None:
        is_token = mask != 0
    else:
        is_token = tokens != padding
    return is_token.flip(1).cummax(1).values.flip(1)


def _mean_cross_entropy(
    outputs: Tensor, targets: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    if outputs.dim() == 2:  # one row of logits for all tokens of an example, as the constant model gives
        outputs = outputs.unsqueeze(1).expand(-1, targets.shape[1], -1)
    counted = targets[targets != IGNORED]
    if not len(counted) or (weights is not None and not bool(weights[counted].any())):  # torch would divide 0 by 0
        return outputs.sum() * 0
    return F.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), weight=weights, ignore_index=IGNORED, label_smoothing=label_smoothing
    )


def _log_losses(outputs: Tensor, targets: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the sum of the log losses of each document's tokens, and the number of these; both of shape (n,)."""
    if outputs.dim() == 2:
        outputs = outputs.unsqueeze(1).expand(-1, targets.shape[1], -1)
    losses = F.cross_entropy(outputs.double().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return np.asarray(losses.sum(1).numpy()), np.asarray((targets != IGNORED).double().sum(1).numpy())


def perplexity(outputs: Tensor, targets: Tensor) -> float:
    """Returns exp of the mean log loss over all tokens of all documents.

    >>> round(perplexity(torch.zeros(1, 3, 8), torch.tensor([[0, 5, -100]])), 6)
    8.0
    """
    losses, tokens = _log_losses(outputs, targets)
    return float(np.exp(losses.sum() / tokens.sum())) if tokens.sum() else float("nan")


def document_perplexity(outputs: Tensor, targets: Tensor) -> float:
    """Returns exp of the mean over documents of each document's mean log loss, so that all documents count the same."""
    losses, tokens = _log_losses(outputs, targets)
    return float(np.exp((losses[tokens > 0] / tokens[tokens > 0]).mean())) if tokens.sum() else float("nan")


def token_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Returns the share of tokens for which the most probable class is correct; NaN if an output for one of them is."""
    is_counted = targets != IGNORED
    outputs = outputs if outputs.dim() == 3 else outputs.unsqueeze(1)
    if bool(outputs.isnan().any(2).expand_as(targets)[is_counted].any()):
        return float("nan")
    return float((outputs.argmax(2).expand_as(targets) == targets)[is_counted].double().mean())


def _log_class_shares(targets: NDArray[Any], classes: int) -> Floats:
    """Returns the log of each class's share of tokens, finite by one pseudo-token over all classes."""
    counts = np.bincount(targets[targets != IGNORED], minlength=classes) + 1 / classes
    return np.asarray(np.log(counts / counts.sum()))


_TASKS = frozenset({"tokens"})
_ACCURACY = Metric("token_accuracy", token_accuracy, unit="%", label="token accuracy", tasks=_TASKS)
_PERPLEXITIES = (
    Metric("perplexity", perplexity, higher_is_better=False, tasks=_TASKS),
    Metric(
        "document_perplexity", document_perplexity, higher_is_better=False, label="perplexity by document", tasks=_TASKS
    ),
)  # fmt: skip
