"""Fed-RoD: a generic model that is trained against the imbalance of classes, and on top of it a head for each client (Chen
and Chao, ICLR 2022, "On Bridging Generic and Personalized Federated Learning for Image Classification", arXiv 2107.00778).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.base.averaging import ClientState, EvaluatesGlobalModel, build_reply_and_client_state
from polyfed.algorithms.base.heads.class_means import count_outputs
from polyfed.algorithms.base.heads.last_layer import (
    NetworkWithAddedHead,
    find_last_layer,
    fit_with_extra_tensors,
    watch_last_layer,
)
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.capabilities import ValidatesNetworks, WrapsNetwork
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, load_client_model, load_model_for_eval
from polyfed.core.nn.module_cache import cached_module, restore_all_but_weights_and_set_eval
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import ForwardPass


@final
@dataclass(frozen=True, kw_only=True)
class FedRoD(EvaluatesGlobalModel, ValidatesNetworks, WrapsNetwork):
    """Trains one generic model, with a loss that makes up for each client's imbalance of classes, and a personal head for
    each client, whose outputs are added to the generic ones.

    With the body f and the generic head g, client i predicts g(f(x)) + h_i(f(x)). The balanced softmax loss trains f and g,
    which the server averages; the client's ordinary loss trains h_i on top of both, which do not feel it. All clients
    have one architecture. Evaluated model: the sum; next to it the generic model, as `server_...`.

    f(x) is the input of the network's last linear layer (or of its `representation_module`). h_i is linear and starts at
    zero, so that a client that never took part has the generic model.

    Args:
        gamma: γ ≥ 0, the exponent of a client's number of examples of a class in the balanced softmax (1, polyfed's choice:
            the balanced softmax as it is). With 0 the generic model is FedAvg's, bit for bit.
        weighted: weighs clients by their number of training examples (True, polyfed's choice: as FedAvg).
        buffers: "local" (polyfed's choice), as in every personalised method.

    The other fields are those of `LocalTraining`. They apply to the generic model; h_i makes plain steps with the same
    learning rate. `label_smoothing` must be 0, since a class that a client lacks has the probability 0.

    >>> FedRoD(gamma=0.5).weighted
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedrod",
        summary="A class-balanced global model, plus a head for each client",
        paper="Chen and Chao 2022",
        evaluated="both heads' sum; also the generic model",
    )

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "classification"})
    clients_keep_trained_weights: ClassVar[bool] = True
    gamma: float = 1.0
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "gamma")
        self._require(self.label_smoothing == 0, "label_smoothing", "0, since an absent class has the probability 0")

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless the client's network has a module whose input can serve as the representation."""
        find_last_layer(client)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1: its personal head h_i = 0."""
        assert client.model is not None
        outputs = count_outputs(cached_module(client.model, client.train.device).module, client)
        z = find_last_layer(client)[1]
        return {"personal": {"weight": z.new_zeros(outputs, len(z)), "bias": z.new_zeros(outputs)}}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the generic model by the balanced softmax loss, the personal head by that of both heads' sum.

        The reply is the generic model.
        """
        (name, _), task_loss, lr = find_last_layer(client), self.criterion(client), message.scalars["lr"]
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        h = {n: t.to(client.train.device, copy=True) for n, t in client_state["personal"].items()}
        counts = torch.bincount(client.train.labels, minlength=len(h["bias"])).to(h["bias"])
        log_prior = counts.pow(self.gamma).log()  # γ·log n_c; −∞ for a class that is absent

        def loss(batch: ForwardPass) -> Tensor:
            balanced = task_loss(batch.outputs + log_prior, batch.targets)  # −log n_y^γ e^(g_y) / Σ_c n_c^γ e^(g_c)
            own_outputs = F.linear(representations[-1].detach(), h["weight"], h["bias"])
            return balanced + task_loss(batch.outputs.detach() + own_outputs, batch.targets)

        with watch_last_layer(net.module, name) as representations:
            fit_result = fit_with_extra_tensors(net.module, client, self, list(h.values()), lr=lr, seed=seed, loss=loss)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        return reply, {**buffer_state, "personal": {n: t.cpu() for n, t in h.items()}}

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: the generic model with the outputs of h_i added."""
        generic = load_model_for_eval(client, message.tensors["model"], client_state, self.buffers)
        h = {n: t.to(client.train.device) for n, t in client_state["personal"].items()}
        network = NetworkWithAddedHead(restore_all_but_weights_and_set_eval(generic), find_last_layer(client)[0], **h)
        return network.to(client.train.device).eval()

    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Returns the client's network with a further head; the caller loads the weights of both."""
        return NetworkWithAddedHead(network, weights["name"], weights["weight"], weights["bias"])
