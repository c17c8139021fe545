"""Answers questions on the modules, names and tensors of a traced program."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.graphs.recognition.layer_recognition import layer_kind


def inherits_torch_forward(module: nn.Module) -> bool:
    """Returns whether the module's `forward` is inherited from a class of torch.nn other than nn.Sequential.

    nn.Sequential does not count, since it only calls the modules inside.

    >>> inherits_torch_forward(nn.LSTM(1, 1)), inherits_torch_forward(nn.Sequential())
    (True, False)
    """
    forward: Any = type(module).forward
    return forward is not nn.Sequential.forward and getattr(forward, "__module__", "").startswith("torch.nn.modules.")


def no_layer_reason(module: nn.Module) -> str:
    """Returns why a module's parameters cannot be generated."""
    kind = type(module).__name__
    if layer_kind(module) is not None and not is_parametrized(module):  # then the shapes do not fit a layer type
        shapes = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in module.named_parameters())
        kind = f"{kind} with {shapes}"
    return f"{kind} is not a layer of the catalogue; set kinds=all"


def has_layers_inside(module: nn.Module) -> bool:
    """Returns whether a module that runs as one operation has parts with parameters, other than parametrisations."""
    return not is_parametrized(module) and any(True for part in module.children() for _ in part.parameters())


def storage_id(tensor: Tensor) -> int:
    """Returns a number that is the same for tensors that share their memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def operation_path(n: fx.Node, operation_name: str) -> str:
    """Names an operation by the module in whose forward it runs, and torch's name of it."""
    stack = list(n.meta.get("nn_module_stack", {}).values())
    where = strip_root(stack[-1][0]) if stack else ""
    return f"{where}.{operation_name}" if where else operation_name


def strip_root(name: str) -> str:
    """Returns a name in a traced program as the model has it, without the wrapper's "model."."""
    return "" if name == "model" else name.removeprefix("model.")


def owner_name(parameter: str) -> str:
    """Returns the name of the module that has this parameter."""
    return parameter.rpartition(".")[0]
