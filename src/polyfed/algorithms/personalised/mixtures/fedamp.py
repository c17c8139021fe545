"""FedAMP: pulls each client's model towards a mixture of the other clients' models, in which similar models weigh more
(Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, AAAI 2021, algorithm 1).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.algorithms.base.regularizers import ProximalTerm
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.capabilities import KeepsServerStateByClient
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, tensors_to_send
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers, initial_state
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec, weighted_mean
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.core.vectorized.deferred_calls import PerClientTerm

ServerState = dict[str, Any]
ClientState = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class FedAMP(KeepsServerStateByClient, PersonalNetworkMethod, LocalTraining, Algorithm[ServerState, ClientState]):
    """Trains a personal model for each client, pulled towards a mixture of all clients' models in which similar models
    weigh more.

    Minimises Σ_i L_i(w_i) + λ·Σ_{i<j} A(‖w_i − w_j‖²) over w_1..w_N, with A(x) = 1 − e^(−x/σ). The server takes a
    gradient step on A, from which each client gets u_i = ξ_ii·w_i + Σ_j ξ_ij·w_j with ξ_ij = α·A'(‖w_i − w_j‖²), so
    that near models attract more than far ones. The client then minimises L_i(w) + λ/(2α)·‖w − u_i‖², starting from its
    own w_i. All clients have one architecture. Evaluated model: w_i. With λ = 0 it is training alone, bit for bit.

    Models of clients that have not trained yet are left out of the mixture.

    Args:
        lam: λ ≥ 0 (1, polyfed's choice). If `alpha` is none it is the strength of the pull itself, the paper's λ/α.
        sigma: σ > 0, the squared distance beyond which models hardly attract each other; None takes a quarter of the mean
            squared distance of the client's model to the others, in each round (polyfed's choice: a good value depends on
            the network and on the progress of training).
        alpha: α > 0, the step on A. None takes for each client the step with ξ_ii = 1/N, its share in a plain mean
            (polyfed's choice; in the paper it is a number that may decrease over the rounds).
        buffers: "local" only (polyfed's choice): models are mixed by parameters alone, each with the client's own
            buffers.

    The other fields are those of `LocalTraining`.

    >>> FedAMP(lam=0.5).sigma is None
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedamp",
        summary="Each client is pulled to the models most like its own",
        paper="Huang et al. 2021",
        evaluated="its own",
        published=frozenset({"model"}),
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture"})
    lam: float = 1.0
    sigma: float | None = None
    alpha: float | None = None
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.lam < math.inf, "lam", "at least 0")
        self._require(self.sigma is None or 0 < self.sigma < math.inf, "sigma", "positive, or none")
        self._require(self.alpha is None or 0 < self.alpha < math.inf, "alpha", "positive, or none")
        self._require(self.buffers == "local", "buffers", "'local', since models are mixed by parameters alone")

    # -- server ---------------------------------------------------------------------------------------------------

    @property
    def groups_by_client(self) -> frozenset[str]:
        """Names the group of the server state that has one entry per client: the client's newest model."""
        return frozenset({"models"})

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the common initial weights, and an empty entry for each client's model."""
        assert server.model is not None  # `requires` names "one_architecture"
        draw = tensors_to_send(
            initial_state(server.model, server.seed), cached_module(server.model).buffers, self.buffers
        )
        return {
            "model": draw,
            "models": {
                client_info.id: {} for client_info in sorted(server.clients, key=lambda client_info: client_info.id)
            },
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the mixture that pulls the client's model, and the strength; empty for evaluation."""
        if client_info.purpose == "personal":
            return Message()
        lr = {"lr": self.lr_at(client_info.round, client_info.rounds)}
        w_i = server_state["models"].get(client_info.id) or server_state["model"]
        distances = {
            j: _squared_distance(w_i, w) for j, w in server_state["models"].items() if j != client_info.id and w
        }
        if not any(distances.values()):  # no other client has trained, or all models are equal
            return Message({}, lr)
        sigma = self.sigma or sum(distances.values()) / len(distances) / 4
        attractions = {j: math.exp(-x / sigma) / sigma for j, x in distances.items()}  # A'(‖w_i − w_j‖²)
        total = sum(attractions.values())
        if total < 1e-300:
            return Message({}, lr)  # all are too far away to attract
        alpha = self.alpha or (1 - 1 / len(server_state["models"])) / total
        pull_strength = self.lam if self.alpha is None else self.lam / self.alpha
        xi = {j: alpha * slope for j, slope in attractions.items()}
        return Message({"cloud": _mix_models(w_i, server_state["models"], xi)}, {**lr, "pull": pull_strength})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes that a client's reply must have: those of the network's parameters."""
        return {"model": state_dict_spec(server_state["model"])}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Stores the newest model of each client that replied, without averaging, and returns the new server state."""
        new_models = {i: dict(reply.tensors["model"]) for i, reply in replies.items()}
        return {**server_state, "models": server_state["models"] | new_models}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the personal model with a penalty on its distance from the mixture; replies with it.

        The objective is L_i(w) + λ/(2α)·‖w − u_i‖², starting from the client's own w_i.
        """
        module = self.personal_model(message, client_state, client, seed)
        cloud, penalty = message.tensors.get("cloud", {}), None
        if cloud and message.scalars["pull"]:
            trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            u = [cloud[name].to(p.device) for name, p in trained]
            penalty = PerClientTerm(_weighted_proximal_term, [u[0].new_tensor(message.scalars["pull"]), *u])
        fit_result = fit(module, client, self, lr=message.scalars["lr"], seed=seed, penalty=penalty)
        model = copy_trained_weights_and_buffers(module)
        assert client.model is not None
        sent = tensors_to_send(
            copy_trained_weights_and_buffers(module),
            cached_module(client.model, client.train.device).buffers,
            self.buffers,
        )
        return Message({"model": sent}, reply_scalars(client, fit_result.loss)), {"model": model}


def _weighted_proximal_term(weights: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Computes the penalty s/2·‖w − u‖² towards the mixture u; `tensors` are the strength s, then u."""
    return tensors[0] * ProximalTerm(1.0)(weights, tensors[1:])


def _squared_distance(w_i: StateDict, w_j: StateDict) -> float:
    """Computes the squared Euclidean distance of two models, ‖w_i − w_j‖²."""
    return sum(float((w - w_j[name]).double().square().sum()) for name, w in w_i.items())


def _mix_models(w_i: StateDict, models: Mapping[str, StateDict], xi: Mapping[str, float]) -> StateDict:
    """Mixes models by the weights `xi`: w_i + Σ_j ξ_ij (w_j − w_i), so that ξ_ii = 1 − Σ_j ξ_ij."""
    total = sum(xi.values())
    if not total:
        return w_i
    mean = weighted_mean({j: models[j] for j in xi}, xi)
    return {name: (w.double() + total * (mean[name].double() - w.double())).to(w.dtype) for name, w in w_i.items()}
