"""What methods share whose clients keep a whole network of their own from round to round."""

from abc import ABC
from collections.abc import Iterator
from typing import Any

from torch import nn

from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Client, Message
from polyfed.core.nn.buffers import load_model_for_eval
from polyfed.core.nn.module_cache import cached_module, fill_module, initial_state


class PersonalNetworkMethod(ABC):
    """The client half of a method in which W_i, weights and buffers, is the client's private state "model"."""

    def client_init(self, client: Client, seed: int) -> dict[str, Any]:
        """W_i: the common draw of the client's architecture."""
        assert client.model is not None  # `requires` asks for one
        return {"model": initial_state(client.model, seed)}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """W_i."""
        return self.load_personal_network(client_state, client)

    def load_personal_network(self, client_state: dict[str, Any], client: Client) -> nn.Module:
        """The scratch module with W_i."""
        assert client.model is not None
        return fill_module(cached_module(client.model, client.train.device).module, client_state["model"])


class PersonalBesideGlobalMethod(PersonalNetworkMethod, Averaging, ABC):
    """The client half of an averaging method whose clients keep a network of their own beside the global one, as "model",
    with "trained", whether they ever took part. Evaluated is their own (for a client that never took part the global
    one), and the global one besides, as `server_...`."""

    def client_init(self, client: Client, seed: int) -> dict[str, Any]:
        """The common draw, not trained."""
        return {**super().client_init(client, seed), "trained": False}

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """The client's own."""
        return (
            super().personal_model(message, client_state, client, seed)
            if client_state["trained"]
            else self._load_global_model(message, client_state, client)
        )

    def other_models(
        self, message: Message, client_state: dict[str, Any], client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """The global model, on the client's data."""
        yield "server", self._load_global_model(message, client_state, client)

    def _load_global_model(self, message: Message, client_state: dict[str, Any], client: Client) -> nn.Module:
        return load_model_for_eval(client, message.tensors["model"], client_state, self.buffers)
