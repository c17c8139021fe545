"""Checks before the first round that the method can train the clients' networks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import input_spec_of
from polyfed.core.messages.lora import find_adapters
from polyfed.core.methods.capabilities import TrainsAuxiliaryNetwork, ValidatesNetworks
from polyfed.core.nn.module_cache import CachedModule, build_module, cached_module
from polyfed.core.vectorized.stacked_module import has_batch_statistics
from polyfed.simulation.checks.networks.trial_forward import check_trains_on_one_example

_SENT = frozenset({"weights", "hypernetwork"})
"""Words of `Algorithm.discloses` that mean that clients send tensors of their networks."""


def cached_module_of(client: Client) -> CachedModule:
    """Returns a client's cached network; raises a `UserError` if part of its state cannot be sent."""
    assert client.model is not None
    try:
        return cached_module(client.model)
    except AttributeError as error:  # an extra state that is not a tensor cannot be copied as one
        state = build_module(client.model, seed=0).state_dict()
        non_tensors = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if not non_tensors:
            raise
        raise UserError(
            f"client {client.id!r}: {non_tensors[0]!r} in its network's state_dict is a "
            f"{type(state[non_tensors[0]]).__name__}, and only tensors can be sent and saved; keep it as a tensor in a "
            "buffer (register_buffer), not in get_extra_state"
        ) from error


def _check_network_has_adapters(client: Client, cached: CachedModule, method: str) -> None:
    """Raises a `UserError` if a network has no low-rank adapter that is trained."""
    if not any(pair.a not in cached.frozen for pair in find_adapters(cached.module.state_dict())):
        raise UserError(
            f"{method} trains low-rank adapters (LoRA), and the network of client {client.id!r} has none that are trained; "
            "put some in with polyfed.models.lora.add_lora(network, rank=8) or peft.get_peft_model (docs/pretrained.md)"
        )


def check_network_tensors_and_layers(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` if a network has a tensor that cannot be sent, or lacks a layer that the method needs."""
    checked_keys: set[tuple[str, str]] = set()
    for client in clients:
        cached = cached_module_of(client)
        if (key := (cached.architecture, str(input_spec_of(client.train.x)))) in checked_keys:
            continue
        checked_keys.add(key)
        if "adapters" in algorithm.requires:
            _check_network_has_adapters(client, cached, registry_name(algorithm))
        complex_names = [
            n for n, tensor in cached.module.state_dict().items() if tensor.is_complex() and n not in cached.frozen
        ]
        if complex_names and algorithm.discloses & _SENT:
            raise UserError(
                f"client {client.id!r}: {complex_names[0]!r} in its network is complex, and only real numbers can be "
                "sent; keep real and imaginary part as two parameters, or in one with torch.view_as_complex in the "
                "forward pass"
            )
        norms = [p for p in cached.module.modules() if "Norm" in getattr(p, "original_name", "")]  # of torch.jit
        if norms and cached.buffers and getattr(algorithm, "buffers", "average") != "average":
            raise UserError(
                f"client {client.id!r}: its network is compiled by torch.jit, so that its norm layers and their running "
                f"statistics cannot be told, which buffers={getattr(algorithm, 'buffers', '')!r} needs; give the module "
                "that was compiled, or buffers='average'"
            )
        if isinstance(algorithm, ValidatesNetworks):
            try:
                algorithm.validate_network(client)
            except UserError as error:
                error_text = str(error)
                raise UserError(
                    error_text if repr(client.id) in error_text else f"client {client.id!r}: {error_text}"
                ) from error


def check_batch_norm_gets_no_single_example(
    clients: Sequence[Client],
    algorithm: Algorithm[Any, Any],
    examples_by_field: Mapping[str, Examples | None],
    factory: Architecture | None = None,
) -> None:
    """Raises a `UserError` if a network that needs more (for BatchNorm, say) would get a minibatch of one example.

    Args:
        clients: their networks are tried.
        algorithm: the method that trains them.
        examples_by_field: field with a minibatch size -> the examples that are batched; None for the client's own.
        factory: builds the network of the method, in place of the clients' own.
    """
    checked_keys: set[Any] = set()
    for client in clients:
        model = client.model if factory is None else factory
        if model is None:
            continue
        networks = [
            model,
            *((algorithm.auxiliary_network(client),) if isinstance(algorithm, TrainsAuxiliaryNetwork) else ()),
        ]
        for field, public in examples_by_field.items():
            size, number = getattr(algorithm, field, None), len(client.train if public is None else public)
            for cached in map(cached_module, networks):
                key = (cached.architecture, str(input_spec_of(client.train.x)), field, number)
                if size is None or key in checked_keys:
                    continue
                checked_keys.add(key)
                rows = split_into_batches(
                    torch.arange(number), size or number, at_least_two=has_batch_statistics(cached.module)
                )
                if any(len(batch) == 1 for batch in rows):
                    why = f"has a minibatch of one example ({field}={size}, {number} examples)"
                    check_trains_on_one_example(
                        cached.module, client.train, f"client {client.id!r}", why, f"choose another {field}"
                    )
