"""FedTGP: the server trains class prototypes so that classes stay apart (Zhang, Liu, Hua and Cao, AAAI 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.algorithms.base.heads.class_means import (
    class_means_as_examples,
    class_means_from_sums,
    train_network_on_class_means,
)
from polyfed.algorithms.prototypes.prototype_method import EvaluatedClassifier, PrototypeMethod
from polyfed.core.algorithm import Algorithm, Message, ServerContext
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import first_leaf
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.module_cache import build_module, fill_module
from polyfed.core.seeds import derive_seed
from polyfed.core.training.loop import ForwardPass

ServerState = dict[str, Any]  # "generator"; "prototypes": `means`, `present`; "seed" of the run; "round"
ClientState = dict[str, Any]  # "model": W_i and buffers


@final
@dataclass(frozen=True, kw_only=True)
class FedTGP(PrototypeMethod, Algorithm[ServerState, ClientState]):
    """Trains each client's network, of any architecture, and pulls its representations towards class prototypes,
    vectors that the server trains to be far apart.

    Clients minimise CE + λ/d·‖f(x) − p̂_y‖², and send p_ic, the mean of f over their examples of class c. The server
    does not average: it trains p̂_c = F(p̊_c), two layers on a trained vector, so that each p_ic is nearer to p̂_c than
    to the others, by a margin δ. λ = 0 is Local, bit for bit, as far as training goes. Evaluated model: the class of
    the nearest prototype; next to it W_i with its own head, as `head_...`.

    A class that no client has sent so far has no prototype, whatever F returns.

    Args:
        lam: λ ≥ 0, the weight of the distance to the prototypes (1.0, authors' code; the paper has 0.1 with the distance
            itself instead of its square).
        evaluate: "prototypes" predicts the class with the nearest global prototype (paper), "head" takes the network's own
            outputs.
        margin: τ, the largest margin δ (100.0, paper); δ is the largest distance between two classes' means, if that
            is less.
        hidden: width of the hidden layer; None is the representation's (None, authors' code).
        server_epochs: passes over the class means in a round (100, paper; the authors' code has 1,000).
        server_lr: learning rate of F and p̊, by SGD (0.01, paper: η of all training).
        server_batch_size: class means in a step (10, authors' code: as at the clients).
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> FedTGP(margin=10).margin
    10
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedtgp",
        summary="FedProto with prototypes that the server trains",
        paper="Zhang et al. 2024",
        evaluated="nearest prototype; also its own head",
    )

    lam: float = 1.0
    evaluate: EvaluatedClassifier = "prototypes"
    margin: float = 100.0
    hidden: int | None = None
    server_epochs: int = 100
    server_lr: float = 0.01
    server_batch_size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "margin")
        self._at_least(1, "hidden", "server_epochs")
        self._positive("server_lr")
        self._require(self.server_batch_size >= 0, "server_batch_size", "at least 1, or 0 for all class means")

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without class prototypes, whose shape the first replies tell."""
        return {"generator": {}, "prototypes": {}, "seed": server.seed, "round": 0}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Trains the class prototypes on the class means of all clients (eq. 10), and returns the new server state."""
        means, round_number = class_means_as_examples(replies), server_state["round"] + 1
        if not len(means):
            return {**server_state, "round": round_number}
        classes, width = next(iter(replies.values())).tensors["classes"]["sums"].shape
        factory = partial(TrainablePrototypes, classes, width, self.hidden or width)
        model = build_module(factory, derive_seed(server_state["seed"], "prototypes"))
        assert isinstance(model, TrainablePrototypes)
        if server_state["generator"]:
            fill_module(model, server_state["generator"])
        delta = min(largest_distance_between_classes(means, classes), self.margin)

        def loss(batch: ForwardPass) -> Tensor:
            """Returns the loss that pulls class means to their prototype by a margin (eq. 10).

            It is −log of e^−(d(p, p̂_c) + δ) over its sum with e^−d(p, p̂_c') of the other classes.
            """
            return F.cross_entropy(batch.outputs - delta * F.one_hot(batch.targets, classes), batch.targets)

        seed = derive_seed(server_state["seed"], round_number, "server")
        generator_state = train_network_on_class_means(
            model, means, self.server_epochs, self.server_batch_size, lr=self.server_lr, seed=seed, loss=loss
        )
        present = torch.zeros(classes, dtype=torch.bool).index_fill_(0, means.y, True)
        if server_state["prototypes"]:
            present = present | server_state["prototypes"]["present"]
        prototypes = {"means": model.compute_prototypes().detach(), "present": present}
        return {**server_state, "generator": generator_state, "prototypes": prototypes, "round": round_number}


@final
class TrainablePrototypes(nn.Module):
    """Holds a trainable vector for each class, and computes inputs' negative distances to them.

    The prototype of class c is p̂_c = F(p̊_c), F being two layers and p̊_c a trained vector.

    >>> net = TrainablePrototypes(3, 2, 5)
    >>> net.compute_prototypes().shape, net(torch.zeros(4, 2)).shape
    (torch.Size([3, 2]), torch.Size([4, 3]))
    """

    def __init__(self, classes: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, width))
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def compute_prototypes(self) -> Tensor:
        """Returns the prototypes of all classes, shape (classes, width)."""
        vectors: Tensor = self.mlp(self.embedding)
        return vectors

    def forward(self, representations: Tensor) -> Tensor:
        """Returns the negative distance of each representation to each class's prototype, shape (batch, classes)."""
        return -torch.cdist(representations, self.compute_prototypes(), compute_mode="donot_use_mm_for_euclid_dist")


def largest_distance_between_classes(means: Examples, num_classes: int) -> float:
    """Returns the largest distance between the mean representations of any two classes; 0 if there is only one class.

    Q_c is the plain mean of the clients' means of class c (eq. 9).

    >>> largest_distance_between_classes(Examples(torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1])), 3)
    3.0
    """
    x = first_leaf(means.x)
    sums = torch.zeros(num_classes, x.shape[1]).index_add_(0, means.y, x)
    counts = torch.bincount(means.y, minlength=num_classes).float()
    centres, present = class_means_from_sums({"sums": sums, "weights": counts})
    return float(torch.cdist(centres[present], centres[present], compute_mode="donot_use_mm_for_euclid_dist").max())
