"""Copies networks that hold tensors with an autograd history, for which `copy.deepcopy` raises an error."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


def deep_copy(module: Net) -> Net:
    """Returns a deep copy of a network, even if the network holds tensors with an autograd history.

    Tensors that it computed and keeps in attributes, as `torch.nn.utils.weight_norm` and hooks do, are copied detached:
    torch refuses to copy them with their autograd history.


    >>> net = nn.Linear(1, 1)
    >>> net.last = net.weight * 2
    >>> deep_copy(net).last.requires_grad
    False
    """
    memo: dict[int, Any] = {
        id(tensor): tensor.detach().clone() for part in module.modules() for tensor in _computed_tensors(part.__dict__)
    }
    return copy.deepcopy(module, memo)


def _computed_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors that have an autograd history, from nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield from () if value.is_leaf else (value,)
    elif isinstance(value, Mapping):
        yield from _computed_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _computed_tensors(item)
