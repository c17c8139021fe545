"""LG-FedAvg: heads are averaged, bodies stay with their clients (Liang et al. 2020, "Think Locally, Act Globally",
algorithm 1)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from torch import nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.algorithms.base.initial_heads import InitialHead, find_last_layers, initial_weights_with_head
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import cached_module, fill_module, trainable_state
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, clone_tensors, state_dict_spec
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.models.structure import tensor_names_by_position

# The server keeps "head", empty before the first replies; a client keeps "body" and "head", the head that it trained itself


@final
@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Averaging):
    """Each client has a body φ_i of its own, of any architecture, and all share a head h: a client trains both together,
    from its φ_i and the h that came down, and the server averages the heads. With the whole network as the head it is FedAvg
    with buffers of one's own, bit for bit. Evaluated model: h(φ_i(x)), with the average h; next to it the client's network
    as it had trained it, as `trained_...`.

    A head's tensors travel under the place of their layer counted from the output (`0.weight` is the last layer's), since
    names differ between architectures. In round 1 nothing goes down: all clients draw the same first head from the run's
    seed. A weight of the head that the body uses too (a tied embedding) is the head's, and so averaged.

    Args:
        head_layers: how many of the last parametric layers are the shared head (1, polyfed's choice; the paper and its code
            keep two or more, depending on the data).
        first_head: "form" draws the first head by its layers' kinds and shapes, the same for all clients (paper: the server
            hands out one, algorithm 1), "architecture" takes the head of the architecture's own draw, as in `local`. What
            a network does not draw, such as pretrained weights, stays.
        weighted: the heads' mean by the number of training examples (True, paper); False counts every client the same.
        buffers: "local" only (polyfed's choice), since bodies stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> LGFedAvg(head_layers=2).groups
    ('head',)
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="lg_fedavg",
        summary="A shared head, and a body for each client",
        paper="Liang et al. 2020",
        evaluated="the average head on the client's body; also its own",
        published=frozenset({"head"}),
        # With one network for all, the head of its own draw is common to all, and is that of the other methods.
        leaderboard={"*": {"first_head": "architecture"}, "architectures": {}},
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"model", "one_representation"})
    groups: ClassVar[tuple[str, ...]] = ("head",)
    clients_keep_trained_weights: ClassVar[bool] = True
    head_layers: int = 1
    first_head: InitialHead = "form"
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.head_layers >= 1, "head_layers", "at least 1 (0 would be local)")
        self._require(self.buffers == "local", "buffers", "'local', since bodies stay with their clients")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """No head yet: only clients can say what theirs is."""
        return {"head": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """h, the same for everyone, once there is one; and the learning rate."""
        return Message(
            {"head": server_state["head"]} if server_state["head"] else {},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """A head in the form of the first."""
        head = server_state["head"] or reply.tensors.get("head")
        if not head:
            raise ValueError(
                f"the reply holds the groups {sorted(reply.tensors)}; expected 'head', with the trained head"
            )
        return {"head": state_dict_spec(head)}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Not in round 1."""
        return bool(server_state["head"])

    def incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Only heads of one form have a mean."""
        return UserError(
            f"LGFedAvg: the heads of {error.first_client!r} and {error.other_client!r} differ ({error.difference}); "
            f"the last {self.head_layers} layers of all networks must have one form: change the networks, or "
            "head_layers"
        )

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """φ_i, the common draw of the client's architecture; and the first head."""
        state = initial_weights_with_head(
            self.first_head, client, self.head_layers, partial(derive_seed, seed, "head"), seed
        )
        return self._split_body_and_head(state, self._head_tensor_names(client))

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """φ_i and h_i after `local_epochs` on the client's data, from φ_i and h (algorithm 1, ClientUpdate)."""
        model = self.personal_model(message, client_state, client, seed)
        fit_result = fit(model, client, self, lr=message.scalars["lr"], seed=seed)
        state_after = self._split_body_and_head(trainable_state(model), self._head_tensor_names(client))
        return Message(
            {"head": clone_tensors(state_after["head"])}, reply_scalars(client, fit_result.loss)
        ), state_after

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """h ∘ φ_i, with the h that came down; before there is one, the client's own."""
        assert client.model is not None
        head = message.tensors.get("head", client_state["head"])
        places = self._head_tensor_names(client)
        if state_dict_spec(head) != state_dict_spec(client_state["head"]):
            raise UserError(
                f"LGFedAvg: the shared head does not fit the network of client {client.id!r}; the last {self.head_layers} "
                "layers of all networks must have one form: change the networks, or head_layers"
            )
        head_tensors = {places[place]: tensor for place, tensor in head.items()}
        return fill_module(cached_module(client.model, client.train.device).module, client_state["body"], head_tensors)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """h_i ∘ φ_i, as the client trained them."""
        yield "trained", self.personal_model(Message(), client_state, client, seed)

    def _head_tensor_names(self, client: Client) -> dict[str, str]:
        """The name under which a parameter of the head travels -> its first name in the client's network."""
        assert client.model is not None
        net = cached_module(client.model, client.train.device)
        places = tensor_names_by_position(
            net.module, find_last_layers(client, self.head_layers), {*net.frozen, *net.buffers}
        )
        if not places:
            raise UserError(
                f"LGFedAvg: in the last {self.head_layers} layers of the network of client {client.id!r} nothing is trained "
                "(requires_grad), so that there is no head to share; raise head_layers"
            )
        return places

    def _split_body_and_head(self, weights: StateDict, places: Mapping[str, str]) -> ClientState:
        """Body and head of a network's state."""
        head_names = set(places.values())
        body = {name: tensor for name, tensor in weights.items() if name not in head_names}
        return {"body": body, "head": {place: weights[name] for place, name in places.items()}}
