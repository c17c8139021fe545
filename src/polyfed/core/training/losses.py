"""Builds the loss function that local training minimises, the weights for drawing examples, and the criterion of early
stopping.

The loss is the task's, with class weights, or the client's own; examples are drawn once an epoch, or by weight.
"""

import copy
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.core.io.trusted_code import import_trusted_callable
from polyfed.core.tasks.task import Loss, Task
from polyfed.core.tasks.task_lookup import get_task

ClassWeights = Literal["balanced"] | tuple[float, ...] | None


def build_loss(
    examples: Examples,
    task: Task | str,
    client_loss: Loss | None = None,
    label_smoothing: float = 0.0,
    class_weights: ClassWeights = None,
) -> Loss:
    """Returns the function (outputs, targets) -> scalar loss of a minibatch.

    Args:
        examples: the client's training examples, whose labels "balanced" counts.
        task: whose loss it is, unless `client_loss` is given.
        client_loss: a client's own loss (`Client.loss`).
        label_smoothing: of the cross-entropy.
        class_weights: w of the weighted mean Σ_i w(y_i)·l_i / Σ_i w(y_i) over the minibatch, one a class; "balanced" is
            w_c = n/(K·n_c), n_c of n examples being of class c and K the number of classes that occur (1 for others). With
            several labels, what a label's positive examples count: "balanced" is their number's inverse odds,
            (n − n_l)/n_l.

    Raises:
        UserError: weights of classes, or label smoothing, for a loss that has no use for them, or another number of weights.

    >>> three = Examples(torch.zeros(3, 1), torch.tensor([0, 0, 1]))
    >>> loss = build_loss(three, "classification", class_weights="balanced")  # 0.75 and 1.5
    >>> round(float(loss(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))), 4)
    1.649
    """
    if client_loss is not None:
        if class_weights is not None or label_smoothing:
            raise UserError("class_weights and label_smoothing are of the task's loss, and a client has a loss of its own; "
                            "leave them out, or put them into that loss")  # fmt: skip
        return _checked_client_loss(client_loss, examples.device)
    return get_task(task).training_loss(examples.labels, class_weights, label_smoothing)


def import_loss(path: str) -> Loss:
    """Imports a user's loss given as `module:name`, a function (outputs, targets) or a class made without arguments.

    Raises:
        UserError: as `polyfed.core.io.trusted_code.import_trusted_callable`, or the class needs arguments.

    >>> from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code
    >>> with restore_trusted_names_afterwards():
    ...     trust_code("torch.nn:MultiMarginLoss")
    ...     import_loss("torch.nn:MultiMarginLoss")
    MultiMarginLoss()
    """
    obj = import_trusted_callable(path, "loss")
    if not isinstance(obj, type):
        return obj
    try:
        loss = obj()
    except TypeError as error:
        raise UserError(f"loss {path!r}: it cannot be made without arguments ({error}); name a function, or a class "
                        "that needs none") from error  # fmt: skip
    if not callable(loss):
        raise UserError(f"loss {path!r}: a {type(loss).__name__} cannot be called with outputs and targets")
    return loss  # type: ignore[no-any-return]


def _checked_client_loss(loss: Loss, device: torch.device) -> Loss:
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(device)  # its weights of classes, say

    def checked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        try:
            value = loss(outputs, targets)
        except Exception as error:  # whatever the user's loss raises
            raise UserError(f"its loss {describe_failed_loss(outputs, targets, error)}") from error
        check_is_one_number(value, "its loss")
        return value

    return checked_loss


def describe_failed_loss(outputs: Tensor, targets: Tensor, error: Exception) -> str:
    """Returns the end of a sentence about a user's loss: on what it fails, how, and how it is called."""
    return (
        f"fails on outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} ({targets.dtype}): "
        f"{describe_exception(error)}. It is called as loss(outputs, targets), with what the network returns, logits "
        "for classes"
    )


def check_is_one_number(value: object, whose: str) -> None:
    """Raises a `UserError` that begins with `whose` unless the value of a loss is a tensor with one number."""
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UserError(f"{whose} must return a tensor with one number, the mean over the minibatch, got {shape}")


def sampling_weights(examples: Examples, task: Task | str, sampler: str) -> Tensor | None:
    """Returns the weights of drawing with replacement, float64, (n,); None if each is drawn once.

    Args:
        examples: those to draw from.
        task: of the labels.
        sampler: "shuffle"; "balanced", every class as often as the others; or the column of `examples` with the weights.

    Raises:
        UserError: "balanced" without classes, or a column that is missing or holds no weights.

    >>> sampling_weights(Examples(torch.zeros(3, 1), torch.tensor([0, 0, 1])), "classification", "balanced").tolist()
    [0.5, 0.5, 1.0]
    """
    if sampler == "shuffle":
        return None
    if sampler == "balanced":
        if not get_task(task).one_class_per_example:
            raise UserError(
                f"sampler='balanced' draws classes alike, but the task is {task}; name a column with weights"
            )
        labels = examples.labels
        return 1 / torch.bincount(labels).to(torch.float64)[labels]
    values = examples.column(sampler)
    weights = torch.from_numpy(values.astype("float64")) if values.dtype.kind in "biuf" else torch.tensor([math.nan])
    if not bool(torch.isfinite(weights).all()) or bool((weights < 0).any()) or not 0 < float(weights.sum()) < math.inf:
        raise UserError(f"sampler={sampler!r}: a column of weights has numbers of at least 0, some of them positive")
    return weights


def build_early_stopping(model: nn.Module, client: Client, loss: Loss, patience: int) -> Callable[[], bool]:
    """Returns a function to call after epochs: True after `patience` without a new lowest validation loss.

    The network stays in the mode for training.

    Raises:
        UserError: the client has no validation examples.
    """
    examples = client.val
    if examples is None:
        raise UserError(
            f"patience={patience}: client {client.id!r} has no validation examples to stop by; give val=..., or "
            "--data.val-fraction"
        )
    least, epochs_since = math.inf, 0

    def should_stop() -> bool:
        nonlocal least, epochs_since
        device = examples.device
        with torch.no_grad():
            current_loss = float(loss(predict(model, examples).to(device), examples.labels))
        model.train()
        least, epochs_since = (current_loss, 0) if current_loss < least else (least, epochs_since + 1)
        return epochs_since >= patience

    return should_stop
