"""FedNova: clients' changes are divided by their numbers of local steps before they are averaged, so that clients with many
steps do not pull the model to themselves (Wang, Liu, Liang, Joshi and Poor, NeurIPS 2020, "Tackling the Objective
Inconsistency Problem in Heterogeneous Federated Optimization", arXiv 2007.07481).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from polyfed.algorithms.base.averaging import ClientState, ServerState, build_reply_and_client_state, interpolate
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit

_PLAIN_SGD_REASON = "since a_i is that of plain SGD"


def sum_of_step_weights(steps: int, momentum: float) -> float:
    """Returns ‖a‖₁, by how many plain steps of one gradient SGD moves a model in so many steps with momentum ρ.

    The gradient of step k is in all later steps, with the weights 1, ρ, ρ², ...: a_k = (1 − ρ^(τ−k+1))/(1 − ρ).

    >>> sum_of_step_weights(3, 0.0), sum_of_step_weights(2, 0.5)  # (1 + 0.5) + 1
    (3.0, 2.5)
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@final
@dataclass(frozen=True, kw_only=True)
class FedNova(ServerUpdateMethod):
    """Trains one global model by FedAvg, except that each client's change is divided by its number of local steps, and the
    mean is multiplied by the mean number of steps.

    Client i takes τ_i steps of SGD and sends its mean step d_i = (x − x_i)/‖a_i‖₁; the server sets x ← x − τ_eff·Σ_i p_i d_i
    with τ_eff = Σ_i p_i ‖a_i‖₁ and p_i = n_i/n. ‖a_i‖₁ is τ_i for plain SGD. With equal numbers of steps it is FedAvg. All
    clients have one architecture. Evaluated model: x.

    Clients take different numbers of steps if they have different numbers of examples: then FedAvg minimises another sum of
    their losses than Σ_i p_i L_i.

    Args:
        weighted: p_i is the client's share of the training examples (True, paper); False counts every client the same.

    The other fields are those of `LocalTraining`. a_i is known for SGD, with momentum or without. Other optimisers,
    Nesterov's momentum and warm-up within a round are refused.

    >>> FedNova(optimizer="adam")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: FedNova: optimizer must be 'sgd', since a_i is that of plain SGD, got 'adam'
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fednova",
        summary="FedAvg of changes divided by numbers of local steps",
        paper="Wang et al. 2020",
        evaluated="the average",
        leaderboard={"*": {"optimizer": "sgd", "lr": 0.2}},  # SGD
        stacked=True,
    )

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    groups: ClassVar[tuple[str, ...]] = ("model", "steps")
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.optimizer.lower() == "sgd", "optimizer", f"'sgd', {_PLAIN_SGD_REASON}")
        self._require(not self.nesterov, "nesterov", f"false, {_PLAIN_SGD_REASON}")
        self._require(self.warmup_steps == 0, "warmup_steps", f"0, {_PLAIN_SGD_REASON}")
        self._require(self.optimizer_options is None, "optimizer_options", f"none, {_PLAIN_SGD_REASON}")
        self._require(self.adapters is None, "adapters", "none: mean steps have the form of one architecture")
        if not self.weighted:  # ‖a_i‖₁ shows how many minibatches the client has
            object.__setattr__(self, "discloses", self.discloses | {"form"})

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: the initial global model x, and τ_eff of the last round, 0."""
        return {**super().server_init(server), "steps": {"weight": torch.zeros(())}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the global model x, the learning rate, and for training τ_eff in the form of a reply's."""
        message = super().dispatch(server_state, client_info)
        steps = {} if client_info.purpose == "personal" else {"steps": server_state["steps"]}
        return Message({**message.tensors, **steps}, message.scalars)

    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state: x ← x − τ_eff·Σ_i p_i d_i, with τ_eff = Σ_i p_i ‖a_i‖₁."""
        tau_eff = float(mean["steps"]["weight"])  # eq. 6
        # A reply has x − d_i, so that interpolating beyond the mean of replies takes τ_eff mean steps.
        x = {name: interpolate(x, mean["model"][name], tau_eff) for name, x in server_state["model"].items()}  # eq. 4
        return {**server_state, "model": x, "steps": mean["steps"]}

    def analysis(self, server_state: ServerState, client_ids: Sequence[str]) -> Mapping[str, float]:
        """Returns τ_eff of the last round, for plots."""
        return {"tau_eff": float(server_state["steps"]["weight"])}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received model x by τ_i steps; returns a reply with x − d_i, its mean step taken once, and ‖a_i‖₁."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        weight = sum_of_step_weights(fit_result.steps, self.momentum)  # ‖a_i‖₁, section 4.1
        x, trained = message.tensors["model"], reply.tensors["model"]
        parameters = {name for name, _ in net.module.named_parameters()}
        model = {n: interpolate(x[n], t, 1 / weight) if n in parameters else t for n, t in trained.items()}
        return Message({"model": model, "steps": {"weight": torch.tensor(weight)}}, reply.scalars), buffer_state
