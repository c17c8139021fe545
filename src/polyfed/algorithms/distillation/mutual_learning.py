"""The base of methods in which each client trains two networks that learn from each other: its own, which stays, and a
common one, which is averaged (FML, FedKD)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.algorithms.distillation.shared_network import (
    build_model_spec,
    infer_shared_network_form,
    validate_network_name,
    with_shared_network,
)
from polyfed.alignment.representations import compute_representations, representation_module_name
from polyfed.core.algorithm import Architecture, Client, ClientInfo, Message, ServerContext
from polyfed.core.capabilities import TrainsAuxiliaryNetwork, ValidatesNetworks
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import logits_of
from polyfed.core.io.frozen_mapping import FrozenMapping
from polyfed.core.nn.buffers import extract_update, load_client_model, prepare_for_eval, shared_tensors
from polyfed.core.nn.module_cache import build_module, cached_module, fill_module, initial_state, trainable_state
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars


@dataclass(frozen=True, kw_only=True)
class MutualLearningMethod(Averaging, ValidatesNetworks, TrainsAuxiliaryNetwork, ABC):
    """Two networks at each client, trained together on the same minibatches: θ_i, its own, of any architecture, and s, the
    common one, which travels. A method says what they minimise (`joint_loss`).

    In round 1 nothing goes down, since the server does not know the form of the clients' data: every client starts s from
    the run's draw for its architecture. `buffers` is about those of s; those of θ_i stay with the client.

    Args:
        shared: the common network s: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: cnn_small, channels: [8, 16]} ("mlp", polyfed's choice: it takes inputs of any shape but tokens).
        weighted: the mean of s by the number of training examples (True, paper: FedAvg); False counts every client the same.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"model"})
    shared: str | Mapping[str, Any] = "mlp"
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {"name": self.shared} if isinstance(self.shared, str) else self.shared
        has_name = isinstance(options, Mapping) and isinstance(options.get("name"), str)
        self._require(has_name, "shared", "a network's name, or a mapping with it, as {name: resnet18, width: 16}")
        object.__setattr__(self, "shared", FrozenMapping(options))
        build_model_spec(self._shared_options, (1,), 1)  # refuses an unknown name

    @property
    def _shared_options(self) -> Mapping[str, Any]:
        assert isinstance(self.shared, Mapping)
        return self.shared

    @abstractmethod
    def joint_loss(self, pair: "Pair", client: Client) -> Callable[[ForwardPass], Tensor]:
        """What both networks minimise: the sum of the loss of θ_i, in which s is a constant, and of that of s, in which θ_i
        is. A minibatch's `outputs` are those of θ_i, and `pair.outputs` those of s."""

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """No s yet: it is that of the first replies."""
        validate_network_name(self._shared_options)
        return {"model": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """s, the same for everyone, once there is one; and the learning rate."""
        return Message(
            {"model": server_state["model"]} if server_state["model"] else {},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """s, in the form of the first."""
        if not server_state["model"] and not reply.tensors.get("model"):
            raise ValueError(
                f"the reply holds the groups {sorted(reply.tensors)}; expected 'model', the trained network"
            )
        return {"model": state_dict_spec(server_state["model"] or reply.tensors["model"])}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Not in round 1: the outputs of s are those that the clients' networks have."""
        return bool(server_state["model"])

    def incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """The first replies must have one form to have a mean."""
        return UserError(
            f"{type(self).__name__}: the shared networks of clients {error.first_client!r} and {error.other_client!r} "
            f"differ ({error.other_client!r}: {error.difference}); clients need inputs of one shape, and as many "
            "outputs"
        )

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """As the client's first state does."""
        self.client_init(client, 0)

    def auxiliary_network(self, client: Client) -> Architecture:
        """s, in the form of the client's data."""
        return with_shared_network(self._shared_options, self.client_init(client, 0), client)[1]

    def client_init(self, client: Client, seed: int) -> ClientState:
        """θ_i: the common draw of the client's architecture, as in Local. And what s must take and give here."""
        assert client.model is not None
        state = initial_state(client.model, seed)
        form = infer_shared_network_form(self._shared_options, state, client, type(self).__name__, "shared")
        return {"seed": seed, **form, "own": state}

    def _shared_weights(self, message: Message, client_state: ClientState, client: Client) -> StateDict:
        """s as the message has it, or as it is at first."""
        _, factory = with_shared_network(self._shared_options, client_state, client)
        initial_weights = shared_tensors(
            initial_state(factory, client_state["seed"]), cached_module(factory).buffers, self.buffers
        )
        return message.tensors.get("model", initial_weights)

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """θ_i and s_i after `local_epochs` on the client's data."""
        shared_client, _ = with_shared_network(self._shared_options, client_state, client)
        net = load_client_model(
            shared_client, self._shared_weights(message, client_state, client), client_state, self.buffers
        )
        pair = self.build_pair(
            self.personal_model(message, client_state, client, seed), net.module, client_state, client
        )
        fit_result = fit(
            pair,
            client,
            self,
            lr=message.scalars["lr"],
            seed=seed,
            loss=self.joint_loss(pair, client),
            reported_loss="task",
            representation=pair.watched,
        )
        model, buffer_state = extract_update(net, self)
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), {
            **client_state,
            **buffer_state,
            "own": trainable_state(pair.own),
            **pair.bridge_state(),
        }

    def _with_initial_bridge(self, client_state: ClientState, client: Client, seed: int) -> ClientState:
        """Private state with W_i, a matrix from the representation of s to that of θ_i, as it is drawn."""
        _, factory = with_shared_network(self._shared_options, client_state, client)
        shared, personal = (
            cached_module(factory, client.train.device).module,
            self.personal_model(Message(), client_state, client, seed),
        )
        columns, rows = (
            compute_representations(network, client.train.head()).shape[1] for network in (shared, personal)
        )
        bridge = build_module(partial(nn.Linear, columns, rows, bias=False), derive_seed(seed, client.id, "bridge"))
        return {**client_state, "bridge": trainable_state(bridge)}

    def build_pair(self, personal: nn.Module, shared: nn.Module, client_state: ClientState, client: Client) -> "Pair":
        """Both networks as the one that `fit` trains."""
        return Pair(personal, shared)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """θ_i."""
        assert client.model is not None
        return fill_module(cached_module(client.model, client.train.device).module, client_state["own"])

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """s, on the client's data."""
        shared_client, _ = with_shared_network(self._shared_options, client_state, client)
        net = load_client_model(
            shared_client, self._shared_weights(message, client_state, client), client_state, self.buffers
        )
        yield "shared", prepare_for_eval(net, shared_client, client_state, self.buffers)


@final
class Pair(nn.Module):
    """Two networks on the same inputs: as a network it is the first, `personal`; the second's outputs are left in `outputs`.

    Args:
        personal, shared: the networks.
        bridge: a matrix from the second's representation to the first's, if they are to be compared; it is trained too.
        modules: names of the modules, in the first and in the second, whose inputs the representations are.

    >>> pair = Pair(nn.Linear(2, 3), nn.Linear(2, 3))
    >>> import torch
    >>> pair(torch.zeros(1, 2)).shape, pair.outputs.shape
    (torch.Size([1, 3]), torch.Size([1, 3]))
    """

    client_network = "own"  # whose names `lr_by_name` means

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
        """Outputs of the client's own network; those of the shared one only in training."""
        personal_outputs = logits_of(self.own(*args, **named))
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

    def bridge_state(self) -> ClientState:
        """What of the pair, beside the networks, a client keeps."""
        return {} if self.bridge is None else {"bridge": trainable_state(self.bridge)}


def build_bridged_pair(personal: nn.Module, shared: nn.Module, bridge: StateDict, client: Client) -> Pair:
    """Both networks with this matrix between their representations."""
    rows, columns = bridge["weight"].shape
    template = build_module(partial(nn.Linear, columns, rows, bias=False), 0)  # torch's own random state is left alone
    bridge_layer = fill_module(template.to(client.train.device), bridge)
    assert isinstance(bridge_layer, nn.Linear)
    names = representation_module_name(personal, client.train), representation_module_name(shared, client.train)
    return Pair(personal, shared, bridge_layer, names)
