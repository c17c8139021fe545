"""SGD and Adam by torch's own update functions, bit for bit.

The classes of `torch.optim` import torch's compiler (`torch._dynamo`, and sympy with it) when the first one is made, which
costs each process a second or two and is of no use here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import adam, sgd


@final
@dataclass(eq=False)
class Group:
    """Parameters with one learning rate, and what the optimiser remembers of each: momentum, or Adam's two moments."""

    parameters: list[nn.Parameter]
    lr: float
    state: dict[nn.Parameter, list[Tensor | None]] = field(default_factory=dict)


@final
@dataclass(frozen=True, eq=False)
class SGD:
    """Stochastic gradient descent as `torch.optim.SGD`.

    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = SGD([Group([weight], lr=0.5)])
    >>> weight.square().sum().backward()
    >>> optimizer.step(), weight.item()
    (None, 0.0)
    """

    groups: list[Group]
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        _forget(self.groups)

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        for group in self.groups:
            moved, slopes = _moved(group)
            momenta = [group.state.get(p, [None])[0] for p in moved]
            sparse = any(slope.is_sparse for slope in slopes)
            sgd.sgd(
                list(moved), slopes, momenta, sparse, lr=group.lr, momentum=self.momentum, nesterov=self.nesterov,
                weight_decay=self.weight_decay, dampening=0.0, maximize=False,
            )  # fmt: skip
            if self.momentum:
                group.state.update({p: [momentum] for p, momentum in zip(moved, momenta, strict=True)})


@final
@dataclass(frozen=True, eq=False)
class Adam:
    """Adam as `torch.optim.Adam` (Kingma and Ba 2015, β = 0.9 and 0.999, ε = 1e-8).

    >>> weight = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = Adam([Group([weight], lr=0.5)])
    >>> weight.square().sum().backward()
    >>> optimizer.step(), round(weight.item(), 4)
    (None, 0.5)
    """

    groups: list[Group]
    weight_decay: float = 0.0

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        _forget(self.groups)

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        for group in self.groups:
            moved, slopes = _moved(group)
            for p in moved:
                if p not in group.state:
                    group.state[p] = [torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0)]
            first, second, steps = ([m for p in moved if (m := group.state[p][i]) is not None] for i in range(3))
            adam.adam(
                list(moved), slopes, first, second, [], steps, has_complex=any(p.is_complex() for p in moved), lr=group.lr,
                beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=self.weight_decay, amsgrad=False, maximize=False,
            )  # fmt: skip


def _moved(group: Group) -> tuple[list[nn.Parameter], list[Tensor]]:
    pairs = [(p, p.grad) for p in group.parameters if p.grad is not None]
    return [p for p, _ in pairs], [slope for _, slope in pairs]


def _forget(groups: Iterable[Group]) -> None:
    for group in groups:
        for parameter in group.parameters:
            parameter.grad = None
