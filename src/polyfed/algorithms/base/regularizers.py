"""Defines regularisation terms of the local loss that several methods share, in a form that can be computed for many
clients at once (`PerClientTerm`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn


@final
@dataclass(frozen=True)
class ProximalTerm:
    """Penalises the distance of a network's parameters θ from anchor parameters θ̄ by s/2·‖θ − θ̄‖², with strength s.

    >>> import torch
    >>> ProximalTerm(3.0)([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 0.0])])
    tensor(6.)
    """

    strength: float

    def __call__(self, weights: Sequence[Tensor], anchors: Sequence[Tensor]) -> Tensor:
        """Returns the penalty s/2·‖θ − θ̄‖² for parameters θ and their anchors θ̄, which are given in the same order."""
        squares = [(theta - theta_bar).square().sum() for theta, theta_bar in zip(weights, anchors, strict=True)]
        return self.strength / 2 * sum(squares[1:], squares[0])


def linear_loss_term(weights: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    """Returns the inner product of parameters and a direction, a loss term whose gradient is always this direction.

    >>> import torch
    >>> linear_loss_term([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, -1.0])])
    tensor(1.)
    """
    products = [(theta * d).sum() for theta, d in zip(weights, direction, strict=True)]
    return sum(products[1:], products[0])


def clone_trained_parameters(module: nn.Module) -> list[Tensor]:
    """Copies a network's trainable parameters, in the order that penalties such as `ProximalTerm` take."""
    return [theta.detach().clone() for theta in module.parameters() if theta.requires_grad]
