"""FedKD: each client's own network and a small shared network teach each other, and clients send compressed updates of
the shared one (Wu, Wu, Lyu, Huang and Xie, Nature Communications 2022).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.distillation.base.low_rank import (
    apply_update,
    compress_update,
    compressed_update_spec,
    expand_update,
    subtract_state,
)
from polyfed.algorithms.distillation.base.mutual_learning import (
    MutualLearningMethod,
    NetworkPair,
    join_networks_by_bridge_matrix,
)
from polyfed.algorithms.distillation.base.output_matching import softened_kl_divergence
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.state_dict import StateDict, StateDictSpec
from polyfed.core.training.loop import ForwardPass


@final
@dataclass(frozen=True, kw_only=True)
class FedKD(MutualLearningMethod):
    """Trains each client's network together with a small shared network, which teach each other; clients send only
    compressed updates of the shared one.

    Both the own network θ_i ("mentor") and the shared s ("mentee") minimise CE + (KL + H)/(CE_θ + CE_s): KL is the
    divergence of the other network's softmax from its own, and H the mean squared difference of their representations,
    with a matrix W_i of the client's in between. The update of s is compressed: each matrix by its largest singular
    values with a share T(t) of the sum of squares; the server sends the mean update in the same way. The number of
    singular values depends on a client's data and reveals something about them. Without the quotient (`distil` = 0) θ_i
    is Local, bit for bit. Evaluated model: θ_i; next to it s, as `shared_...`.

    In round 1 the server sends nothing, and clients send the whole s. A client that was not in the last round gets the whole
    s.

    Args:
        shared: the shared network s: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: cnn_small, channels: [8, 16]} ("mlp", polyfed's choice: it takes inputs of any shape except tokens).
        distil: factor of the quotient (1.0, paper); 0 turns mutual learning off.
        hidden_loss: whether H is part of the quotient (True, paper).
        t_start, t_end: T in the first and in the last round, linear in between (0.95 and 0.98, authors' code).
        weighted: weighs clients' updates by their number of training examples; False counts every client the same (False,
            paper).
        buffers: buffers of s ("average", polyfed's choice); those of θ_i always stay with the client.

    The other fields are those of `LocalTraining`, for both networks.

    >>> round(FedKD().kept_energy_at(3, 5), 3)
    0.965
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedkd",
        summary="Mutual distillation with a common network; low-rank updates",
        paper="Wu et al. 2022",
        evaluated="its own; also the common one",
        leaderboard={"*": {}, "tweets": {"shared": {"name": "lstm", "vocabulary": 5000}}},
    )

    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "ranks"})
    traits: ClassVar[frozenset[str]] = frozenset({"one_version", "plans_all_rounds"})
    _differences: ClassVar[frozenset[str]] = frozenset({"update"})
    weighted: bool = False
    distil: float = 1.0
    hidden_loss: bool = True
    t_start: float = 0.95
    t_end: float = 0.98

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "distil")
        for field in ("t_start", "t_end"):
            self._require(0 < getattr(self, field) <= 1, field, "above 0 and at most 1")

    def kept_energy_at(self, round_number: int, rounds: int) -> float:
        """Returns the share of squared singular values kept in a round (eq. 9), linear in rounds.

        T(t) = T_start + (T_end − T_start)·t, where t goes from 0 in the first round to 1 in the last.
        """
        return self.t_start + (self.t_end - self.t_start) * (round_number - 1) / max(rounds - 1, 1)

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without the shared network, whose weights come with the first replies."""
        return {**super().server_init(server), "update": {}, "holders": [], "round": 0}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the shared network, or its compressed update, and the share of energy that updates keep.

        Only clients of the last round get the update.
        """
        scalars = {
            "lr": self.lr_at(client_info.round, client_info.rounds),
            "energy": self.kept_energy_at(client_info.round, client_info.rounds),
        }
        if server_state["update"] and client_info.id in server_state["holders"]:
            return Message({"update": server_state["update"]}, scalars)
        return Message({"model": server_state["model"]} if server_state["model"] else {}, scalars)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of the shared network (round 1), or of its compressed update."""
        if not server_state["model"]:
            return super().reply_spec(server_state, message, reply)
        return {"update": compressed_update_spec(reply.tensors.get("update", {}), server_state["model"])}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Adds the mean update to the shared network (algorithm 1, lines 13 to 22).

        Δ is compressed by T(t). In round 1 clients send the whole network, and the server averages it.
        """
        round_number = server_state["round"] + 1
        if not server_state["model"]:
            return {
                "model": self._average_by_client({i: r.tensors["model"] for i, r in replies.items()}, replies),
                "update": {},
                "holders": [],
                "round": round_number,
            }
        updates = {i: expand_update(r.tensors["update"], server_state["model"]) for i, r in replies.items()}
        update = compress_update(
            self._average_by_client(updates, replies), self.kept_energy_at(round_number, server.rounds)
        )
        return {
            "model": apply_update(server_state["model"], update),
            "update": update,
            "holders": sorted(replies),
            "round": round_number,
        }

    # -- client ---------------------------------------------------------------------------------------------------

    @property
    def _divides_by_loss(self) -> bool:
        """Returns whether the distillation is divided by losses of minibatches; that of all examples is never 0."""
        return bool(self.distil and self.batch_size)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's network, and the matrix from shared to the client's representations."""
        client_state = super().client_init(client, seed)
        return (
            self._with_initial_bridge(client_state, client, seed) if self.hidden_loss and self.distil else client_state
        )

    def _shared_weights(self, message: Message, client_state: ClientState, client: Client) -> StateDict:
        """Returns the shared network's weights: received, stored and updated, or in round 1 initial."""
        if "update" not in message.tensors:
            return super()._shared_weights(message, client_state, client)
        if "common" not in client_state:
            raise UserError(
                f"client {client.id!r} had the shared network, and lost it with its private state; start the run again"
            )
        return apply_update(client_state["common"], message.tensors["update"])

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains both networks for `local_epochs`; replies with the compressed change of the shared one."""
        reply, state_after = super().local_update(message, client_state, client, seed)
        if not message.tensors:
            return reply, state_after
        before = {name: tensor.cpu() for name, tensor in self._shared_weights(message, client_state, client).items()}
        change = subtract_state(reply.tensors["model"], before)
        groups = {"update": compress_update(change, message.scalars["energy"])}
        return Message(groups, reply.scalars), {**state_after, "common": before}

    def build_pair(
        self, personal: nn.Module, shared: nn.Module, client_state: ClientState, client: Client
    ) -> NetworkPair:
        """Joins the client's network, the shared one, and the matrix between their representations."""
        return (
            join_networks_by_bridge_matrix(personal, shared, client_state["bridge"], client)
            if "bridge" in client_state
            else NetworkPair(personal, shared)
        )

    def build_joint_loss(self, pair: NetworkPair, client: Client) -> Callable[[ForwardPass], Tensor]:
        """Returns the loss of both networks: cross-entropies, and distances of outputs and representations.

        It is CE_z + CE_s + (KL(s ‖ z) + KL(z ‖ s) + H)/(CE_z + CE_s) (eqs. 1 to 7), where z and s are the outputs of
        the client's own network and of the shared one.

        The divisor has no gradient.
        """
        label_loss = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            z, s, y = batch.outputs, pair.outputs, batch.targets
            labels = label_loss(z, y) + label_loss(s, y)
            if not self.distil:
                return labels
            distance = softened_kl_divergence(s.detach(), z, 1.0, client.task) + softened_kl_divergence(
                z.detach(), s, 1.0, client.task
            )
            if batch.representation is not None:
                distance = distance + F.mse_loss(batch.representation.flatten(1), pair.bridged)
            return labels + self.distil * distance / labels.detach()

        return loss
