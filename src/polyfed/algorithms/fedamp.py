"""FedAMP: each client is pulled to a mixture of the others, in which those near to it count more (Huang, Chu, Zhou, Wang,
Liu, Pei and Zhang, AAAI 2021, algorithm 1)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from polyfed.algorithms.own_network import KeepsNetwork
from polyfed.algorithms.penalties import Pull
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.buffers import Policy, shared_tensors
from polyfed.core.gathered import OfClient
from polyfed.core.scratch import initial_state, scratch, whole_state
from polyfed.core.training import LocalTraining, fit, scalars_of
from polyfed.core.tree import Spec, Tree, spec, weighted_mean

ServerState = dict[str, Any]
ClientState = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class FedAMP(KeepsNetwork, LocalTraining, Algorithm[ServerState, ClientState]):
    """min over w_1..w_N of Σ_i L_i(w_i) + λ·Σ_{i<j} A(‖w_i − w_j‖²), with A(x) = 1 − e^(−x/σ). The server takes
    a gradient step on A, from which each client gets u_i = ξ_ii·w_i + Σ_j ξ_ij·w_j with ξ_ij = α·A'(‖w_i − w_j‖²), so
    that the near attract more than the far; the client then minimises L_i(w) + λ/(2α)·‖w − u_i‖², from its own w_i. One
    architecture. Evaluated model: w_i. λ = 0 is training alone, bit for bit.

    Models that nobody has trained yet are left out of the mixture.

    Args:
        lam: λ ≥ 0 (1, polyfed's choice). With `alpha` none it is the strength of the pull itself, the paper's λ/α.
        sigma: σ > 0, the squared distance beyond which models hardly attract each other; None is a quarter of the mean
            squared distance of the client's model to the others, in each round anew (polyfed's choice: the right number
            depends on the network, and on how far training has come).
        alpha: α > 0, the step on A. None takes for each client the one with ξ_ii = 1/N, the share that it has in a plain
            mean (polyfed's choice; in the paper it is a number that may fall over the rounds).
        buffers: "local" only (polyfed's choice): models are mixed by parameters alone, each with the client's own
            buffers.

    The other fields are those of `LocalTraining`.

    >>> FedAMP(lam=0.5).sigma is None
    True
    """

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture"})
    lam: float = 1.0
    sigma: float | None = None
    alpha: float | None = None
    buffers: Policy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.lam < math.inf, "lam", "at least 0")
        self._require(self.sigma is None or 0 < self.sigma < math.inf, "sigma", "positive, or none")
        self._require(self.alpha is None or 0 < self.alpha < math.inf, "alpha", "positive, or none")
        self._require(self.buffers == "local", "buffers", "'local', since models are mixed by parameters alone")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """The common draw, and a place for everyone's model."""
        assert server.model is not None  # `requires` names "one_architecture"
        draw = shared_tensors(initial_state(server.model, server.seed), scratch(server.model).buffers, self.buffers)
        return {"model": draw, "models": {who.id: {} for who in sorted(server.clients, key=lambda who: who.id)}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """u_i, and λ/α, by which it pulls; nothing to evaluate, since a client has its own model."""
        if client_info.purpose == "personal":
            return Message()
        lr = {"lr": self.lr_at(client_info.round, client_info.rounds)}
        mine = server_state["models"].get(client_info.id) or server_state["model"]
        distances = {j: _distance(mine, w) for j, w in server_state["models"].items() if j != client_info.id and w}
        if not any(distances.values()):  # nobody else has trained, or all are where this client is
            return Message({}, lr)
        sigma = self.sigma or sum(distances.values()) / len(distances) / 4
        slopes = {j: math.exp(-x / sigma) / sigma for j, x in distances.items()}  # A'(‖w_i − w_j‖²)
        total = sum(slopes.values())
        if total < 1e-300:
            return Message({}, lr)  # all are too far away to attract at all
        alpha = self.alpha or (1 - 1 / len(server_state["models"])) / total
        pull = self.lam if self.alpha is None else self.lam / self.alpha
        xi = {j: alpha * slope for j, slope in slopes.items()}
        return Message({"cloud": _mixture(mine, server_state["models"], xi)}, {**lr, "pull": pull})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, Spec]:
        """The client's parameters."""
        return {"model": spec(server_state["model"])}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """The last model of each client; nothing is averaged."""
        new = {i: dict(reply.tensors["model"]) for i, reply in replies.items()}
        return {**server_state, "models": {i: new.get(i, model) for i, model in server_state["models"].items()}}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """w_i ← argmin L_i(w) + λ/(2α)·‖w − u_i‖², by local training from w_i."""
        module = self.personal_model(message, client_state, client, seed)
        cloud, pull = message.tensors.get("cloud", {}), None
        if cloud and message.scalars["pull"]:
            trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            u = [cloud[name].to(p.device) for name, p in trained]
            pull = OfClient(_pull, [u[0].new_tensor(message.scalars["pull"]), *u])
        found = fit(module, client, self, lr=message.scalars["lr"], seed=seed, penalty=pull)
        model = whole_state(module)
        assert client.model is not None
        sent = shared_tensors(whole_state(module), scratch(client.model, client.train.device).buffers, self.buffers)
        return Message({"model": sent}, scalars_of(client, found.loss)), {"model": model}


def _pull(weights: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """s/2·‖w − u‖²; the tensors are s, which differs between clients, and u."""
    return tensors[0] * Pull(1.0)(weights, tensors[1:])


def _distance(one: Tree, other: Tree) -> float:
    """‖w_i − w_j‖²: squared, as A takes it."""
    return sum(float((w - other[name]).double().square().sum()) for name, w in one.items())


def _mixture(mine: Tree, models: Mapping[str, Tree], xi: Mapping[str, float]) -> Tree:
    """w_i + Σ_j ξ_ij (w_j − w_i), so that ξ_ii = 1 − Σ_j ξ_ij."""
    total = sum(xi.values())
    if not total:
        return mine
    mean = weighted_mean({j: models[j] for j in xi}, xi)
    return {name: (w.double() + total * (mean[name].double() - w.double())).to(w.dtype) for name, w in mine.items()}
