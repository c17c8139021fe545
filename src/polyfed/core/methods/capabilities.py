"""Defines optional interfaces of a federated method, such as "brings its own network"; a method inherits from those
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
    """Supplies the network that all clients train, in place of the networks that the user gives in `Client.model`."""

    @abstractmethod
    def network_for(self, data: DataSpec) -> Architecture:
        """Returns a function without arguments that builds the method's network for data of the given form.

        It is tried on every client's examples before the first round.
        """

    @abstractmethod
    def describe_personal_network(self, network: nn.Module, client: Client) -> Mapping[str, Any]:
        """Describes a personal network by JSON values, from which `build_from_description` rebuilds it.

        It may also hold what people want to know of the network. It is written next to the weights.
        """

    @abstractmethod
    def build_from_description(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds a personal network, still without its weights, from the result of `describe_personal_network`."""

    @property
    def evaluated(self) -> str:
        """Names the evaluated network in a few words; "" if it does not depend on the method's fields."""
        return ""


def describe_evaluated_network(method: Algorithm[Any, Any]) -> str:
    """Names a method's evaluated network in a few words; "" if the method does not say so."""
    return method.evaluated if isinstance(method, BringsNetwork) else ""


class ValidatesNetworks(ABC):
    """Checks the clients' networks before the first round."""

    @abstractmethod
    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` if this client's network lacks something that the method needs.

        It is called before the first round, once for each architecture and shape of the data.
        """


class TrainsAuxiliaryNetwork(ABC):
    """Supplies a second network, which each client trains in addition to its main one."""

    @abstractmethod
    def auxiliary_network(self, client: Client) -> Architecture:
        """Returns a function without arguments that builds the second network for this client's data."""


class WrapsNetwork(ABC):
    """Puts a module of the method around the client's network; both together are the client's personal model."""

    @abstractmethod
    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Returns the client's network inside the method's module, still without the personal weights.

        Args:
            network: the client's own.
            weights: those of the personal model, which are loaded afterwards.
        """


def wrap_network_if_method_wraps(method: Algorithm[Any, Any], network: nn.Module, weights: StateDict) -> nn.Module:
    """Returns `network` inside the method's wrapper, if it has one, ready for the weights of a personal model."""
    return method.wrap_network(network, weights) if isinstance(method, WrapsNetwork) else network


def check_network_has_all_weights(method: Algorithm[Any, Any], network: nn.Module, weights: StateDict) -> None:
    """Raises a `UserError` if `weights`, the weights of a personal model, contain a tensor that `network` lacks.

    Args:
        method: the method of the run.
        network: what `wrap_network` returned.
        weights: those of the personal model.
    """
    if unknown := sorted(weights.keys() - unique_tensors(network).keys() - dict(network.state_dict()).keys()):
        name = type(method).__name__
        base = (
            "" if isinstance(method, WrapsNetwork) else f"derive {name} from polyfed.algorithms.base.WrapsNetwork, and "
        )
        cure = f"{base}build its evaluated network in {name}.wrap_network"
        raise UserError(
            f"weights do not fit the model: the personal model of {name} has {unknown[:3]}, and the client's network "
            f"has not; {cure} (see docs/add_a_method/private_state.md)"
        )


class AddsServerTensors(ABC):
    """Puts tensors into its server state only when clients have replied, in a form that is known before."""

    @abstractmethod
    def later_server_tensors(self, server_state: Any) -> StateDict:
        """Returns tensors, by name, of the form in which each client's will be in the server state; empty if none will.

        A checkpoint whose tensors have another form is refused.

        Args:
            server_state: the server's state before round 1.
        """


class KeepsServerStateByClient(ABC):
    """Has groups in its server state with an entry for each client, which a run stores one by one.

    `aggregate` must give back such a group as `server_state[group] | {client: new entry}`, which reads no other entry.
    """

    @property
    @abstractmethod
    def groups_by_client(self) -> frozenset[str]:
        """Returns the names of the groups that map client ids to tensors or nested dicts of them."""


class ResolvesAutoFields(ABC):
    """Chooses values for fields left open ("auto") by looking at the clients before the first round."""

    @abstractmethod
    def resolved_fields(self, server_state: Any) -> Mapping[str, str]:
        """Returns `{field: chosen value in words}` for the fields that the user left open.

        Args:
            server_state: the server's state after any round.
        """


def manifest_entry_of_resolved_fields(method: Algorithm[Any, Any], server_state: Any) -> dict[str, dict[str, str]]:
    """Returns `{"decided": {field: value}}` of fields that the method chose, for `manifest.json`; or `{}`.

    >>> from polyfed.algorithms import FedAvg
    >>> manifest_entry_of_resolved_fields(FedAvg(), {})
    {}
    """
    fields = dict(method.resolved_fields(server_state)) if isinstance(method, ResolvesAutoFields) else {}
    return {"decided": fields} if fields else {}
