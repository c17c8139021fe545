"""Finds the two factors of the low-rank adapters of a network, and freezes one of them for the time of a training."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from polyfed.core.messages.lora import find_adapters

ADAPTER_REQUIREMENTS = frozenset({"one_architecture", "adapters"})
"""The words for what the methods of this folder require of the clients."""


def names_of_factor(names: Collection[str], factor: str) -> list[str]:
    """Returns the names of adapters' factors A (shape (r, inputs)) or B (shape (outputs, r)).

    >>> names_of_factor(["up.lora_A.default.weight", "up.lora_B.default.weight", "up.bias"], "B")
    ['up.lora_B.default.weight']
    """
    return [pair.a if factor == "A" else pair.b for pair in find_adapters(iter(names))]


@contextmanager
def freeze_within_block(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Freezes the named parameters of a network inside the block; afterwards they can be trained again.

    >>> layer = nn.Linear(2, 1)
    >>> with freeze_within_block(layer, ["weight"]): print([p.requires_grad for p in layer.parameters()])
    [False, True]
    >>> [p.requires_grad for p in layer.parameters()]
    [True, True]
    """
    frozen = [p for name, p in module.named_parameters() if p.requires_grad and name in names]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
