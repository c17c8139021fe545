"""IFCA: the server keeps k models, and each client trains the one that fits its data best (Ghosh, Chung, Yin and
Ramchandran, NeurIPS 2020, algorithm 1 with model averaging).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import extract_sent_tensors_and_client_state, load_client_model
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDictSpec, state_dict_spec, weighted_mean
from polyfed.core.training.loop import fit, reply_scalars

_MODEL_PREFIX = "model/"  # prefix of the group of a cluster's model, followed by its number


@final
@dataclass(frozen=True, kw_only=True)
class IFCA(Averaging):
    """Groups clients into k clusters: the server sends k models, and each client trains the model that has the lowest
    loss on its training examples.

    Each model becomes the mean over the clients that trained it. All clients have one architecture. With k = 1 it is
    FedAvg, bit for bit. Evaluated model: the one with the least loss on the client's training examples at that time.

    Args:
        k: number of models (2, polyfed's choice). The first starts from the common initial weights, the others from their
            own: with the same start they would stay the same model.
        weighted: weighs clients by their number of training examples; False counts every client the same (paper).

    The other fields are those of `LocalTraining`. `buffers` is "average" only: each model is sent with its own statistics. A
    round costs k models down and one up, and each client evaluates all k models on its training examples.

    >>> IFCA(k=3).weighted
    False
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="ifca",
        summary="k models; each client trains the one that suits it best",
        paper="Ghosh et al. 2020",
        evaluated="the one that suits it best",
        stacked=True,
    )

    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "choice"})
    k: int = 2
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "k")
        self._require(self.adapters is None, "adapters", "none: k models are averaged")
        self._require(self.buffers == "average", "buffers", "'average', since each model has its own statistics")
        if self.k == 1:  # there is nothing to choose
            object.__setattr__(self, "discloses", self.discloses - {"choice"})

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: k models, each initialised with a different seed."""
        assert server.model is not None  # `requires` names "one_architecture"
        seeds = [server.seed, *(derive_seed(server.seed, "cluster", j) for j in range(1, self.k))]
        return {f"{_MODEL_PREFIX}{j}": initial_state(server.model, seed) for j, seed in enumerate(seeds)}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: all k models, and the learning rate of the round."""
        return Message(dict(server_state), {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of one of the k models.

        Raises:
            ValueError: the reply does not hold exactly one model.
        """
        if len(model_groups := [group for group in reply.tensors if group in server_state]) != 1:
            raise ValueError(
                f"it holds {len(model_groups)} of the {self.k} models; a client sends the one that it trained"
            )
        return {model_groups[0]: state_dict_spec(server_state[model_groups[0]])}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Averages each model over the clients that trained it; one that nobody trained is unchanged."""
        new_state = dict(server_state)
        for group in server_state:
            members = {i: reply for i, reply in replies.items() if group in reply.tensors}
            if members:
                weights = {i: reply.scalars["num_examples"] for i, reply in members.items()} if self.weighted else None
                new_state[group] = weighted_mean({i: reply.tensors[group] for i, reply in members.items()}, weights)
        return new_state

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains for `local_epochs` the model of the lowest loss on the client's examples; replies with it."""
        group = self._group_of_least_loss(message, client)
        net = load_client_model(client, message.tensors[group], client_state, self.buffers)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        model, _ = extract_sent_tensors_and_client_state(net, self)
        return Message({group: model}, reply_scalars(client, fit_result.loss)), {}

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the one of the k models that has the lowest loss on the client's training examples."""
        return load_client_model(
            client, message.tensors[self._group_of_least_loss(message, client)], client_state, self.buffers
        ).module

    def _group_of_least_loss(self, message: Message, client: Client) -> str:
        """Returns the model of least loss on the client's training examples, argmin_j L_i(θ_j).

        If losses are equal, the first counts.
        """
        groups = [f"{_MODEL_PREFIX}{j}" for j in range(self.k)]
        if self.k == 1:
            return groups[0]
        criterion, labels, losses = self.criterion(client), client.train.labels, {}
        for group in groups:
            outputs = predict(load_client_model(client, message.tensors[group], {}, self.buffers).module, client.train)
            with torch.no_grad():
                losses[group] = float(criterion(outputs.to(labels.device), labels))
        return min(groups, key=losses.__getitem__)
