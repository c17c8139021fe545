"""FedProx: adds a proximal term to the local loss of FedAvg (Li et al., MLSys 2020, eq. 2)."""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import AveragedOver, ClientState, GlobalModelMethod, build_reply_and_client_state
from polyfed.algorithms.base.regularizers import ProximalTerm, clone_trained_parameters
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm


@final
@dataclass(frozen=True, kw_only=True)
class FedProx(GlobalModelMethod):
    """Trains one global model by FedAvg, with a penalty in the local loss on each client's distance from the received
    model.

    Client i minimises L_i(θ) + μ/2·‖θ − θ̄‖², where θ̄ is the received model; the server averages as FedAvg.

    The norm is over parameters, not over buffers. With μ = 0 it is FedAvg, bit for bit. Evaluated model: the average
    θ.

    Args:
        weighted: weighs clients by their number of training examples (polyfed's choice: as FedAvg; the paper draws clients
            with such probabilities instead); False counts every client the same.
        averaged_over: the clients over which the result is averaged: "cohort", those of the last round (paper), or
            "all", with their latest models, which the server then stores (see `GlobalModelMethod`).
        mu: μ ≥ 0 (0.01, polyfed's choice; the paper chooses among 0.001, 0.01, 0.1 and 1).

    The other fields are those of `LocalTraining`.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedprox",
        summary="FedAvg with a proximal term in the local loss",
        paper="Li et al. 2020",
        evaluated="the average",
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    weighted: bool = True
    averaged_over: AveragedOver = "cohort"
    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "mu")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received model with a penalty on the distance from it (eq. 2); replies with the result."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        proximal_term = PerClientTerm(ProximalTerm(self.mu), clone_trained_parameters(net.module))
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed, penalty=proximal_term)
        return build_reply_and_client_state(net, client, fit_result.loss, self)
