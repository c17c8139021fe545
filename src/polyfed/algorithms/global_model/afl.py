"""AFL: trains for the mixture of clients on which the model is worst (Mohri, Sivek and Suresh, ICML 2019)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from polyfed.algorithms.base.averaging import (
    Averaging,
    ClientState,
    ServerState,
    build_reply_and_client_state,
    interpolate,
)
from polyfed.algorithms.global_model.received_loss import loss_of_received_model
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.state_dict import StateDictSpec, state_dict_spec, weighted_mean
from polyfed.core.training.loop import fit


@final
@dataclass(frozen=True, kw_only=True)
class AFL(Averaging):
    """Trains one global model against the worst mixture of the clients: min over θ, max over λ in the simplex, of
    Σ_i λ_i·F_i(θ).

    A round sets θ ← Σ_i λ_i·θ_i, where θ_i is θ after local training, and λ ← Π(λ + γ·(F_1(θ), ..., F_N(θ))), where Π
    projects onto the simplex and F_i is the loss of the received θ. With one step of all examples the first is
    θ − η·Σ_i λ_i·∇F_i(θ). If only some clients take part, the weights λ_i of these are scaled to a sum of one, and their
    losses by N over their number. One architecture. Evaluated model: θ.

    Args:
        lambda_lr: γ ≥ 0, the rate of λ (0.1, authors' code of q-FedAvg, for Adult). 0 keeps all clients' weights equal.
        averaged_iterates: evaluates the mean of θ over all rounds, as the paper's algorithm returns, in place of the last θ
            (False, polyfed's choice, since networks are not convex).
        weighted: False only (paper): λ weighs the clients.
        adapters: None only (polyfed's choice), since clients' models are averaged by λ in one form.
        robust: None only (polyfed's choice), since λ replaces the mean.

    The other fields are those of `LocalTraining`.

    >>> AFL(weighted=True)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: AFL: weighted must be false: λ weighs the clients, got True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="afl",
        summary="FedAvg for the worst mixture of the clients",
        paper="Mohri et al. 2019",
        evaluated="the average",
        stacked=True,
    )

    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "received_loss"})
    groups: ClassVar[tuple[str, ...]] = ("model", "loss")
    lambda_lr: float = 0.1
    averaged_iterates: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "lambda_lr")
        self._require(not self.weighted, "weighted", "false: λ weighs the clients")

    @property
    def aggregates_by_sum(self) -> bool:
        """Returns False, since the server weighs each client by its λ and reads its loss."""
        return False

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: the initial model θ and equal weights λ_i = 1/N."""
        state = super().server_init(server)
        average = {"average": state["model"], "rounds": 0} if self.averaged_iterates else {}
        return {**state, **average, "shares": {info.id: 1 / len(server.clients) for info in server.clients}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: θ and the learning rate; for evaluation the mean of all θ, if it is asked for."""
        takes_average = self.averaged_iterates and client_info.purpose == "personal"
        model = server_state["average" if takes_average else "model"]
        return Message({"model": model}, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of a client's reply: those of the global model, and the loss, a single number."""
        return {"model": state_dict_spec(message.tensors["model"]), "loss": {"received": ((), torch.float64)}}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Returns the next server state: the clients' models averaged by λ, and λ after a step along the losses."""
        shares, model = server_state["shares"], server_state["model"]
        members = {i: replies[i].tensors["model"] for i in sorted(replies) if shares[i] > 0}
        if members:  # Σ_i λ_i·θ_i
            model = weighted_mean(members, {i: shares[i] for i in members})
        rate = self.lambda_lr * len(shares) / len(replies)
        raised = {
            i: s + (rate * float(replies[i].tensors["loss"]["received"]) if i in replies else 0.0)
            for i, s in shares.items()
        }
        state = {**server_state, "model": model, "shares": project_onto_simplex(raised)}
        if self.averaged_iterates:
            rounds = server_state["rounds"] + 1
            mean = {n: interpolate(server_state["average"][n], tensor, 1 / rounds) for n, tensor in model.items()}
            state |= {"average": mean, "rounds": rounds}
        return state

    def analysis(self, server_state: ServerState, client_ids: object) -> Mapping[str, float]:
        """Returns the weight λ_i of each client after the round, as `share/ID`."""
        return {f"share/{i}": share for i, share in server_state["shares"].items()}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received model θ; replies with the result and the loss F_i(θ) before it."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        loss = torch.tensor(loss_of_received_model(net.module, client, self), dtype=torch.float64)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        reply, state_after = build_reply_and_client_state(net, client, fit_result.loss, self)
        return Message({**reply.tensors, "loss": {"received": loss}}, reply.scalars), state_after


def project_onto_simplex(point: Mapping[str, float]) -> dict[str, float]:
    """Returns the nearest point whose coordinates are not negative and have the sum 1 (Duchi et al., ICML 2008).

    >>> project_onto_simplex({"a": 0.5, "b": 1.0, "c": -1.0})
    {'a': 0.25, 'b': 0.75, 'c': 0.0}
    """
    total, threshold = 0.0, 0.0
    for count, value in enumerate(sorted(point.values(), reverse=True), start=1):
        total += value
        if value > (total - 1) / count:
            threshold = (total - 1) / count
    return {i: max(0.0, value - threshold) for i, value in point.items()}
