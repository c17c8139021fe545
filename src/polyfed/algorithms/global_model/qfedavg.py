"""q-FedAvg: clients with a larger loss weigh more in the server's step (Li, Sanjabi, Beirami and Smith, ICLR 2020,
algorithm 2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState, build_reply_and_client_state
from polyfed.algorithms.global_model.received_loss import loss_of_received_model
from polyfed.core.algorithm import Client, ClientInfo, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.loop import fit

_LEAST_LOSS = 1e-10  # authors' code; F^(q−1) of a loss of zero would be infinite


@final
@dataclass(frozen=True, kw_only=True)
class QFedAvg(Averaging):
    """Trains one global model that minimises Σ_i F_i(θ)^(q+1)/(q+1): the larger q, the more count the clients whose loss
    F_i is large, and the more alike the clients' losses become.

    Client i trains the received θ to θ_i as in FedAvg. With Δθ_i = L(θ − θ_i), Δ_i = F_i(θ)^q·Δθ_i and
    h_i = q·F_i(θ)^(q−1)·‖Δθ_i‖² + L·F_i(θ)^q the server sets θ ← θ − Σ_i Δ_i/Σ_i h_i. Clients send Δ_i/L and h_i/L. With
    q = 0 it is FedAvg, up to rounding. One architecture. Evaluated model: θ.

    Args:
        q: q ≥ 0 (1, paper, for the synthetic data and Sent140; it takes 0.001 to 5, depending on the data).
        lipschitz: L > 0, the estimate of the loss's curvature; None takes 1/lr of the round (paper, authors' code).
        weighted: weighs Δ_i and h_i by the number of training examples; False counts every client the same (paper, which
            draws clients with such probabilities instead).
        adapters: None only (polyfed's choice), since Δ_i has the form of one architecture.
        robust: None only (polyfed's choice), since the step is the ratio of two sums.

    The other fields are those of `LocalTraining`; the paper has plain SGD.

    >>> QFedAvg(q=-1)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: QFedAvg: q must be at least 0, got -1
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="qfedavg",
        summary="FedAvg in which clients with a larger loss weigh more",
        paper="Li et al. 2020",
        evaluated="the average",
        stacked=True,
    )

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "received_loss"})
    groups: ClassVar[tuple[str, ...]] = ("delta", "model", "step")
    _differences: ClassVar[frozenset[str]] = frozenset({"delta"})
    q: float = 1.0
    lipschitz: float | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "q")
        self._positive("lipschitz")
        self._require(self.adapters is None, "adapters", "none: updates have the form of one architecture")
        self._require(self.robust is None, "robust", "none: the step is the ratio of two sums")

    # -- server ---------------------------------------------------------------------------------------------------

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client, the same for every client: the global model θ and the learning rate."""
        return Message({"model": server_state["model"]}, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of the global model's parameters and buffers, and one number."""
        model = state_dict_spec(message.tensors["model"])
        buffers = {name for name in reply.tensors.get("model", {}) if name not in reply.tensors.get("delta", {})}
        return {
            "delta": {name: form for name, form in model.items() if name not in buffers},
            "model": {name: form for name, form in model.items() if name in buffers},
            "step": {"h": ((), torch.float64)},
        }

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state: θ ← θ − Σ_i Δ_i/Σ_i h_i (algorithm 2, line 6), and the mean of the buffers."""
        theta, h = server_state["model"], mean["step"]["h"]
        stepped = {n: (theta[n].double() - delta.double() / h).to(theta[n].dtype) for n, delta in mean["delta"].items()}
        return {**server_state, "model": {**theta, **stepped, **mean["model"]}}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains θ to θ_i; replies with Δ_i/L and h_i/L (algorithm 2, lines 4 and 5)."""
        theta, lr = message.tensors["model"], message.scalars["lr"]
        net = load_client_model(client, theta, client_state, self.buffers)
        loss = torch.tensor(loss_of_received_model(net.module, client, self), dtype=torch.float64).clamp(
            min=_LEAST_LOSS
        )
        fit_result = fit(net.module, client, self, lr=lr, seed=seed)
        reply, state_after = build_reply_and_client_state(net, client, fit_result.loss, self)
        trained = reply.tensors["model"]
        change = {n: theta[n].double() - trained[n].double() for n in trained if n not in net.buffers}  # Δθ_i/L
        norm_square = math.fsum(float(tensor.square().sum()) for tensor in change.values())
        curvature, weight = (1 / lr if self.lipschitz is None else self.lipschitz), loss**self.q
        h = self.q * loss ** (self.q - 1) * curvature * norm_square + weight
        tensors = {
            "delta": {n: (weight * tensor).to(theta[n].dtype) for n, tensor in change.items()},
            "model": {n: trained[n] for n in trained if n in net.buffers},
            "step": {"h": h},
        }
        return Message(tensors, reply.scalars), state_after
