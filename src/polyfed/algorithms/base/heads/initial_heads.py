"""Draws initial heads (last layers) that are equal for clients with different architectures, from a common seed, so
that no head has to be sent.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.nn.module_cache import FactoryCache, build_module, cached_module, initial_state
from polyfed.core.nn.tied_weights import unique_tensors
from polyfed.core.seeds import temporary_rng_seed
from polyfed.models.structure import find_head_modules, tensor_names_by_position

InitialHead = Literal["form", "architecture"]


def draw_common_head(factory: Architecture, modules: Sequence[str], seeds: Sequence[int]) -> dict[str, Tensor]:
    """Draws a head's initial weights, equal for last layers of the same types and shapes.

    Each layer starts as its class starts it (`reset_parameters`), from a seed that does not depend on the layers before it.
    A layer stays as the network has it, and is left out here, if the network does not draw it (pretrained weights, zeros),
    or if its class cannot start it again (a parametrised layer, a layer of the user's own class without `reset_parameters`).

    Args:
        factory: builds the network.
        modules: names of the head's layers.
        seeds: seed of each of these layers.

    >>> deep = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> shallow_head, deep_head = draw_common_head(lambda: nn.Linear(4, 2), [""], [5]), draw_common_head(deep, ["1"], [5])
    >>> torch.equal(shallow_head["weight"], deep_head["1.weight"])
    True
    """
    module, drawn_names = build_module(factory, 0), _cached_drawn_names(factory)
    values: dict[str, Tensor] = {}
    for name, seed in zip(modules, seeds, strict=True):
        layer = module.get_submodule(name)
        tensor_names = list(tensor_names_by_position(module, [name], ()).values())
        if _has_reset_parameters(layer) and not drawn_names.isdisjoint(tensor_names):
            with temporary_rng_seed(seed), torch.no_grad():
                dtypes = {first: tensor.dtype for first, tensor in unique_tensors(module).items()}
                layer.float().reset_parameters()  # type: ignore[operator]  # a method, as `_has_reset_parameters` has seen
            tensors = unique_tensors(module)
            values |= {first: tensors[first].detach().to(dtypes[first], copy=True) for first in tensor_names}
    return values


def find_last_layer_names(client: Client, num_layers: int) -> tuple[str, ...]:
    """Returns the names of the last `num_layers` layers, and of norm layers between them, the last first."""
    assert client.model is not None  # `requires` asks for one
    module = cached_module(client.model, client.train.device).module
    return tuple(reversed(find_head_modules(module, client.train.first_input, num_layers=num_layers)))


def initial_weights_with_common_head(
    initial_head: InitialHead, client: Client, num_layers: int, seed_of_layer: Callable[[int], int], seed: int
) -> dict[str, Tensor]:
    """Draws a network's initial weights, with a head equal for equal forms if `initial_head` is "form".

    Otherwise the head is the one that the client's architecture draws.

    Args:
        initial_head: kind of the head: "form" (common to all clients) or "architecture".
        client: the client, with its network.
        num_layers: number of last layers that are the head.
        seed_of_layer: the seed of each of these layers, by its place from the output, 0 being the last.
        seed: the run's.
    """
    assert client.model is not None
    state = initial_state(client.model, seed)
    if initial_head == "architecture":
        return state
    modules = find_last_layer_names(client, num_layers)
    values = draw_common_head(client.model, modules, [seed_of_layer(place) for place in range(len(modules))])
    return {name: values.get(name, tensor) for name, tensor in state.items()}


def _has_reset_parameters(layer: nn.Module) -> bool:
    """Returns whether a layer's class initialises its tensors by a method without arguments."""
    reset = getattr(layer, "reset_parameters", None)
    if not callable(reset) or is_parametrized(layer):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
               for p in inspect.signature(reset).parameters.values())  # fmt: skip


def _find_drawn_names(factory: Architecture) -> frozenset[str]:
    """Returns the names of the tensors that a network initialises at random: those that differ between two seeds."""
    tensors_0, tensors_1 = (unique_tensors(build_module(factory, seed)) for seed in (0, 1))
    return frozenset(name for name, tensor in tensors_0.items() if not torch.equal(tensor, tensors_1[name]))


_cached_drawn_names = FactoryCache(_find_drawn_names, maxsize=64)
