"""Whether the clients' networks are such as a method can train, as far as it can be told before the first round."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples import Examples, split_rows
from polyfed.core.inputs import form_of
from polyfed.core.network_needs import LooksInside, TrainsBeside
from polyfed.core.scratch import Scratch, new_module, scratch
from polyfed.core.stacked import needs_two
from polyfed.simulation.trying import refuse_batch_of_one

_SENT = frozenset({"weights", "hypernetwork"})
"""Words of `Algorithm.discloses` of methods whose clients send tensors of their networks."""


def scratch_of(client: Client) -> Scratch:
    """The scratch module of a client's network; raises a `UserError` if a part of its state cannot be sent."""
    assert client.model is not None
    try:
        return scratch(client.model)
    except AttributeError as error:  # tensors are copied, which an extra state of another type cannot be
        state = new_module(client.model, seed=0).state_dict()
        alien = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if not alien:
            raise
        raise UserError(
            f"client {client.id!r}: {alien[0]!r} in its network's state_dict is a {type(state[alien[0]]).__name__}, and "
            "only tensors can be sent and saved; keep it as a tensor in a buffer (register_buffer), not in get_extra_state"
        ) from error


def check_inside(clients: Sequence[Client], algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` if a network has tensors that cannot be sent, or not what the method looks for in it."""
    seen: set[tuple[str, str]] = set()
    for client in clients:
        own = scratch_of(client)
        if (key := (own.architecture, str(form_of(client.train.x)))) in seen:
            continue
        seen.add(key)
        odd = [n for n, tensor in own.module.state_dict().items() if tensor.is_complex() and n not in own.frozen]
        if odd and algorithm.discloses & _SENT:
            raise UserError(
                f"client {client.id!r}: {odd[0]!r} in its network is complex, and only real numbers can be sent; keep real "
                "and imaginary part as two parameters, or in one with torch.view_as_complex in the forward pass"
            )
        norms = [p for p in own.module.modules() if "Norm" in getattr(p, "original_name", "")]  # of torch.jit
        if norms and own.buffers and getattr(algorithm, "buffers", "average") != "average":
            raise UserError(
                f"client {client.id!r}: its network is compiled by torch.jit, so that its norm layers and their running "
                f"statistics cannot be told, which buffers={getattr(algorithm, 'buffers', '')!r} needs; give the module "
                "that was compiled, or buffers='average'"
            )
        if isinstance(algorithm, LooksInside):
            try:
                algorithm.look_inside(client)
            except UserError as error:
                told = str(error)
                raise UserError(told if repr(client.id) in told else f"client {client.id!r}: {told}") from error


def check_batches(
    clients: Sequence[Client],
    algorithm: Algorithm[Any, Any],
    of: Mapping[str, Examples | None],
    factory: Architecture | None = None,
) -> None:
    """Raises a `UserError` if a network gets one example alone in training, and cannot take it.

    Args:
        clients: whose networks are tried.
        algorithm: what trains them.
        factory: the network that the method brings, in place of the clients' own.
        of: the fields with the size of a minibatch, with the examples that these are of; None are the client's own.
    """
    seen: set[Any] = set()
    for client in clients:
        model = client.model if factory is None else factory
        if model is None:
            continue
        networks = [model, *((algorithm.beside(client),) if isinstance(algorithm, TrainsBeside) else ())]
        for field, public in of.items():
            size, number = getattr(algorithm, field, None), len(client.train if public is None else public)
            for net in map(scratch, networks):
                key = (net.architecture, str(form_of(client.train.x)), field, number)
                if size is None or key in seen:
                    continue
                seen.add(key)
                rows = split_rows(torch.arange(number), size or number, at_least_two=needs_two(net.module))
                if any(len(batch) == 1 for batch in rows):
                    why = f"has a minibatch of one example ({field}={size}, {number} examples)"
                    refuse_batch_of_one(
                        net.module, client.train, f"client {client.id!r}", why, f"choose another {field}"
                    )
