"""FD, federated distillation: each client learns from the other clients' mean outputs per class (Jeong et al. 2018,
"Communication-Efficient On-Device Machine Learning", algorithm 1, without its data augmentation).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.base.heads.class_means import (
    AveragesClassMeans,
    ClassMeans,
    class_means_from_sums,
    class_means_spec,
    class_means_with_weights,
)
from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers, restore_all_but_weights_and_set_eval
from polyfed.core.state_dict import StateDict, StateDictSpec, clone_tensors, state_dict_spec
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars

# The server keeps "classes", the last round's mean of the replies, and "who" replied
# A client keeps "model", W_i and buffers, and "classes", the class sums that it sent last


@final
@dataclass(frozen=True, kw_only=True)
class FD(PersonalNetworkMethod, AveragesClassMeans):
    """Trains each client's network to match, for each class, the mean output of the other clients' networks for their
    examples of this class.

    Client i minimises CE + γ·CE(F̂_y, softmax(z)), where z are its network's outputs, y the label, and F̂_y the mean
    over the *other* clients of their mean softmax for class y. With γ = 0 it is Local, bit for bit. Evaluated model:
    W_i, the client's own network.

    The server sends the mean over all clients of the last round, from which a client that was one of them removes its own
    part. The means are computed with the network after training; algorithm 1 collects them during training. For a class that
    no other client has, the second term is 0.

    Args:
        gamma: γ ≥ 0, the weight of the distillation (1.0, public implementations; the paper does not state it).
        outputs: the averaged outputs: "probabilities", the softmax, with cross-entropy as the distance (paper), or "logits"
            with half the mean squared difference.
        weighted: False only (paper): every client's mean counts the same.
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> FD(gamma=0.1).groups
    ('classes',)
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fd",
        summary="Clients share their mean output for each class",
        paper="Jeong et al. 2018",
        evaluated="its own",
        published=frozenset({"classes"}),
    )

    requires: ClassVar[frozenset[str]] = frozenset({"model", "classification"})
    discloses: ClassVar[frozenset[str]] = frozenset({"class_means"})
    groups: ClassVar[tuple[str, ...]] = ("classes",)
    gamma: float = 1.0
    outputs: Literal["probabilities", "logits"] = "probabilities"
    weighted: bool = False
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "gamma")
        self._require(not self.weighted, "weighted", "false: a client takes its own part out of a plain mean")
        self._require(self.buffers == "local", "buffers", "'local', since networks stay with their clients")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, without mean outputs of the classes."""
        return {"classes": {}, "who": []}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the clients' mean output for each class, how many clients, and whether this is one."""
        scalars = {"lr": self.lr_at(client_info.round, client_info.rounds)}
        if not server_state["classes"] or client_info.purpose == "personal":
            return Message({}, scalars)
        membership = {
            "members": float(len(server_state["who"])),
            "included": float(client_info.id in server_state["who"]),
        }
        return Message({"others": server_state["classes"]}, scalars | membership)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of a reply: sums of outputs and their weights, a row per class."""
        return class_means_spec(
            reply, {"classes": state_dict_spec(server_state["classes"])} if server_state["classes"] else None
        )

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False in round 1, when the server does not know the number of classes yet; True later."""
        return bool(server_state["classes"])

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state: the mean output of the clients for each class, and the ids of these clients."""
        return {"classes": mean["classes"], "who": list(client_ids)}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's network for `local_epochs` (algorithm 1); replies with its mean output by class."""
        model = self.personal_model(message, client_state, client, seed)
        fit_result = fit(
            model,
            client,
            self,
            lr=message.scalars["lr"],
            seed=seed,
            loss=self._distillation_loss(message, client_state, client),
            reported_loss="task",
        )
        outputs = predict(restore_all_but_weights_and_set_eval(model), client.train)
        values = outputs.softmax(1) if self.outputs == "probabilities" else outputs
        class_sums_i = class_means_with_weights(values, client.train.labels, outputs.shape[1])
        scalars = reply_scalars(client, fit_result.loss)
        class_sums_copy = clone_tensors(class_sums_i)
        return Message({"classes": class_sums_i}, scalars), {
            "model": copy_trained_weights_and_buffers(model),
            "classes": class_sums_copy,
        }

    def _distillation_loss(
        self, message: Message, client_state: ClientState, client: Client
    ) -> Callable[[ForwardPass], Tensor] | None:
        """Adds the distance to the others' mean outputs F̂ to the loss; None if γ is 0 or there are none."""
        if self.gamma == 0 or "others" not in message.tensors:
            return None
        targets, present = (tensor.to(client.train.device) for tensor in class_means_of_others(message, client_state))
        label_loss = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            z, y = batch.outputs.float(), batch.targets
            if self.outputs == "probabilities":
                distance = F.cross_entropy(z, targets[y], reduction="none")
            else:
                distance = 0.5 * (z - targets[y]).square().mean(1)
            return label_loss(batch.outputs, y) + self.gamma * (distance * present[y]).mean()

        return loss


def class_means_of_others(message: Message, client_state: ClientState) -> ClassMeans:
    """Returns the other clients' mean output by class, and which classes they have.

    F̂_c = (Σ_j F_jc − F_ic)/(m_c − 1), where m_c is the number of clients that have class c, this one included.

    >>> import torch
    >>> mean = {"sums": torch.tensor([[2.0], [0.5]]), "weights": torch.tensor([1.0, 0.5])}
    >>> mine = {"sums": torch.tensor([[1.0], [1.0]]), "weights": torch.tensor([1.0, 1.0])}
    >>> class_means_of_others(Message({"others": mean}, {"members": 2.0, "included": 1.0}), {"classes": mine})
    ClassMeans(means=tensor([[3.],
            [0.]]), is_present=tensor([ True, False]))
    """
    sums_of_others = {name: tensor * message.scalars["members"] for name, tensor in message.tensors["others"].items()}
    if message.scalars["included"]:
        sums_of_others = {name: tensor - client_state["classes"][name] for name, tensor in sums_of_others.items()}
    return class_means_from_sums({"sums": sums_of_others["sums"], "weights": sums_of_others["weights"].round()})
