"""Provides the base class of methods in which some tensors of the network stay with the client, and the server averages
the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.core.algorithm import Client, Message, ServerContext
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.nn.buffers import (
    extract_sent_tensors_and_client_state,
    load_client_model,
    recompute_norm_statistics_if_needed,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import (
    CachedModule,
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
)
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit, reply_scalars


@dataclass(frozen=True, kw_only=True)
class LocalPartMethod(Averaging, ValidatesNetworks, ABC):
    """Averages one part of a network over all clients, while the other part stays with each client; clients train both
    parts together.

    A method names the tensors of the local part. If the server cannot, since they are found on an example, take
    `BodyAndHeadMethod`. Evaluated model: the average with the client's own part; a client that never took part has the
    initial one.

    >>> class KeepsBiases(LocalPartMethod):
    ...     def _find_local_tensors(self, module, example):
    ...         return [name for name, _ in module.named_parameters() if name.endswith("bias")]
    >>> client_state = KeepsBiases().client_init(Client("north", lambda: nn.Linear(2, 1), *[([[0.0, 1.0]], [0])] * 2), 0)
    >>> {group: list(tensors) for group, tensors in client_state.items()}
    {'local': ['bias']}
    """

    local_group: ClassVar[str] = "local"
    """The group of the client state that holds the local part."""

    @abstractmethod
    def _find_local_tensors(self, module: nn.Module, example: Tensor | None) -> Collection[str]:
        """Returns the names of the tensors that stay at the client.

        Args:
            module: the network.
            example: the client's first input; None at the server, which has none.
        """

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial global model θ without the tensors that stay with the clients."""
        assert server.model is not None  # `requires` names "one_architecture"
        net = cached_module(server.model)
        local_names = frozenset(self._find_local_tensors(net.module, None))
        theta = tensors_to_send(initial_state(server.model, server.seed), net.buffers, self.buffers)
        return {"model": {name: tensor for name, tensor in theta.items() if name not in local_names}}

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """Raises an error if the local tensors of the network cannot be identified."""
        self.client_init(client, 0)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the tensors that stay with the client, drawn from the run's seed, the same for all."""
        assert client.model is not None
        initial_weights, net = initial_state(client.model, seed), cached_module(client.model, client.train.device)
        fill_module(net.module, initial_weights)
        local_names = self._find_local_tensors(net.module, client.train.first_input)
        local_part = {name: initial_weights[name] for name in local_names if name in initial_weights}
        return {self.local_group: tensors_to_send(local_part, net.buffers, self.buffers)}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the global part θ and the client's local part for `local_epochs`; replies with θ only."""
        net = self._load_with_local_part(message, client_state, client)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        model, local_part, buffer_state = self._split_trained(net, client_state)
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), {
            self.local_group: local_part,
            **buffer_state,
        }

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: the global part θ together with the client's local part."""
        net = self._load_with_local_part(message, client_state, client)
        return recompute_norm_statistics_if_needed(net, client, client_state, self.buffers)

    def _load_with_local_part(self, message: Message, client_state: ClientState, client: Client) -> CachedModule:
        return load_client_model(
            client, {**message.tensors["model"], **client_state[self.local_group]}, client_state, self.buffers
        )

    def _split_trained(
        self, net: CachedModule, client_state: ClientState
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, StateDict]]:
        """Splits the trained network into the tensors to send, the local part, and the buffers that the client keeps."""
        state, buffer_state = extract_sent_tensors_and_client_state(net, self)
        local_names = client_state[self.local_group]
        travelling = {name: tensor for name, tensor in state.items() if name not in local_names}
        trained = copy_trained_weights_and_buffers(net.module)  # the local part's counters, which stay, count on
        return travelling, {name: trained[name] for name in local_names}, buffer_state
