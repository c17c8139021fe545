"""Builds the loss function with which a client's network is evaluated: the one that training minimises at this client."""

from typing import Any

from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.tasks.task import Loss
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.losses import build_loss


def training_loss_without_penalties(client: Client, method: Any = None) -> Loss:
    """Returns (outputs, targets) -> loss that a client minimises, without a method's penalties, on the CPU.

    Args:
        client: whose own loss it is, if it has one; else the task's.
        method: whose weights of classes and label smoothing count, if it is a `LocalTraining`.

    >>> import torch
    >>> from dataclasses import replace
    >>> from polyfed.testing import small_clients
    >>> client = replace(small_clients(1)[0], loss=lambda outputs, targets: outputs.max())
    >>> float(training_loss_without_penalties(client)(torch.tensor([[1.0, 3.0]]), torch.tensor([0])))
    3.0
    """
    if isinstance(method, LocalTraining):
        criterion = method.criterion(client)
    else:
        criterion = build_loss(client.train, client.task, client.loss)
    device = client.train.device
    if client.loss is None or device.type == "cpu":
        return criterion

    def on_its_device(outputs: Tensor, targets: Tensor) -> Tensor:
        return criterion(outputs.to(device), targets.to(device))

    return on_its_device
