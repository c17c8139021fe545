"""Computes the loss of the model that a client received, before it trains; fair methods weigh clients by it."""

import torch
from torch import nn

from polyfed.core.algorithm import Client
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.training.config import LocalTraining


def loss_of_received_model(module: nn.Module, client: Client, method: LocalTraining) -> float:
    """Returns the mean loss F_i(θ) on all training examples, in evaluation mode and without penalties."""
    labels = client.train.labels
    outputs = predict(module, client.train)
    with torch.no_grad():
        return float(method.criterion(client)(outputs.to(labels.device), labels))
