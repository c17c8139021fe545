"""FedDyn: a regulariser that changes from round to round aligns the optima of the clients' losses with the global one
(Acar, Zhao, Matas Navarro, Mattina, Whatmough and Saligrama, ICLR 2021, algorithm 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from polyfed.algorithms.base.averaging import ClientState, ServerState, build_reply_and_client_state
from polyfed.algorithms.base.regularizers import ProximalTerm, clone_trained_parameters, linear_loss_term
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import Client, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm


@final
@dataclass(frozen=True, kw_only=True)
class FedDyn(ServerUpdateMethod):
    """Trains one global model, with a regulariser at each client that makes the optimum of the client's loss agree with
    the optimum for all clients together.

    Client i minimises L_i(θ) − ⟨g_i, θ⟩ + α/2·‖θ − θ̄‖² (eq. 1), where θ̄ is the received model.

    g_i is the gradient of L_i where the client's last training ended, so that at a fixed point of the rounds the
    gradients of all clients add up to zero. All clients have one architecture. Evaluated model: θ, the server's.

    The server steps beyond the mean: with all clients in round 1, θ ← 2·mean − θ for any α.

    Args:
        alpha: α > 0 (0.01, paper, which chooses among 0.1, 0.01 and 0.001).
        weighted: False only (paper): the server's h is the plain mean of the g_i.

    The other fields are those of `LocalTraining`. Buffers that are sent are only averaged.

    >>> FedDyn(alpha=0.1).weighted
    False
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="feddyn",
        summary="A regulariser makes the clients' optima agree with all's",
        paper="Acar et al. 2021",
        evaluated="the server's model",
        stacked=True,
    )

    alpha: float = 0.01
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("alpha")
        self._require(not self.weighted, "weighted", "false: the server's h is the plain mean over clients")
        self._require(self.adapters is None, "adapters", "none: what clients keep has the form of one architecture")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial global model θ, and the correction h = 0, which is stored as h/α."""
        state = super().server_init(server)
        zeros = {name: torch.zeros_like(theta) for name, theta in state["model"].items()}
        return {**state, "h": zeros, "clients": len(server.clients)}

    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Updates the correction h, and sets the model to the mean minus h/α (algorithm 1).

        h ← h − α/m·Σ_{i∈P} (θ_i − θ) over all m clients, and θ ← mean of θ_i − h/α.
        """
        share, theta, h = len(client_ids) / server_state["clients"], {}, {}
        for name, old_theta in server_state["model"].items():
            mean_theta = mean["model"][name].to(torch.float64)
            new_h = server_state["h"][name].to(torch.float64) - share * (mean_theta - old_theta)
            h[name], theta[name] = new_h.to(old_theta.dtype), (mean_theta - new_h).to(old_theta.dtype)
        return {**server_state, "model": theta, "h": h}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1: a stored gradient of zero, represented by an empty dict."""
        return {"gradient": {}}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains with the dynamic regulariser (eq. 1); replies with the model, keeps the gradient.

        g_i ← g_i − α(θ_i − θ̄).

        g_i is the gradient of L_i at a minimum of eq. (1).
        """
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        parameters = {name: theta for name, theta in net.module.named_parameters() if theta.requires_grad}
        g = client_state["gradient"] or {
            name: torch.zeros_like(theta, device="cpu") for name, theta in parameters.items()
        }
        anchors = clone_trained_parameters(net.module)
        regularizer = PerClientTerm(
            _DynamicRegularizer(self.alpha),
            [*anchors, *(g[name].to(theta.device) for name, theta in parameters.items())],
        )
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed, penalty=regularizer)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        change = {name: reply.tensors["model"][name] - message.tensors["model"][name] for name in parameters}
        return reply, {**buffer_state, "gradient": {name: g[name] - self.alpha * change[name] for name in parameters}}


@final
@dataclass(frozen=True)
class _DynamicRegularizer:
    """Computes the dynamic regulariser α/2·‖θ − θ̄‖² − ⟨g, θ⟩; its tensors are those of θ̄, followed by those of g."""

    alpha: float

    def __call__(self, weights: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        anchors, g = tensors[: len(weights)], tensors[len(weights) :]
        return ProximalTerm(self.alpha)(weights, anchors) - linear_loss_term(weights, g)
