"""Provides the base class of methods whose server takes a step from the clients' mean, such as FedOpt."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyfed.algorithms.base.averaging import Averaging, ServerState
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.state_dict import StateDict


@dataclass(frozen=True, kw_only=True)
class ServerUpdateMethod(Averaging, ABC):
    """Averages the clients' parameters, and then lets the server compute a step from the mean; subclasses define this
    step in `server_update`.

    Buffers that are sent are only averaged, since a step along their changes could make a running variance negative. So
    the server keeps them apart, as "buffers".
    """

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial parameters and, apart from them, the buffers that are sent."""
        assert server.model is not None  # `requires` names "one_architecture"
        model, names = super().server_init(server)["model"], cached_module(server.model).buffers
        return {
            "model": {name: tensor for name, tensor in model.items() if name not in names},
            "buffers": {name: tensor for name, tensor in model.items() if name in names},
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: the global parameters, the buffers, and the learning rate of the round."""
        return Message(
            {"model": {**server_state["model"], **server_state["buffers"]}},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the state with parameters updated by `server_update`, and buffers replaced by their mean."""
        model = mean["model"]
        parameters = {name: model[name] for name in server_state["model"]}
        buffers = {name: model[name] for name in server_state["buffers"]}
        return {**self.server_update(server_state, {**mean, "model": parameters}, client_ids), "buffers": buffers}

    @abstractmethod
    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Computes the next state from the mean parameters; arguments are those of `server_step`.

        The group "model" of the mean contains no buffers.
        """
