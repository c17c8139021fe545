"""Provides the base class of methods in which all clients share one prototype (a mean or trained representation) for
each class: FedProto and FedTGP.
"""

from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.heads.class_means import (
    class_means_from_sums,
    class_means_spec,
    class_means_with_weights,
    count_outputs,
    find_replaceable_head,
)
from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.alignment.representations import compute_representations, representation_module_name
from polyfed.core.algorithm import Client, ClientInfo, Message
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers, restore_all_but_weights_and_set_eval
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.tasks.task import Loss
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars

EvaluatedClassifier = Literal["prototypes", "head"]
_NEVER_PREDICTED = -1e9
"""The output for a class of which there is no prototype: it is never predicted, and the loss stays finite."""


@dataclass(frozen=True, kw_only=True)
class PrototypeMethod(PersonalNetworkMethod, LocalTraining, ValidatesNetworks, ABC):
    """Trains each client's network, of any architecture, and pulls its representations towards one prototype (a vector)
    for each class, common to all clients.

    Each client minimises CE + λ/d·‖f(x) − p̄_y‖², the mean over a minibatch, f being the input of its last linear layer,
    of width d. An example of a class without a prototype adds nothing to the second term. After training, the client sends
    the mean of f over its training examples of each class, by the network that it ended with.

    Args:
        lam: λ ≥ 0, the weight of the distance to the prototypes (1, authors' code; the paper chooses it for each
            data set); 0 is Local with `evaluate="head"`.
        evaluate: "prototypes" predicts the class with the nearest global prototype (paper), "head" takes the network's own
            outputs. With "prototypes" the other is evaluated next to it, as `head_...`.
        buffers: "local" only (polyfed's choice), since networks stay with their clients.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"model", "classification", "one_representation"})
    discloses: ClassVar[frozenset[str]] = frozenset({"class_means"})
    lam: float = 1.0
    evaluate: EvaluatedClassifier = "prototypes"
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "lam")
        self._require(self.buffers == "local", "buffers", "'local', since networks stay with their clients")

    def dispatch(self, server_state: dict[str, Any], client_info: ClientInfo) -> Message:
        """Returns to every client the class prototypes, once there are some, and the learning rate."""
        tensors = {"prototypes": server_state["prototypes"]} if server_state["prototypes"] else {}
        return Message(tensors, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: dict[str, Any], message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of class means, of the classes and width of the prototypes."""
        return expected_class_means_spec(server_state["prototypes"], reply)

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless the network has a head (last layer) that prototypes can replace."""
        self.client_init(client, 0)

    def client_init(self, client: Client, seed: int) -> dict[str, Any]:
        """Returns the client's private state before round 1: a network drawn for its architecture from the run's seed.

        If prototypes are evaluated, it also checks that they can replace the network's head.
        """
        client_state = super().client_init(client, seed)
        if self.evaluate == "prototypes":
            find_replaceable_head(
                super().personal_model(Message(), client_state, client, seed), client, type(self).__name__
            )
        return client_state

    def local_update(
        self, message: Message, client_state: dict[str, Any], client: Client, seed: int
    ) -> tuple[Message, dict[str, Any]]:
        """Trains with representations pulled towards prototypes; replies with each class's mean.

        The training has `local_epochs`.
        """
        model = super().personal_model(message, client_state, client, seed)
        name, loss = representation_module_name(model, client.train), self._local_loss(message, client)
        loss_module = None if loss is None else name
        fit_result = fit(
            model,
            client,
            self,
            lr=message.scalars["lr"],
            seed=seed,
            loss=loss,
            representation=loss_module,
            reported_loss="task",
        )
        features = compute_representations(restore_all_but_weights_and_set_eval(model), client.train, module=name)
        weighted = bool(getattr(self, "weighted", False))
        sums_and_weights = class_means_with_weights(
            features, client.train.labels, count_outputs(model, client), weighted
        )
        return Message({"classes": sums_and_weights}, reply_scalars(client, fit_result.loss)), {
            "model": copy_trained_weights_and_buffers(model)
        }

    def _local_loss(self, message: Message, client: Client) -> Callable[[ForwardPass], Tensor] | None:
        """Builds the task's loss plus the distance to the prototypes; None if λ is 0 or no prototypes were received."""
        return build_prototype_loss(
            self.criterion(client), message.tensors.get("prototypes"), self.lam, client.train.device
        )

    def personal_model(self, message: Message, client_state: dict[str, Any], client: Client, seed: int) -> nn.Module:
        """Returns the network with the prototypes or its trained head as last layer, as `evaluate` says."""
        model = super().personal_model(message, client_state, client, seed)
        if self.evaluate == "head" or "prototypes" not in message.tensors:
            return model
        return overwrite_head_with_prototypes(
            model, find_replaceable_head(model, client, type(self).__name__), message.tensors["prototypes"]
        )

    def other_models(
        self, message: Message, client_state: dict[str, Any], client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the network with its trained head, if `personal_model` has prototypes."""
        if self.evaluate == "prototypes":
            yield "head", super().personal_model(message, client_state, client, seed)


def overwrite_head_with_prototypes(model: nn.Module, head: nn.Linear, prototypes: StateDict) -> nn.Module:
    """Replaces a network's last layer in place, so that it predicts the class of the nearest prototype.

    ‖f‖² − ‖f − p_c‖² = 2·p_c·f − ‖p_c‖² is linear in f, and its softmax is that of −‖f − p_c‖². So the network keeps its
    architecture and file format.

    Args:
        model: the network.
        head: its last layer, C outputs of d inputs.
        prototypes: `means` (C, d), and which are `present` (C,).

    >>> head = nn.Linear(1, 2)
    >>> places = {"means": torch.tensor([[1.0], [4.0]]), "present": torch.tensor([True, True])}
    >>> overwrite_head_with_prototypes(head, head, places)(torch.tensor([[1.0], [3.0]])).argmax(1)
    tensor([0, 1])
    """
    means, present = prototypes["means"], prototypes["present"]
    with torch.no_grad():
        head.weight.copy_(2 * means)
        head.bias.copy_(torch.where(present, -means.square().sum(1), _NEVER_PREDICTED))
    return model


def expected_class_means_spec(prototypes: StateDict, reply: Message) -> Mapping[str, StateDictSpec]:
    """Returns the shapes and dtypes of the prototypes, or of the reply's class means before there are some."""
    if not prototypes:
        return class_means_spec(reply, None)
    means_spec = state_dict_spec(prototypes)["means"]
    return class_means_spec(reply, {"classes": {"sums": means_spec, "weights": (means_spec[0][:1], means_spec[1])}})


def update_prototypes(prototypes: StateDict, mean: StateDict) -> dict[str, Tensor]:
    """Returns prototypes from the clients' class means; a class that no client has keeps its old one.

    p̄_c ← Σ_i w_ic p_ic / Σ_i w_ic over the clients that have class c.

    Args:
        prototypes: `means` (C, d), and which are `present` (C,); empty before the first.
        mean: the mean over clients of the tensors that `class_means_with_weights` returns.
    """
    means, present = class_means_from_sums(mean)
    if prototypes:
        means = torch.where(present[:, None], means, prototypes["means"])
        present = present | prototypes["present"]
    return {"means": means, "present": present}


def build_prototype_loss(
    label_loss: Loss, prototypes: StateDict | None, lam: float, device: torch.device
) -> Callable[[ForwardPass], Tensor] | None:
    """Returns a loss with the distance of representations from prototypes; None if `lam` is 0 or there are none.

    The loss of a minibatch is CE + λ/d·‖f(x) − p_y‖².

    A class without a prototype has no second term.

    >>> places = {"means": torch.tensor([[1.0, 3.0]]), "present": torch.tensor([True])}
    >>> loss = build_prototype_loss(nn.functional.cross_entropy, places, 2.0, torch.device("cpu"))
    >>> loss(ForwardPass(torch.zeros(1), torch.zeros(1, 1), torch.tensor([0]), torch.zeros(1, 2)))
    tensor(10.)
    """
    if lam == 0 or not prototypes:
        return None
    means, present = (prototypes[name].to(device) for name in ("means", "present"))

    def loss(batch: ForwardPass) -> Tensor:
        assert batch.representation is not None
        f, y = batch.representation.flatten(1).float(), batch.targets
        distances = (f - means[y]).square().mean(1) * present[y]
        return label_loss(batch.outputs, y) + lam * distances.mean()

    return loss
