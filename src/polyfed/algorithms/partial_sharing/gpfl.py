"""GPFL: clients share a body, embeddings of the classes and a network that conditions representations on them; each keeps a
head of its own (Zhang, Hua, Wang, Song, Xue, Ma, Cao and Guan, ICCV 2023, "GPFL: Simultaneously Learning Global and
Personalized Feature Information for Personalized Federated Learning", arXiv 2308.10279).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.base.heads.body_and_head import BodyAndHeadMethod
from polyfed.algorithms.base.heads.class_means import count_outputs
from polyfed.algorithms.base.heads.conditioning import condition_of, draw_conditioning_tensors
from polyfed.algorithms.base.heads.last_layer import (
    NetworkWithConditionedRepresentation,
    find_last_layer,
    fit_with_extra_tensors,
    watch_last_layer,
)
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.capabilities import WrapsNetwork
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.module_cache import cached_module, restore_all_but_weights_and_set_eval
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.loop import ForwardPass, reply_scalars
from polyfed.models.structure import find_representation_module


@final
@dataclass(frozen=True, kw_only=True)
class GPFL(BodyAndHeadMethod, WrapsNetwork):
    """Trains a shared body whose representations are conditioned in two ways, on all classes alike and on the client's own
    shares of them; a head of the client's own classifies the second.

    With the body f, embeddings e_c of the classes and a network V(z, c) = relu((1 + γ(c))·z + β(c)), client i minimises
    CE(h_i(V(f(x), p_i)), y) + CE(cos(V(f(x), g), e), y) + λ‖V(f(x), g) − ē_y‖ + μ/2·‖e, γ, β‖². g is the mean of the
    received embeddings ē, and p_i their mean weighted by the client's shares of the classes. The server averages f, e, γ and
    β; h_i, the last layer, stays. All clients have one architecture. Evaluated model: h_i(V(f(x), p_i)).

    Args:
        lam: λ ≥ 0, of the distance from the class's embedding (0.01, authors' code), whose norm is over a minibatch.
        mu: μ ≥ 0, weight decay of e, γ and β (0.1, authors' code).
        weighted: weighs clients by their number of training examples (True, paper, algorithm 1).

    The other fields are those of `LocalTraining`. They apply to body and head; e, γ and β make plain steps with the same
    learning rate.

    >>> GPFL(lam=0.1).mu
    0.1
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="gpfl",
        summary="Class embeddings tell common features from a client's own",
        paper="Zhang et al. 2023",
        evaluated="the body with the client's condition and head",
    )

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "classification"})
    groups: ClassVar[tuple[str, ...]] = ("model", "conditional")
    lam: float = 0.01
    mu: float = 0.1
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "lam", "mu")

    def _find_head_modules(self, module: nn.Module, example: Tensor) -> tuple[str, ...]:
        return (find_representation_module(module, example),)

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: the initial network; clients draw e, γ and β, all the same."""
        return {**super().server_init(server), "conditional": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: body, e, γ and β; in round 1 the whole initial network alone."""
        message, conditional = super().dispatch(server_state, client_info), server_state["conditional"]
        return Message({**message.tensors, **({"conditional": conditional} if conditional else {})}, message.scalars)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the form of a client's reply: that of the body, and of e, γ and β, in round 1 of any width."""
        conditional = server_state["conditional"] or reply.tensors.get("conditional")
        if not conditional:
            raise ValueError(f"the reply holds the groups {sorted(reply.tensors)}; expected 'conditional' among them")
        return {**super().reply_spec(server_state, message, reply), "conditional": state_dict_spec(conditional)}

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state: the clients' mean body, e, γ and β."""
        return {**super().server_step(server_state, mean, client_ids), "conditional": mean["conditional"]}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1: its head, and the first e, γ and β, the same for all."""
        assert client.model is not None
        outputs = count_outputs(cached_module(client.model, client.train.device).module, client)
        z = find_last_layer(client)[1]
        first = {n: t.to(z.dtype) for n, t in draw_conditioning_tensors(outputs, len(z), seed).items()}
        return {**super().client_init(client, seed), "first": first}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains body, head, e, γ and β on all terms of the loss; returns a reply without the head, and the new state."""
        name, task_loss, lr = find_last_layer(client)[0], self.criterion(client), message.scalars["lr"]
        received = self._received(message, client_state, client)
        shared = {n: t.clone() for n, t in received.items()}
        generic, personal = self._contexts(received["embeddings"], client)
        net = self._load_with_local_part(message, client_state, client)

        def loss(batch: ForwardPass) -> Tensor:
            common = condition_of(shared, generic).apply(representations[-1])
            cosines = F.linear(F.normalize(common), F.normalize(shared["embeddings"]))  # eq. 8
            distance = (common - received["embeddings"][batch.targets]).norm()  # eq. 9
            decay = torch.stack([tensor.square().sum() for tensor in shared.values()]).sum()
            guidance = F.cross_entropy(cosines, batch.targets) + self.lam * distance
            total: Tensor = task_loss(batch.outputs, batch.targets) + guidance + self.mu / 2 * decay  # eqs. 10, 11
            return total

        with watch_last_layer(net.module, name, lambda z: condition_of(shared, personal).apply(z)) as representations:
            fit_result = fit_with_extra_tensors(
                net.module, client, self, list(shared.values()), lr=lr, seed=seed, loss=loss
            )
        model, head, buffer_state = self._split_trained(net, client_state)
        groups = {"model": model, "conditional": {n: t.cpu() for n, t in shared.items()}}
        state_after = {"head": head, "trained": True, "first": client_state["first"], **buffer_state}
        return Message(groups, reply_scalars(client, fit_result.loss)), state_after

    def _received(self, message: Message, client_state: ClientState, client: Client) -> dict[str, Tensor]:
        tensors = message.tensors.get("conditional", client_state["first"])
        return {name: tensor.to(client.train.device) for name, tensor in tensors.items()}

    def _contexts(self, embeddings: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        """Returns g, the mean embedding (eq. 5), and p_i, that weighted by class shares (eqs. 6 and 7).

        p_i is without the division by the number of classes.
        """
        counts = torch.bincount(client.train.labels, minlength=len(embeddings)).to(embeddings)
        return embeddings.mean(0), counts / counts.sum() @ embeddings

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: the body, conditioned on p_i, with the client's head."""
        network = restore_all_but_weights_and_set_eval(super().personal_model(message, client_state, client, seed))
        shared = self._received(message, client_state, client)
        condition = condition_of(shared, self._contexts(shared["embeddings"], client)[1])
        conditioned = NetworkWithConditionedRepresentation(network, find_last_layer(client)[0], *condition)
        return conditioned.to(client.train.device).eval()

    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Returns the client's network with conditioned representations; the caller loads the weights of both."""
        return NetworkWithConditionedRepresentation(network, weights["name"], weights["scale"], weights["shift"])
