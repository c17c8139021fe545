"""Provides the base class of methods in which each client trains two networks that learn from each other: the client's
network, and a shared one that the server averages (FML, FedKD).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.distillation.base.shared_network import (
    SharedNetworkMethod,
    check_network_factory_can_be_imported,
    client_with_shared_network,
    infer_shared_network_sizes,
)
from polyfed.alignment.representations import compute_representations, representation_module_name
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import call_network_on_copy_if_it_changes_inputs, logits_of
from polyfed.core.nn.buffers import extract_sent_tensors_and_client_state, recompute_norm_statistics_if_needed
from polyfed.core.nn.module_cache import (
    build_module,
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
)
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars


@dataclass(frozen=True, kw_only=True)
class MutualLearningMethod(SharedNetworkMethod, ABC):
    """Trains two networks at each client, which learn from each other: the client's, of any architecture, and a shared
    one that the server averages.

    The own network θ_i and the shared s are trained on the same minibatches. Subclasses define the loss
    (`build_joint_loss`).

    `buffers` is the policy for s; buffers of θ_i stay with the client.

    Args:
        shared: the shared network s: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: cnn_small, channels: [8, 16]} ("mlp", polyfed's choice: it takes inputs of any shape except tokens).
        weighted: weighs clients in s by their number of training examples (True, paper: FedAvg); False counts every client
            the same.
    """

    shared: str | Mapping[str, Any] = "mlp"
    weighted: bool = True

    @abstractmethod
    def build_joint_loss(self, pair: "NetworkPair", client: Client) -> Callable[[ForwardPass], Tensor]:
        """Returns the function of a minibatch's loss: the client network's plus the shared one's.

        In the loss of θ_i the shared s has no gradient, and in that of s θ_i has none.

        A minibatch's `outputs` are those of θ_i, and `pair.outputs` those of s.
        """

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without the shared network, whose weights come with the first replies."""
        check_network_factory_can_be_imported(self._shared_options)
        return {"model": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns to every client the shared network, once there is one, and the learning rate."""
        return Message(
            {"model": server_state["model"]} if server_state["model"] else {},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    # -- client ---------------------------------------------------------------------------------------------------

    @property
    def _divides_by_loss(self) -> bool:
        """Returns whether the method divides by the loss of a minibatch; False by default."""
        return False

    def validate_network(self, client: Client) -> None:
        """Raises an error if the shared network refuses the data, or the method divides by a loss that can be 0."""
        super().validate_network(client)
        if self._divides_by_loss and client.task.loss_may_vanish:
            raise UserError(
                f"{type(self).__name__} divides by the loss of a minibatch, which is 0 in the task {client.task} without an "
                "event; set batch_size to 0, so that a minibatch is all of a client, or choose another method, such as fml"
            )

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's network, and the input shape and outputs that the shared network needs."""
        assert client.model is not None
        state = initial_state(client.model, seed)
        form = infer_shared_network_sizes(self._shared_options, state, client, type(self).__name__, "shared")
        return {"seed": seed, **form, "own": state}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's network and the shared one for `local_epochs`; replies with the shared one."""
        net, _ = self._load_shared_network(message, client_state, client)
        pair = self.build_pair(
            self.personal_model(message, client_state, client, seed), net.module, client_state, client
        )
        fit_result = fit(
            pair,
            client,
            self,
            lr=message.scalars["lr"],
            seed=seed,
            loss=self.build_joint_loss(pair, client),
            reported_loss="task",
            representation=pair.watched,
        )
        model, buffer_state = extract_sent_tensors_and_client_state(net, self)
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), {
            **client_state,
            **buffer_state,
            "own": copy_trained_weights_and_buffers(pair.own),
            **pair.bridge_weights_as_client_state(),
        }

    def _with_initial_bridge(self, client_state: ClientState, client: Client, seed: int) -> ClientState:
        """Returns the state with an initial matrix W_i from shared to the client's own representations."""
        _, factory = client_with_shared_network(self._shared_options, client_state, client)
        shared = cached_module(factory, client.train.device).module
        personal = self.personal_model(Message(), client_state, client, seed)
        columns, rows = (
            compute_representations(network, client.train.head()).shape[1] for network in (shared, personal)
        )
        layer = partial(nn.Linear, columns, rows, bias=False, dtype=next(shared.parameters()).dtype)
        bridge = build_module(layer, derive_seed(seed, client.id, "bridge"))
        return {**client_state, "bridge": copy_trained_weights_and_buffers(bridge)}

    def build_pair(
        self, personal: nn.Module, shared: nn.Module, client_state: ClientState, client: Client
    ) -> "NetworkPair":
        """Combines the client's network and the shared one into one module for training."""
        return NetworkPair(personal, shared)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its network, not the shared one."""
        assert client.model is not None
        return fill_module(cached_module(client.model, client.train.device).module, client_state["own"])

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields a further network to evaluate, as (name, network): the shared network with the client's buffers."""
        net, shared_client = self._load_shared_network(message, client_state, client)
        yield "shared", recompute_norm_statistics_if_needed(net, shared_client, client_state, self.buffers)


@final
class NetworkPair(nn.Module):
    """Runs a client's network and the shared one; returns the former's output, stores the other.

    Args:
        personal, shared: the networks.
        bridge: a matrix from the representation of `shared` to that of `personal`, if these are compared; it is trained,
            too.
        modules: names of the modules of `personal` and `shared` whose inputs are the representations.

    >>> pair = NetworkPair(nn.Linear(2, 3), nn.Linear(2, 3))
    >>> import torch
    >>> pair(torch.zeros(1, 2)).shape, pair.outputs.shape
    (torch.Size([1, 3]), torch.Size([1, 3]))
    """

    client_network = "own"  # the submodule whose parameter names `lr_by_name` uses

    def __init__(
        self,
        personal: nn.Module,
        shared: nn.Module,
        bridge: nn.Linear | None = None,
        modules: tuple[str, str] = ("", ""),
    ) -> None:
        super().__init__()
        self.own, self.shared, self.bridge = personal, shared, bridge
        self.watched = f"own.{modules[0]}".rstrip(".") if bridge is not None else None  # "": the network is one layer
        self._second = modules[1]
        self.outputs: Tensor
        self.bridged: Tensor

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Returns the output of the client's network; in training mode it also runs the shared network."""
        personal_outputs = logits_of(call_network_on_copy_if_it_changes_inputs(self.own, named or args))
        if self.training:
            watched_module = None if self.bridge is None else self.shared.get_submodule(self._second)
            hook = None if watched_module is None else watched_module.register_forward_pre_hook(self._bridge_input)
            self.outputs = logits_of(self.shared(*args, **named))
            if hook is not None:
                hook.remove()
        return personal_outputs

    def _bridge_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert self.bridge is not None
        self.bridged = self.bridge(inputs[0].flatten(1))

    def bridge_weights_as_client_state(self) -> ClientState:
        """Returns `{"bridge": weights}` of the matrix between the representations; empty without one."""
        return {} if self.bridge is None else {"bridge": copy_trained_weights_and_buffers(self.bridge)}


def join_networks_by_bridge_matrix(
    personal: nn.Module, shared: nn.Module, bridge: StateDict, client: Client
) -> NetworkPair:
    """Joins a client's network and the shared one by the given matrix between their representations."""
    rows, columns = bridge["weight"].shape
    layer = partial(nn.Linear, columns, rows, bias=False, dtype=bridge["weight"].dtype)
    template = build_module(layer, 0)  # does not change torch's random state
    bridge_layer = fill_module(template.to(client.train.device), bridge)
    assert isinstance(bridge_layer, nn.Linear)
    names = representation_module_name(personal, client.train), representation_module_name(shared, client.train)
    return NetworkPair(personal, shared, bridge_layer, names)
