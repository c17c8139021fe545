"""Builds the network that a method provides for all clients next to their networks: a teacher, or a network that learns
together with theirs.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, final

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.core.algorithm import Architecture, Client, Message
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.pytree import input_spec_of, named_leaves
from polyfed.core.io.trusted_code import import_trusted_callable
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.methods.capabilities import TrainsAuxiliaryNetwork, ValidatesNetworks
from polyfed.core.nn.buffers import load_client_model, tensors_to_send
from polyfed.core.nn.module_cache import CachedModule, cached_module, fill_module, initial_state
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, state_dict_spec
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


@dataclass(frozen=True, kw_only=True)
class SharedNetworkMethod(Averaging, ValidatesNetworks, TrainsAuxiliaryNetwork, ABC):
    """Averages a network that all clients train beside their own, of any architecture.

    In round 1 the server sends nothing, since it does not know the shapes of the clients' data: every client starts the
    shared network from the same initial weights, which depend on the run's seed.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    requires: ClassVar[frozenset[str]] = frozenset({"model"})
    network_field: ClassVar[str] = "shared"  # the field with the network's name and arguments

    def __post_init__(self) -> None:
        super().__post_init__()
        value = getattr(self, self.network_field)
        options = {"name": value} if isinstance(value, str) else value
        has_name = isinstance(options, Mapping) and isinstance(options.get("name"), str)
        requirement = "a network's name, or a mapping with it, as {name: resnet18, width: 16}"
        self._require(has_name, self.network_field, requirement)
        object.__setattr__(self, self.network_field, FrozenMapping(options))
        build_model_spec(self._shared_options, (1,), 1)  # refuses an unknown name

    @property
    def _shared_options(self) -> Mapping[str, Any]:
        options: Mapping[str, Any] = getattr(self, self.network_field)
        return options

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of the first shared network that any client sent.

        Raises:
            ValueError: the reply has no network.
        """
        if not server_state["model"] and not reply.tensors.get("model"):
            raise ValueError(
                f"the reply holds the groups {sorted(reply.tensors)}; expected 'model', the trained network"
            )
        return {"model": state_dict_spec(server_state["model"] or reply.tensors["model"])}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False in round 1, before the shared network's number of outputs is known."""
        return bool(server_state["model"])

    def make_incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error for first shared networks of different shapes, which cannot be averaged."""
        return UserError(
            f"{type(self).__name__}: the {self.network_field} networks of clients {error.first_client!r} and "
            f"{error.other_client!r} differ ({error.other_client!r}: {error.difference}); clients need inputs of one "
            "shape, and as many outputs"
        )

    def validate_network(self, client: Client) -> None:
        """Raises an error if the shared network refuses the client's data."""
        self.client_init(client, 0)

    def auxiliary_network(self, client: Client) -> Architecture:
        """Returns a factory that builds the shared network for the client's input shape and number of outputs."""
        return client_with_shared_network(self._shared_options, self.client_init(client, 0), client)[1]

    def _shared_weights(self, message: Message, client_state: ClientState, client: Client) -> StateDict:
        """Returns the weights of the shared network: those in the message, or in round 1 the initial ones."""
        _, factory = client_with_shared_network(self._shared_options, client_state, client)
        initial_weights = tensors_to_send(
            initial_state(factory, client_state["seed"]), cached_module(factory).buffers, self.buffers
        )
        return message.tensors.get("model", initial_weights)

    def _load_shared_network(
        self, message: Message, client_state: ClientState, client: Client
    ) -> tuple[CachedModule, Client]:
        """Returns the shared network with the weights to train or evaluate, and the client with it for its own."""
        shared_client, _ = client_with_shared_network(self._shared_options, client_state, client)
        weights = self._shared_weights(message, client_state, client)
        return load_client_model(shared_client, weights, client_state, self.buffers), shared_client


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
            f"{name} fails on inputs of {input_description}: {describe_exception(error)}; give another, {suggestion}"
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
