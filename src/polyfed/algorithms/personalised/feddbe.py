"""FedDBE: FedAvg with a domain bias eliminator, a vector for each client that is added to its representations, and a penalty
that keeps their mean where all clients' is (Zhang, Hua, Cao, Wang, Song, Xue, Ma and Guan, NeurIPS 2023, "Eliminating Domain
Bias for Federated Learning in Representation Space", arXiv 2311.14975).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import (
    ClientState,
    EvaluatesGlobalModel,
    ServerState,
    build_reply_and_client_state,
)
from polyfed.algorithms.base.heads.last_layer import (
    NetworkWithShiftedRepresentation,
    find_last_layer,
    fit_with_extra_tensors,
    watch_last_layer,
)
from polyfed.alignment.representations import compute_representations
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.capabilities import ValidatesNetworks, WrapsNetwork
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, load_client_model, load_model_for_eval
from polyfed.core.nn.module_cache import restore_all_but_weights_and_set_eval
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.loop import FitResult, ForwardPass, fit


@final
@dataclass(frozen=True, kw_only=True)
class FedDBE(EvaluatesGlobalModel, ValidatesNetworks, WrapsNetwork):
    """Trains one global model by FedAvg, where each client adds a vector p_i of its own to its representations, and a
    penalty keeps their mean near that of all clients.

    With the body f and the head g, client i minimises ℓ(g(f(x) + p_i), y) + κ/(2d)·‖z̄_i − z̄‖², where z̄_i is the moving mean
    of its d-dimensional representations f(x), and z̄ all clients' mean. p_i stays with the client. All clients have one
    architecture. Evaluated model: the global model with p_i; next to it without, as `server_...`.

    f(x) is the input of the network's last linear layer (or of its `representation_module`). z̄ is found once: in round 1
    clients train as in FedAvg, and send their mean representations besides.

    Args:
        kappa: κ ≥ 0, strength of the penalty (0.5, polyfed's choice; the authors' code has 50). 0 leaves it out.
        mean_momentum: μ from 0 to 1: after each minibatch z̄_i ← (1 − μ)·z̄_i + μ·(mean of the minibatch), starting from 0 (1,
            authors' code). With 0 the penalty has no gradient.
        memory: trains p_i (True, paper); False leaves it at 0, which with κ = 0 is FedAvg, bit for bit.
        weighted: weighs clients in the global model and in z̄ by their number of training examples (True, authors' code).
        buffers: "local" (polyfed's choice), as in every personalised method.

    The other fields are those of `LocalTraining`. They apply to the global model; p_i makes plain steps with the same
    learning rate.

    >>> FedDBE(kappa=5.0).mean_momentum
    1.0
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="feddbe",
        summary="FedAvg; a vector of each client's own moves its features",
        paper="Zhang et al. 2023",
        evaluated="the average with the client's vector; also without",
    )

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "mean_representation"})
    groups: ClassVar[tuple[str, ...]] = ("model", "consensus")
    clients_keep_trained_weights: ClassVar[bool] = True
    kappa: float = 0.5
    mean_momentum: float = 1.0
    memory: bool = True
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "kappa")
        self._require(0 <= self.mean_momentum <= 1, "mean_momentum", "from 0 to 1")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: the initial global model, without the clients' mean representation."""
        return {**super().server_init(server), "consensus": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: the global model, the learning rate, and for training z̄, after round 1."""
        has_mean = server_state["consensus"] and client_info.purpose == "local"
        tensors = {group: server_state[group] for group in (self.groups if has_mean else ("model",))}
        return Message(tensors, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the form of a client's reply: that of the model, and before z̄ is known a mean of any width."""
        mean_spec: StateDictSpec = {"mean": ((None,), torch.float32)}
        spec = {"model": state_dict_spec(message.tensors["model"])}
        return spec if server_state["consensus"] else {**spec, "consensus": mean_spec}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False before z̄ is known, since only the clients can find out the width of representations."""
        return bool(server_state["consensus"])

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state: the mean model, and z̄ = Σ_i (n_i/n) z̄_i of the clients of round 1."""
        return {**server_state, "model": mean["model"], "consensus": server_state["consensus"] or mean["consensus"]}

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless the client's network has a module whose input can serve as the representation."""
        find_last_layer(client)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1: its vector p_i = 0."""
        return {"memory": {"vector": torch.zeros_like(find_last_layer(client)[1])}}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received model and p_i; replies with the model, in round 1 also its mean representation."""
        (name, _), lr, consensus = find_last_layer(client), message.scalars["lr"], message.tensors.get("consensus")
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        vector = client_state["memory"]["vector"].to(client.train.device, copy=True)
        if consensus is None or not (self.memory or self.kappa):
            fit_result = fit(net.module, client, self, lr=lr, seed=seed)
        else:
            fit_result = self._fit_with_vector(net.module, client, name, vector, consensus["mean"], lr, seed)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        state_after = {**buffer_state, "memory": {"vector": vector.cpu()}}
        if consensus is not None:
            return reply, state_after
        mean = compute_representations(net.module, client.train, module=name).mean(0)
        return Message({**reply.tensors, "consensus": {"mean": mean}}, reply.scalars), state_after

    def _fit_with_vector(
        self, module: nn.Module, client: Client, name: str, vector: Tensor, consensus: Tensor, lr: float, seed: int
    ) -> FitResult:
        """Trains the network and, in place, p_i."""
        task_loss, target, running_mean = self.criterion(client), consensus.to(vector), [torch.zeros_like(vector)]

        def loss(batch: ForwardPass) -> Tensor:
            mean = (1 - self.mean_momentum) * running_mean[0] + self.mean_momentum * representations[-1].mean(0)
            running_mean[0] = mean.detach()
            return task_loss(batch.outputs, batch.targets) + self.kappa / 2 * (mean - target).square().mean()

        with watch_last_layer(module, name, (lambda z: z + vector) if self.memory else None) as representations:
            trained_vectors = [vector] if self.memory else []
            return fit_with_extra_tensors(module, client, self, trained_vectors, lr=lr, seed=seed, loss=loss)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: the global model, with p_i added to its representations."""
        network = load_model_for_eval(client, message.tensors["model"], client_state, self.buffers)
        name, vector = find_last_layer(client)[0], client_state["memory"]["vector"]
        shifted = NetworkWithShiftedRepresentation(restore_all_but_weights_and_set_eval(network), name, vector)
        return shifted.to(client.train.device).eval()

    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Returns the client's network with a vector added to its representations; the caller loads the weights of both."""
        return NetworkWithShiftedRepresentation(network, weights["name"], weights["vector"])
