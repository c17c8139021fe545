"""FedBN: FedAvg in which norm layers stay with the client (Li et al., ICLR 2021, algorithm 1)."""

import warnings
from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.core.algorithm import Client, Message, ServerContext
from polyfed.core.capabilities import ValidatesNetworks
from polyfed.core.errors import UserError
from polyfed.core.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, extract_update, load_client_model, prepare_for_eval, shared_tensors
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.models.structure import norm_tensor_names, split_body_and_head


@final
@dataclass(frozen=True, kw_only=True)
class FedBN(Averaging, ValidatesNetworks):
    """FedAvg of everything but norm layers: their parameters and statistics never leave the client. Norm layers are found
    by type (batch, instance, layer, group and RMS norms), wherever they are. One architecture. Evaluated model: the average
    with the client's own norm layers; a client that never took part has the initial norm parameters, and statistics
    estimated on its training data.

    A network without norm layers gets a warning: then this is FedAvg with `buffers="local"`.

    Args:
        weighted: by the number of training examples (polyfed's choice, as in FedAvg; the paper's algorithm 1 has the
            plain mean).
        norms: names of the modules that are norm layers, instead of a search by type (polyfed's choice); those of a
            user's own class, say.
        buffers: "local" only (paper), since statistics of norm layers stay with the client.

    The other fields are those of `LocalTraining`.

    >>> FedBN(lr=0.05).buffers
    'local'
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedbn",
        summary="FedAvg; norm layers stay with the client",
        paper="Li et al. 2021",
        evaluated="the average with the client's norm layers",
        leaderboard={"cifar10": {}},
        stacked=True,
    )

    weighted: bool = True
    norms: tuple[str, ...] | None = None
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffers != "local":
            raise UserError(f"FedBN: buffers must be 'local', since norm layers stay local, got {self.buffers!r}; "
                            "to average them, take fedavg")  # fmt: skip
        if self.norms is not None:
            listed = isinstance(self.norms, tuple | list) and all(isinstance(name, str) for name in self.norms)
            self._require(listed, "norms", "a list of module names, or none")
            object.__setattr__(self, "norms", tuple(self.norms))  # a list, where it comes from a file

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """The initial θ without norm layers."""
        assert server.model is not None  # `requires` names "one_architecture"
        net = cached_module(server.model)
        norms = frozenset(self._find_norm_tensors(net.module))
        if not norms:
            warnings.warn("FedBN: the network has no norm layer, so only buffers stay local: this is FedAvg with "
                          "buffers='local'", RuntimeWarning, stacklevel=2)  # fmt: skip
        theta = shared_tensors(initial_state(server.model, server.seed), net.buffers, self.buffers)
        return {"model": {name: tensor for name, tensor in theta.items() if name not in norms}}

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """As the client's first state does."""
        self.client_init(client, 0)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """The norm layers' parameters of the common draw."""
        assert client.model is not None
        initial_weights, net = initial_state(client.model, seed), cached_module(client.model)
        norms = {name: initial_weights[name] for name in self._find_norm_tensors(net.module) if name in initial_weights}
        return {"norms": shared_tensors(norms, net.buffers, self.buffers)}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """θ_i: θ with the client's own norm layers after `local_epochs`; all of it is trained."""
        net = self._load_with_own_norms(message, client_state, client)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        theta, buffer_state = extract_update(net, self)
        model = {name: tensor for name, tensor in theta.items() if name not in client_state["norms"]}
        norms = {name: theta[name] for name in client_state["norms"]}
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), {"norms": norms, **buffer_state}

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """θ with the client's own norm layers."""
        return prepare_for_eval(
            self._load_with_own_norms(message, client_state, client), client, client_state, self.buffers
        )

    def _find_norm_tensors(self, module: nn.Module) -> tuple[str, ...]:
        return norm_tensor_names(module) if self.norms is None else split_body_and_head(module, self.norms)[1]

    def _load_with_own_norms(self, message: Message, client_state: ClientState, client: Client) -> CachedModule:
        return load_client_model(
            client, {**message.tensors["model"], **client_state["norms"]}, client_state, self.buffers
        )
