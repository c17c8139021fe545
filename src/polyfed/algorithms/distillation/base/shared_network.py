"""Builds the network that a method provides for all clients next to their networks: a teacher, or a network that learns
together with theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.pytree import input_spec_of, named_leaves
from polyfed.core.io.trusted_code import import_trusted_callable
from polyfed.core.nn.module_cache import cached_module, fill_module
from polyfed.core.state_dict import StateDict
from polyfed.models import ModelSpec
from polyfed.models.side_by_side import SideBySide


@final
@dataclass(frozen=True)
class SharedNetworkFactory:
    """Builds the network that a method provides for all clients, such as a teacher.

    Its type differs from that of users' factories, so that a client's own network of the same architecture has a
    separate cached module.
    """

    network: ModelSpec
    side_by_side: bool = False

    def __call__(self) -> nn.Module:
        """Builds a new shared network."""
        return SideBySide(self.network()) if self.side_by_side else self.network()


def build_model_spec(network_options: Mapping[str, Any], input_shape: Sequence[int], outputs: int) -> ModelSpec:
    """Returns the specification of a network from its name and arguments, its input shape and its number of outputs.

    Raises:
        UserError: the name is unknown.

    >>> build_model_spec({"name": "mlp", "hidden": (32,)}, (6,), 3).name
    'mlp'
    """
    arguments = {name: value for name, value in network_options.items() if name != "name"}
    return ModelSpec(network_options["name"], arguments, tuple(input_shape), outputs)


def check_network_factory_can_be_imported(network_options: Mapping[str, Any]) -> None:
    """Raises a `UserError` if a network's "module:factory" cannot be imported, before a run starts."""
    if ":" in network_options["name"]:
        import_trusted_callable(network_options["name"])


@final
class ClientWithSharedNetwork(NamedTuple):
    """Holds a client with the method's shared network in place of its own, and that network's factory."""

    client: Client
    factory: SharedNetworkFactory


def client_with_shared_network(
    network_options: Mapping[str, Any], client_state: Mapping[str, Any], client: Client
) -> ClientWithSharedNetwork:
    """Returns the client with the method's shared network for its own, and that one's factory.

    `client_state` holds the shared network's `input_shape` and `outputs`.
    """
    factory = SharedNetworkFactory(
        build_model_spec(network_options, client_state["input_shape"], client_state["outputs"]),
        client_state.get("side_by_side", False),
    )
    return ClientWithSharedNetwork(replace(client, model=factory), factory)


def infer_shared_network_sizes(
    network_options: Mapping[str, Any], weights: StateDict, client: Client, method: str, field: str
) -> dict[str, Any]:
    """Returns, as a dict, the input shape and number of outputs that the shared network needs for a client.

    Args:
        network_options: name and arguments of the shared network.
        weights: weights of the client's own network.
        client: the client.
        method, field: names of the method and of its field in error messages.

    Raises:
        UserError: the shared network fails on the client's inputs, or its outputs have another shape.
    """
    assert client.model is not None
    device, axis = client.train.device, client.task.output_axis
    example, x = client.train.head(), client.train.first_input
    own_shape = predict(fill_module(cached_module(client.model, device).module, weights), example).shape
    outputs = own_shape[axis]
    form = {"input_shape": list(input_spec_of(x).shape), "outputs": outputs}
    if not isinstance(x, Tensor) and ":" not in network_options["name"]:  # polyfed's networks take one tensor
        form |= {"input_shape": [sum(part[0].numel() for _, part in named_leaves(x))], "side_by_side": True}
    _, factory = client_with_shared_network(network_options, form, client)
    network, name = cached_module(factory, device).module, f"{method}: the {field} {factory.network.name!r}"
    try:
        shared_shape = predict(network, example).shape
    except Exception as error:  # a network may raise anything on inputs that it does not take
        input_description = (
            f"shape {tuple(x.shape)} ({x.dtype})" if isinstance(x, Tensor) else f"several parts ({input_spec_of(x)})"
        )
        tokens = isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()
        suggestion = "as {name: lstm, vocabulary: 5000} for numbers of tokens" if tokens else f"{field}=..."
        raise UserError(
            f"{name} fails on inputs of {input_description}: {type(error).__name__}: {error}; give another, {suggestion}"
        ) from error
    if len(shared_shape) == len(own_shape) == 2 and shared_shape != own_shape:
        raise UserError(
            f"{name} has {shared_shape[axis]} outputs, the network of {client.id!r} {outputs}; give another, {field}=..."
        )
    if shared_shape[1:] != own_shape[1:]:
        suggestion = "as {name: unet} for segmentations, {name: lstm_tagger, vocabulary: 5000} for tokens"
        raise UserError(
            f"{name} has outputs of shape {tuple(shared_shape[1:])} for an example, the network of {client.id!r} "
            f"{tuple(own_shape[1:])}, which the task {client.task} needs; give another, {field}=..., {suggestion}"
        )
    return form
