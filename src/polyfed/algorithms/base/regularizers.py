"""Terms of the local loss that methods share, in the form in which many clients' are computed at once (`PerClientTerm`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn


@final
@dataclass(frozen=True)
class ProximalTerm:
    """s/2·‖θ − θ̄‖² over the trained parameters, s being the strength.

    >>> import torch
    >>> ProximalTerm(3.0)([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 0.0])])
    tensor(6.)
    """

    strength: float

    def __call__(self, weights: Sequence[Tensor], anchors: Sequence[Tensor]) -> Tensor:
        """Of the parameters θ and of what they are pulled to, θ̄, in the same order."""
        squares = [(theta - theta_bar).square().sum() for theta, theta_bar in zip(weights, anchors, strict=True)]
        return self.strength / 2 * sum(squares[1:], squares[0])


def linear_term(weights: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    """⟨d, θ⟩: a term whose gradient is d.

    >>> import torch
    >>> linear_term([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, -1.0])])
    tensor(1.)
    """
    products = [(theta * d).sum() for theta, d in zip(weights, direction, strict=True)]
    return sum(products[1:], products[0])


def clone_trained_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters that are trained as they are now, in the order in which a penalty gets them."""
    return [theta.detach().clone() for theta in module.parameters() if theta.requires_grad]
