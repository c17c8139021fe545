"""pFedMe: trains a personal model for each client near the global model, by Moreau envelopes (T Dinh, Tran and Nguyen,
NeurIPS 2020, algorithm 1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import (
    ClientState,
    EvaluatesGlobalModel,
    ServerState,
    build_reply_and_client_state,
    interpolate,
)
from polyfed.algorithms.base.parameters import assign_parameters, copy_trained_parameters_to_cpu
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import UserError
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, load_client_model, load_model_for_eval
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm


@final
@dataclass(frozen=True, kw_only=True)
class PFedMe(ServerUpdateMethod, EvaluatesGlobalModel):
    """Trains a personal model for each client that stays near the global model, and moves the global model towards the
    clients' personal models.

    Minimises mean_i F_i(w) over w, where F_i(w) = min_θ L_i(θ) + λ/2·‖θ − w‖² is the Moreau envelope of client i's
    loss. All clients have one architecture. All clients train in each round; those that are drawn are averaged.
    Evaluated model: θ_i, the client's last θ̃ (w for a client that never trained); next to it w, as `server_...`.

    Args:
        k: K, gradient steps towards each θ̃ (5, paper).
        lam: λ ≥ 0, the pull of θ̃ towards w (15, paper). With 0, w never changes.
        beta: β > 0 of the server's step w ← (1−β)w + β·mean (1, paper); above 1 it extrapolates. It acts on parameters
            only: buffers that are sent are averaged.
        personal_lr: learning rate of the K steps (0.09, authors' code: the command for their network on MNIST). It must be
            below 2/λ, or the steps diverge from w whatever the data.
        weighted: weighs clients by their number of training examples, as the authors' code; False counts every client the
            same (paper).
        buffers: "local" (polyfed's choice), as in every personalised method. All passes are at θ̃, and so are BatchNorm's
            statistics.

    The other fields are those of `LocalTraining`. `lr` is η; momentum, weight decay and the optimiser apply to the step of
    w; `clip_norm` bounds each gradient of the loss in the K steps.

    >>> PFedMe(lam=30.0, personal_lr=0.05).k
    5
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="pfedme",
        summary="Personal models near a global one, by Moreau envelopes",
        paper="T Dinh et al. 2020",
        evaluated="the personal model; also the global one",
        stacked=True,
    )

    traits: ClassVar[frozenset[str]] = frozenset({"everyone_trains"})
    clients_keep_trained_weights: ClassVar[bool] = True
    k: int = 5
    lam: float = 15.0
    beta: float = 1.0
    personal_lr: float = 0.09
    weighted: bool = False
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "k")
        self._at_least(0, "lam")
        self._positive("beta", "personal_lr")
        self._require(
            self.adapters != "svd" or self.beta == 1, "beta", "1 with adapters='svd', whose factors do not mix"
        )
        if self.personal_lr * self.lam >= 2:
            raise UserError(
                f"PFedMe: personal_lr must be below 2/lam = {2 / self.lam:.4g}, got {self.personal_lr!r} with lam "
                f"{self.lam!r}: the inner steps would diverge; lower one of them"
            )

    # -- server ---------------------------------------------------------------------------------------------------

    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Moves the global model by β towards the mean reply (algorithm 1, last line).

        w ← (1−β)w + β Σ_i w_i/S over the S clients of the round.
        """
        return {
            "model": {name: interpolate(w, mean["model"][name], self.beta) for name, w in server_state["model"].items()}
        }

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains a copy of the global model and the personal one; replies with the copy.

        The copy w_i takes steps w ← w − ηλ(w − θ̃), one per minibatch; the personal model is θ_i.
        """
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        parameters = [parameter for parameter in net.module.parameters() if parameter.requires_grad]
        # As in the authors' code, the K steps start from w at a round's first minibatch, and then from the last θ̃: so θ̃
        # depends only on the received w and the client's data, not on earlier rounds.
        theta = [parameter.detach().clone() for parameter in parameters]

        lr = message.scalars["lr"]
        envelope = PerClientTerm(self._envelope_gradient, theta)
        fit_result = fit(net.module, client, self, lr=lr, seed=seed, gradient=envelope)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        assign_parameters(parameters, theta)
        return reply, {**buffer_state, "model": copy_trained_parameters_to_cpu(net.module)}

    def _envelope_gradient(
        self, network: nn.Module, loss_of: Callable[[int], Tensor], theta: Sequence[Tensor]
    ) -> Tensor:
        """Trains the personal model, then writes the gradient that pulls the copy towards it.

        The personal model is θ̃ in `theta`, and the gradient λ(w − θ̃), that of the Moreau envelope.
        """
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        w = [parameter.detach().clone() for parameter in parameters]
        assign_parameters(parameters, theta)
        for _ in range(self.k):  # θ̃ ≈ argmin_θ L(θ; D) + λ/2·‖θ − w‖², all steps on the same minibatch D (eq. 7)
            loss = loss_of(0)
            with torch.no_grad():
                for parameter, anchor in zip(parameters, w, strict=True):
                    pull = self.lam * (parameter - anchor)
                    gradient = pull if parameter.grad is None else parameter.grad + pull
                    parameter.sub_(gradient, alpha=self.personal_lr)
        for parameter, anchor, theta_part in zip(parameters, w, theta, strict=True):
            theta_part.copy_(parameter.detach())
            parameter.grad = self.lam * (anchor - theta_part)  # the optimiser's step: w ← w − ηλ(w − θ̃)
        assign_parameters(parameters, w)
        return loss

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the personal model, with the global model's frozen parameters and sent buffers."""
        model = {**message.tensors["model"], **client_state.get("model", {})}
        return load_model_for_eval(client, model, client_state, self.buffers)
