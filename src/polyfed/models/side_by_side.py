"""Lets networks that take one tensor accept inputs of several tensors."""

from typing import final

import torch
from torch import Tensor, nn

from polyfed.core.examples.pytree import named_leaves


@final
class SideBySide(nn.Module):
    """Wraps a network that takes one tensor: concatenates the tensors of an input to one row per example, in the order
    of their names, and calls the network on it.

    >>> net = SideBySide(nn.Linear(5, 2))
    >>> net(image=torch.zeros(3, 1, 2, 2), age=torch.zeros(3, 1)).shape
    torch.Size([3, 2])
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
        """Returns the network's output on the concatenated tensors.

        Raises:
            TypeError: a part has integers, which may be tokens.
        """
        flat = []
        for name, part in named_leaves(parts or {key: named[key] for key in sorted(named)}):
            if not part.is_floating_point():
                raise TypeError(f"the part {name!r} of the inputs is {part.dtype}, and numbers (floats) are needed")
            flat.append(part.reshape(len(part), -1))
        outputs: Tensor = self.network(torch.cat(flat, dim=1))
        return outputs
