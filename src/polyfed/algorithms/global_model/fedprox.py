"""FedProx: FedAvg with a proximal term in the local loss (Li et al., MLSys 2020, eq. 2)."""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import AveragedOver, ClientState, GlobalModelMethod, build_reply
from polyfed.algorithms.base.regularizers import ProximalTerm, clone_trained_parameters
from polyfed.core.algorithm import Client, Message
from polyfed.core.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm


@final
@dataclass(frozen=True, kw_only=True)
class FedProx(GlobalModelMethod):
    """FedAvg with a proximal term: each client minimises L_i(θ) + μ/2·‖θ − θ̄‖², θ̄ being the model it received. The norm is
    over parameters, not over buffers. μ = 0 is FedAvg, bit for bit. Evaluated model: the average θ.

    Args:
        weighted: by the number of training examples (polyfed's choice: as FedAvg; the paper draws clients with such
            probabilities instead); False counts every client the same.
        final: which mean is the result: "cohort", that of the last round's clients (paper), or "all", that of all clients'
            latest models, for which the server keeps each of them (see `GlobalModelMethod`).
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

    weighted: bool = True
    final: AveragedOver = "cohort"
    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "mu")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """θ_i: an approximate minimiser of L_i(θ) + μ/2·‖θ − θ̄‖², started at θ̄ (eq. 2)."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        proximal_term = PerClientTerm(ProximalTerm(self.mu), clone_trained_parameters(net.module))
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed, penalty=proximal_term)
        return build_reply(net, client, fit_result.loss, self)
