"""Heads with which clients of different architectures begin alike, drawn by their form, so that nothing has to travel."""

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.scratch import initial_state, new_module, scratch
from polyfed.core.seeds import local_rng
from polyfed.core.tied import tensors_once
from polyfed.models.split import head_modules, places_in

FirstHead = Literal["form", "architecture"]


def common_head(factory: Architecture, modules: Sequence[str], seeds: Sequence[int]) -> dict[str, Tensor]:
    """The first values of a head's tensors, which are the same in every network whose last layers are of one kind and shape.

    Each layer starts as its class starts it (`reset_parameters`), from a seed that does not depend on the layers before it.
    A layer stays as the network has it, and is left out here, if the network does not draw it (pretrained weights, zeros),
    or if its class cannot start it again (a parametrised layer, a layer of one's own without `reset_parameters`).

    Args:
        factory: builds the network.
        modules: names of the head's layers.
        seeds: of each of these layers.

    >>> deep = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> one, other = common_head(lambda: nn.Linear(4, 2), [""], [5]), common_head(deep, ["1"], [5])
    >>> torch.equal(one["weight"], other["1.weight"])
    True
    """
    module, drawn = new_module(factory, 0), _drawn_by(factory)
    values: dict[str, Tensor] = {}
    for name, seed in zip(modules, seeds, strict=True):
        layer = module.get_submodule(name)
        inside = list(places_in(module, [name], ()).values())
        if _can_restart(layer) and not drawn.isdisjoint(inside):
            with local_rng(seed), torch.no_grad():
                layer.reset_parameters()  # type: ignore[operator]  # a method, as `_can_restart` has seen
            tensors = tensors_once(module)
            values |= {first: tensors[first].detach().clone() for first in inside}
    return values


def last_layers(client: Client, number: int) -> tuple[str, ...]:
    """Names of the last parametric layers of a client's network, with the norms between them, the last one first."""
    assert client.model is not None  # `requires` asks for one
    module = scratch(client.model, client.train.device).module
    return tuple(reversed(head_modules(module, client.train.one_input, num_layers=number)))


def first_state(
    way: FirstHead, client: Client, number: int, seeds: Callable[[int], int], seed: int
) -> dict[str, Tensor]:
    """A client's network before training: the draw of its architecture, with the common head in place of its last `number`
    layers if the way is "form".

    Args:
        way: which head.
        client: whose network.
        number: of layers that are the head.
        seeds: the seed of each of these layers, by its place from the output, 0 being the last.
        seed: the run's.
    """
    assert client.model is not None
    state = initial_state(client.model, seed)
    if way == "architecture":
        return state
    modules = last_layers(client, number)
    values = common_head(client.model, modules, [seeds(place) for place in range(len(modules))])
    return {name: values.get(name, tensor) for name, tensor in state.items()}


def _can_restart(layer: nn.Module) -> bool:
    """Whether the layer's class sets its tensors by a method without arguments."""
    restart = getattr(layer, "reset_parameters", None)
    if not callable(restart) or is_parametrized(layer):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
               for p in inspect.signature(restart).parameters.values())  # fmt: skip


def _drawn_by(factory: Architecture) -> frozenset[str]:
    """First names of the tensors that the network draws: those that differ between two seeds."""
    return _drawn_once(factory) if isinstance(factory, Hashable) else _drawn(factory)


def _drawn(factory: Architecture) -> frozenset[str]:
    one, other = (tensors_once(new_module(factory, seed)) for seed in (0, 1))
    return frozenset(name for name, tensor in one.items() if not torch.equal(tensor, other[name]))


_drawn_once = lru_cache(maxsize=64)(_drawn)
