"""Defines optional interfaces of a federated method, such as "brings its own network"; a method inherits the interfaces
that it implements.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from polyfed.core.algorithm import Algorithm, Architecture, Client, DataSpec
from polyfed.core.errors import UserError
from polyfed.core.nn.tied_weights import unique_tensors
from polyfed.core.state_dict import StateDict


class BringsNetwork(ABC):
    """Supplies the network that the clients train, in place of each client's own `Client.model`."""

    @abstractmethod
    def network_for(self, data: DataSpec) -> Architecture:
        """Returns a function that builds the network for data of the given form.

        It is tried on every client's examples before the first round.
        """

    @abstractmethod
    def describe_personal_network(self, network: nn.Module, client: Client) -> Mapping[str, Any]:
        """Describes a client's personal network in JSON values, from which `build_from_description` can build the
        network again, without its weights.

        It may also hold what people want to know of the network. It is written next to the weights.
        """

    @abstractmethod
    def build_from_description(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds a personal network from its description; the caller loads the weights afterwards."""

    @property
    def evaluated(self) -> str:
        """Describes in a few words which network is evaluated, for tables and `manifest.json`; "" if the method's
        fields do not decide it.
        """
        return ""


def describe_evaluated_network(method: Algorithm[Any, Any]) -> str:
    """Returns a few words on which network of a method is evaluated; "" if the method's fields do not decide it."""
    return method.evaluated if isinstance(method, BringsNetwork) else ""


class ValidatesNetworks(ABC):
    """Checks the clients' networks before the first round, for a method that cannot work with every network."""

    @abstractmethod
    def validate_network(self, client: Client) -> None:
        """Raises an error if this client's network lacks what the method needs.

        It is called before the first round, once for each architecture and shape of the data.

        Raises:
            UserError: the network lacks something.
        """


class TrainsAuxiliaryNetwork(ABC):
    """Supplies a second network, which each client trains besides its own."""

    @abstractmethod
    def auxiliary_network(self, client: Client) -> Architecture:
        """Returns a function that builds the second network for this client's data."""


class WrapsNetwork(ABC):
    """Puts a module around the client's own network; both together are the personal model."""

    @abstractmethod
    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Builds a module around the client's own network, into which the weights of the personal model can be loaded.

        Args:
            network: the client's own.
            weights: those of the personal model, which are loaded afterwards.
        """


def wrap_network_if_method_wraps(method: Algorithm[Any, Any], network: nn.Module, weights: StateDict) -> nn.Module:
    """Returns the network that a personal model's weights fit: the client's own network, inside the method's wrapper if
    the method has one.
    """
    return method.wrap_network(network, weights) if isinstance(method, WrapsNetwork) else network


def check_network_has_all_weights(method: Algorithm[Any, Any], network: nn.Module, weights: StateDict) -> None:
    """Raises a `UserError` if the weights of a personal model contain a tensor that the network lacks.

    Args:
        method: the method of the run.
        network: what `wrap_network` returned.
        weights: those of the personal model.
    """
    if unknown := sorted(weights.keys() - unique_tensors(network).keys() - dict(network.state_dict()).keys()):
        name = type(method).__name__
        base = (
            ""
            if isinstance(method, WrapsNetwork)
            else f"derive {name} from {WrapsNetwork.__module__}.WrapsNetwork, and "
        )
        cure = f"{base}build its evaluated network in {name}.wrap_network"
        raise UserError(
            f"weights do not fit the model: the personal model of {name} has {unknown[:3]}, and the client's network "
            f"has not; {cure} (see docs/add_a_method.md)"
        )


class ResolvesAutoFields(ABC):
    """Decides the values of fields that the user left open (such as "auto") by looking at the clients, before the first
    round.
    """

    @abstractmethod
    def resolved_fields(self, server_state: Any) -> Mapping[str, str]:
        """Returns the decided values of the fields that the user left open, each as a few words; empty if the user set
        every field.

        Args:
            server_state: the server's state after any round.
        """


def manifest_entry_of_resolved_fields(method: Algorithm[Any, Any], server_state: Any) -> dict[str, dict[str, str]]:
    """Returns `{"decided": {field: value}}` for `manifest.json`, with the fields that the user left open and the method
    chose; an empty mapping if there are none.

    >>> from polyfed.algorithms import FedAvg
    >>> manifest_entry_of_resolved_fields(FedAvg(), {})
    {}
    """
    fields = dict(method.resolved_fields(server_state)) if isinstance(method, ResolvesAutoFields) else {}
    return {"decided": fields} if fields else {}
