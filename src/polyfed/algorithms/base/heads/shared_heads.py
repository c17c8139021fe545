"""Provides base classes of methods in which clients share the head of their networks (the last layers), and each keeps
a body (the other layers) of any architecture.
"""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging, ClientState
from polyfed.algorithms.base.heads.initial_heads import (
    InitialHead,
    find_last_layer_names,
    initial_weights_with_common_head,
)
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers, fill_module
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, clone_tensors, state_dict_spec
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.models.structure import tensor_names_by_position


@dataclass(frozen=True, kw_only=True)
class HeadFromServerMethod(LocalTraining, ABC):
    """Sends one common head (the last layers) to all clients, each of which combines it with the body (the other
    layers) of its network.

    The server keeps the head as "head". It is empty before the first replies, from which the server learns its form; so in
    round 1 the server sends no head, and all clients draw the same first head from the run's seed.

    Args:
        first_head: "form" draws the first head by its layers' kinds and shapes, the same for all clients (polyfed's
            choice); "architecture" takes the head of the architecture's own draw, as in `local`. What a network does not
            draw, such as pretrained weights, stays.
        buffers: "local" only (polyfed's choice), since bodies stay with their clients.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"model", "one_representation"})
    first_head: InitialHead = "form"
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.buffers == "local", "buffers", "'local', since bodies stay with their clients")

    def server_init(self, server: ServerContext) -> dict[str, Any]:
        """Returns a state without a head, whose shape the first replies tell."""
        return {"head": {}}

    def dispatch(self, server_state: dict[str, Any], client_info: ClientInfo) -> Message:
        """Returns to every client the common head, once there is one, and the learning rate."""
        return Message(
            {"head": server_state["head"]} if server_state["head"] else {},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def _draw_weights(
        self, client: Client, num_layers: int, seed_of_layer: Callable[[int], int], seed: int
    ) -> dict[str, Tensor]:
        """Draws the initial weights of the client's network, with the first common head as its last layers."""
        return initial_weights_with_common_head(self.first_head, client, num_layers, seed_of_layer, seed)


@dataclass(frozen=True, kw_only=True)
class AveragedHeadMethod(HeadFromServerMethod, Averaging, ABC):
    """Averages the heads (last layers) of networks whose bodies may have any architecture; each client trains its body
    together with the received head.

    A head's tensors are sent under the place of their layer counted from the output (`0.weight` is the last layer's), since
    names differ between architectures. The client keeps "body" and "head", the head as it trained it. A weight of the head
    that the body uses too (a tied embedding) is the head's, and so averaged. Evaluated model: the average head on the
    client's body; next to it the client's network as it had trained it, as `trained_...`.

    Args:
        head_layers: how many of the last parametric layers are the shared head (1, polyfed's choice).
    """

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    groups: ClassVar[tuple[str, ...]] = ("head",)
    clients_keep_trained_weights: ClassVar[bool] = True
    head_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.head_layers >= 1, "head_layers", "at least 1 (0 would be local)")

    # -- server ---------------------------------------------------------------------------------------------------

    def reply_spec(self, server_state: dict[str, Any], message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the names, shapes and dtypes of the first head that any client sent.

        Raises:
            ValueError: the reply has no head.
        """
        head = server_state["head"] or reply.tensors.get("head")
        if not head:
            raise ValueError(
                f"the reply holds the groups {sorted(reply.tensors)}; expected 'head', with the trained head"
            )
        return {"head": state_dict_spec(head)}

    def reply_spec_is_known(self, server_state: dict[str, Any]) -> bool:
        """Returns False in round 1, when the server does not know the shape of the clients' heads yet; True later."""
        return bool(server_state["head"])

    def make_incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error to raise if clients' heads have different shapes, and so cannot be averaged."""
        return UserError(
            f"{type(self).__name__}: the heads of {error.first_client!r} and {error.other_client!r} differ "
            f"({error.difference}); the last {self.head_layers} layers of all networks must have one form: change the "
            "networks, or head_layers"
        )

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's body, drawn from the run's seed, with the first common head."""
        state = self._draw_weights(client, self.head_layers, partial(derive_seed, seed, "head"), seed)
        return self._split_body_and_head(state, self._head_tensor_names(client))

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's body and the received head for `local_epochs`; replies with only the head."""
        model = self.personal_model(message, client_state, client, seed)
        penalty = self.build_penalty(model, message, client, seed)
        fit_result = fit(model, client, self, lr=message.scalars["lr"], seed=seed, penalty=penalty)
        state_after = self._split_body_and_head(
            copy_trained_weights_and_buffers(model), self._head_tensor_names(client)
        )
        return Message(
            {"head": clone_tensors(state_after["head"])}, reply_scalars(client, fit_result.loss)
        ), state_after

    def build_penalty(
        self, model: nn.Module, message: Message, client: Client, seed: int
    ) -> Callable[[], Tensor] | None:
        """Returns a function of a further term of the loss at every step; None here, without such a term."""
        return None

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the client's network with the received head, or the stored one if none was received.

        Raises:
            UserError: the received head does not fit the network.
        """
        assert client.model is not None
        head = message.tensors.get("head", client_state["head"])
        places = self._head_tensor_names(client)
        if state_dict_spec(head) != state_dict_spec(client_state["head"]):
            raise UserError(
                f"{type(self).__name__}: the shared head does not fit the network of client {client.id!r}; the last "
                f"{self.head_layers} layers of all networks must have one form: change the networks, or head_layers"
            )
        head_tensors = {places[place]: tensor for place, tensor in head.items()}
        return fill_module(cached_module(client.model, client.train.device).module, client_state["body"], head_tensors)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the client's body with the head as it last trained it."""
        yield "trained", self.personal_model(Message(), client_state, client, seed)

    def _head_tensor_names(self, client: Client) -> dict[str, str]:
        """Maps each name under which a tensor of the head is sent to the tensor's name in the client's network."""
        assert client.model is not None
        net = cached_module(client.model, client.train.device)
        places = tensor_names_by_position(
            net.module, find_last_layer_names(client, self.head_layers), {*net.frozen, *net.buffers}
        )
        if not places:
            raise UserError(
                f"{type(self).__name__}: in the last {self.head_layers} layers of the network of client {client.id!r} "
                "nothing is trained (requires_grad), so that there is no head to share; raise head_layers"
            )
        return places

    def _split_body_and_head(self, weights: StateDict, places: Mapping[str, str]) -> ClientState:
        head_names = set(places.values())
        body = {name: tensor for name, tensor in weights.items() if name not in head_names}
        return {"body": body, "head": {place: weights[name] for place, name in places.items()}}
