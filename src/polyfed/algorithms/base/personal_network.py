"""Provides base classes of methods in which each client keeps a whole personal network from round to round."""

from abc import ABC
from typing import Any

from torch import nn

from polyfed.algorithms.base.averaging import Averaging, EvaluatesGlobalModel
from polyfed.core.algorithm import Client, Message
from polyfed.core.nn.module_cache import cached_module, fill_module, initial_state


class PersonalNetworkMethod(ABC):
    """Keeps a personal network W_i (weights and buffers) for each client, under "model" in the client's private state."""

    def client_init(self, client: Client, seed: int) -> dict[str, Any]:
        """Returns the client's network, drawn from the run's seed, the same for all of this architecture."""
        assert client.model is not None  # `requires` asks for one
        return {"model": initial_state(client.model, seed)}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its personal network W_i."""
        return self.load_personal_network(client_state, client)

    def load_personal_network(self, client_state: dict[str, Any], client: Client) -> nn.Module:
        """Returns the client's network W_i in a module that all of its architecture use in turn."""
        assert client.model is not None
        return fill_module(cached_module(client.model, client.train.device).module, client_state["model"])


class PersonalBesideGlobalMethod(PersonalNetworkMethod, EvaluatesGlobalModel, ABC):
    """Keeps a personal network for each client, next to the global model of all clients, and evaluates both.

    The client state has the personal network as "model", and as "trained" whether the client ever took part. The
    evaluated model is the personal network (for a client that never took part the global model), and next to it the
    global model, as `server_...`.
    """

    def client_init(self, client: Client, seed: int) -> dict[str, Any]:
        """Returns a personal network with the common initial weights, marked as not trained."""
        return {**super().client_init(client, seed), "trained": False}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """Returns the client's personal network, or the global model if it never took part."""
        if client_state["trained"]:
            return super().personal_model(message, client_state, client, seed)
        return Averaging.personal_model(self, message, client_state, client, seed)
