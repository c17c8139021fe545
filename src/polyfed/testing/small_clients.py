"""Builds small federations that a test can train in about a second."""

from typing import final

import torch
from torch import nn

from polyfed.core.algorithm import Client
from polyfed.core.seeds import torch_generator
from polyfed.models.lora import add_lora


@final
class SmallNet(nn.Module):
    """Computes class scores with BatchNorm and dropout, so that tests cover buffers and random numbers.

    A buffer that is not in the state dict counts the training steps and dampens the outputs: whoever trains or evaluates
    it with the count that another client left gets other results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits, shape (batch, 3), of inputs of shape (batch, 6)."""
        if self.training:
            self.steps += 1
        out: torch.Tensor = self.head(self.body(x)) / (1 + 0.02 * self.steps)
        return out


def small_clients(number: int = 3) -> list[Client]:
    """Builds clients with 20, 26, 32, ... easily separable training examples; every call builds the same clients.

    >>> [len(client.train) for client in small_clients()]
    [20, 26, 32]
    """
    generator = torch_generator(7)
    centres = 2 * torch.randn(3, 6, generator=generator)
    clients = []
    for k in range(number):
        y = torch.arange(20 + 6 * k + 9) % 3
        x = centres[y] + 0.5 * torch.randn(len(y), 6, generator=generator) + 0.3 * k
        test, val, train = ((x[rows].clone(), y[rows].clone()) for rows in (slice(0, 6), slice(6, 9), slice(9, None)))
        clients.append(Client(f"client-{k}", SmallNet, train, test, val))
    return clients


def adapted_small_net() -> nn.Module:
    """Builds a `SmallNet` whose hidden layer is frozen and has a low-rank adapter of rank 2; norm and head are trained."""
    return add_lora(SmallNet(), rank=2, alpha=4.0, layers=("body.0",), train=("body.1.*", "head.*"))


def small_adapter_clients(number: int = 3) -> list[Client]:
    """Builds the clients of `small_clients` with networks that have low-rank adapters, for methods that require them.

    >>> [name for name in small_adapter_clients()[0].model().state_dict() if "lora" in name]
    ['body.0.lora_A.default.weight', 'body.0.lora_B.default.weight']
    """
    return [Client(c.id, adapted_small_net, c.train, c.test, c.val) for c in small_clients(number)]


def small_image_clients(number: int = 3) -> list[Client]:
    """Builds the same clients at every call, with 14, 17, 20, ... training images and no networks.

    The images show three kinds of stripes.

    >>> small_image_clients()[0].train.input_tensor.shape
    torch.Size([14, 1, 6, 6])
    """
    generator = torch_generator(7)
    patterns = torch.randn(3, 1, 6, 6, generator=generator)
    clients = []
    for k in range(number):
        y = torch.arange(14 + 3 * k + 9) % 3
        x = patterns[y] + 0.5 * torch.randn(len(y), 1, 6, 6, generator=generator) + 0.3 * k
        test, val, train = ((x[rows].clone(), y[rows].clone()) for rows in (slice(0, 6), slice(6, 9), slice(9, None)))
        clients.append(Client(f"client-{k}", None, train, test, val))
    return clients
