"""Copies, replaces and restores the parameters and buffers of a network, for methods that compute gradients at other
weights than the current ones.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from polyfed.core.state_dict import StateDict


def assign_parameters(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Copies the given values into a network's parameters in place."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def clone_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a network's buffers, as `{name: tensor}`."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Writes saved values back into a network's buffers, which a forward pass should leave unchanged."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(saved[name])


def copy_trained_parameters_to_cpu(module: nn.Module) -> StateDict:
    """Returns copies on the CPU of a network's trained parameters, as `{name: tensor}`."""
    named = module.named_parameters()
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named if tensor.requires_grad}
