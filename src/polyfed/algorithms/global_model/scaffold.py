"""SCAFFOLD: control variates correct the drift of clients' local training steps (Karimireddy, Kale, Mohri, Reddi, Stich
and Suresh, ICML 2020, algorithm 1, option II).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from polyfed.algorithms.base.averaging import ClientState, ServerState, build_reply_and_client_state, interpolate
from polyfed.algorithms.base.regularizers import linear_loss_term
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm

_PLAIN_SGD_REASON = "since c_i is read off the way of plain SGD"


@final
@dataclass(frozen=True, kw_only=True)
class Scaffold(ServerUpdateMethod):
    """Trains one global model, with correction terms (control variates) in each local step, so that clients with
    different data do not drift apart.

    A local step is y ← y − η(g_i(y) − c_i + c), where g_i(y) is the gradient of client i.

    c_i estimates the gradient of client i, and c that of all clients. All clients have one architecture. Evaluated
    model: x, the server's.

    c_i is computed from the total change of K steps, (x − y)/(Kη), which is their mean gradient for **plain SGD only**:
    momentum, other optimisers, clipping, warm-up within a round and learning rates by name are refused. K counts steps, not
    epochs.

    Args:
        server_lr: η_g > 0 of the server's step (1, paper). It applies to parameters only: buffers that are sent are
            averaged.
        weighted: False only (paper): Σ_i c_i = N·c holds only if every client counts the same.

    The other fields are those of `LocalTraining`; `weight_decay` is part of the loss, and of c_i.

    >>> Scaffold(momentum=0.9)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: Scaffold: momentum must be 0, since c_i is read off the way of plain SGD, got 0.9
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="scaffold",
        summary="Control variates correct the drift of local steps",
        paper="Karimireddy et al. 2020",
        evaluated="the average",
        small={"momentum": 0.0, "clip_norm": None},
        published=frozenset({"variate"}),  # c_i is sent in round 1; later the server can add it up
        leaderboard={"*": {"optimizer": "sgd", "momentum": 0.0, "lr": 0.2}},  # plain SGD
        stacked=True,
    )

    groups: ClassVar[tuple[str, ...]] = ("model", "variate")
    server_lr: float = 1.0
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("server_lr")
        self._require(not self.weighted, "weighted", "false: clients count the same in the mean of control variates")
        self._require(self.adapters is None, "adapters", "none: control variates have the form of one architecture")
        self._require(self.optimizer.lower() == "sgd", "optimizer", f"'sgd', {_PLAIN_SGD_REASON}")
        for field in ("momentum", "warmup_steps"):
            self._require(getattr(self, field) == 0, field, f"0, {_PLAIN_SGD_REASON}")
        for field in ("optimizer_options", "clip_norm", "lr_by_name"):
            self._require(getattr(self, field) is None, field, f"none, {_PLAIN_SGD_REASON}")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial global model x, and the server's control variate (correction term) c = 0."""
        state = super().server_init(server)
        return {
            **state,
            "variate": {name: torch.zeros_like(x) for name, x in state["model"].items()},
            "clients": len(server.clients),
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the global model x and, for training, the server's control variate (correction term) c."""
        message = super().dispatch(server_state, client_info)
        variate = {} if client_info.purpose == "personal" else {"variate": server_state["variate"]}
        return Message({**message.tensors, **variate}, message.scalars)

    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Updates model x and control variate c by mean changes (algorithm 1, lines 16 and 17).

        x ← x + η_g/|S| Σ_{i∈S} (y_i − x) and c ← c + 1/N Σ_{i∈S} (c_i⁺ − c_i).
        """
        share = len(client_ids) / server_state["clients"]
        x = {name: interpolate(x, mean["model"][name], self.server_lr) for name, x in server_state["model"].items()}
        # A reply has c_i⁺ − c_i + c, so that interpolating from c to the mean adds the mean of c_i⁺ − c_i.
        c = {name: interpolate(c, mean["variate"][name], share) for name, c in server_state["variate"].items()}
        return {**server_state, "model": x, "variate": c}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns a control variate (correction term) of zero, represented by an empty dict."""
        return {"variate": {}}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains by steps that control variates correct, and updates the client's (lines 10 and 12).

        The K steps are y ← y − η(g_i(y) − c_i + c).

        Option II: c_i⁺ = c_i − c + (x − y)/(Kη).
        """
        net, lr = load_client_model(client, message.tensors["model"], client_state, self.buffers), message.scalars["lr"]
        x, c = message.tensors["model"], message.tensors["variate"]
        c_i = client_state["variate"] or {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        trained = [(name, p) for name, p in net.module.named_parameters() if p.requires_grad]
        # Its gradient: −c_i + c.
        correction = PerClientTerm(linear_loss_term, [(c[name] - c_i[name]).to(p.device) for name, p in trained])
        fit_result = fit(net.module, client, self, lr=lr, seed=seed, penalty=correction)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        mean_gradient = {name: (x[name] - reply.tensors["model"][name]) / (fit_result.steps * lr) for name in c}
        new_c_i = {name: c_i[name] - c[name] + mean_gradient[name] for name in c}
        # (x − y)/(Kη) = c_i⁺ − c_i + c is sent: it has the shapes of c, and differs little from c late in training.
        return Message({**reply.tensors, "variate": mean_gradient}, reply.scalars), {**buffer_state, "variate": new_c_i}
