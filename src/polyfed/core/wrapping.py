"""Methods whose personal models have something around the client's own network."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from polyfed.core.algorithm import Algorithm
from polyfed.core.state_dict import StateDict


class WrapsNetwork(ABC):
    """For a method whose personal model has something of the client's around the client's own network."""

    @abstractmethod
    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """What takes the weights of a personal model, from the client's own network."""


def wrap_network(method: Algorithm[Any, Any], network: nn.Module, weights: StateDict) -> nn.Module:
    """What takes the weights of a personal model, from the client's own network: that network, for most methods."""
    return method.wrap_network(network, weights) if isinstance(method, WrapsNetwork) else network
