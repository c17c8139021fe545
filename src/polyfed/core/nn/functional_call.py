"""Calls a network with given tensors in place of its parameters, and restores the parameters afterwards."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Computes a network's output with `tensors` in place of parameters and buffers of these names.

    A tensor that several layers share, or that a layer holds under several names, is replaced everywhere. torch replaces and
    restores by name, so that a layer with two names would keep the replacement; here each place has one name.

    Args:
        module: the network.
        tensors: the replacements, by any name that a parameter or buffer has.
        args, kwargs: the arguments of `forward`.


    >>> import torch
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> twice, weight = nn.Sequential(layer, layer), layer.weight
    >>> float(call_with_tensors(twice, {"0.weight": torch.full((1, 1), 3.0)}, (torch.ones(1, 1),), {}))
    9.0
    >>> layer.weight is weight
    True
    """
    present = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    replacement = {id(present[name]): tensor for name, tensor in tensors.items()}
    places = {
        f"{prefix}.{name}" if prefix else name: replacement[id(tensor)]
        for prefix, part in module.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and id(tensor) in replacement
    }
    return functional_call(module, places, args, dict(kwargs), tie_weights=False)
