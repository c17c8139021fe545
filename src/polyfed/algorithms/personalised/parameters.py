"""Moves and copies parameters and buffers, for methods that compute gradients at other points than the current
weights.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.state_dict import StateDict


def assign_parameters(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Sets a network's parameters to these values."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def clone_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the buffers."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Resets the buffers to saved values, after a pass that must not change them."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(saved[name])


def trained_parameters_on_cpu(module: nn.Module) -> StateDict:
    """Returns copies of the trained parameters on the CPU."""
    named = module.named_parameters()
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named if tensor.requires_grad}
