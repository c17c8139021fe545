"""FedL2G: a vector for each class guides the clients' networks, and is trained so that following it lowers their loss on
examples that they held out (Zhang et al. 2024, "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
Learning").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.base.heads.class_means import AveragesClassMeans, class_means_from_sums, count_outputs
from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.algorithms.prototypes.guiding_vectors import (
    compute_guiding_gradient,
    draw_first_vectors,
    guided_loss,
    minibatch_of_two_or_more,
    repeat_single_example,
    split_study_and_quiz,
)
from polyfed.algorithms.prototypes.prototype_method import expected_class_means_spec
from polyfed.alignment.representations import compute_representations, representation_module_name
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.examples.groups import draw_rows_of_whole_groups
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.seeds import derive_seed, temporary_rng_seed, torch_generator
from polyfed.core.state_dict import StateDict, StateDictSpec
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars
from polyfed.models.structure import check_not_compiled

# The server keeps "guides": V, empty before the first replies; and "seed" of the run
# A client keeps "model", W_i and buffers; "quiz", the rows of the examples that it does not train on; "seed" of the run


@final
@dataclass(frozen=True, kw_only=True)
class FedL2G(PersonalNetworkMethod, AveragesClassMeans, ValidatesNetworks):
    """Trains each client's network, of any architecture, so that its outputs (or representations) follow a vector for each
    class. The server trains these vectors to lower the losses that clients then have on held-out examples.

    A client minimises CE + ‖z(x) − v_y‖²/d, the mean over a minibatch of its study examples; z are the network's outputs
    (FedL2G-l) or the input of its last linear layer (FedL2G-f), of length d. Then it tries one such step from its trained
    weights, W' = W − η∇(CE + ‖z − v_y‖²/d) on a minibatch, and sends the gradient of the loss of W' on its quiz examples,
    which it never trains on, with respect to v. The server makes a step against the mean of these gradients for each class
    over the clients that have it in that minibatch. Evaluated model: W_i, the client's own network.

    In round 1 the server sends no vectors, since it learns their form from the first replies: all clients draw the same
    ones from the run's seed, and so does the server.

    Args:
        guide: "logits" is FedL2G-l, for networks with the classes of all clients ("logits", polyfed's choice: it needs no
            common width), "features" is FedL2G-f, for networks whose last layers take inputs of one width.
        server_lr: learning rate of the vectors; None is 0.1 with logits and 100 with features (None, authors' code).
        guide_rounds: rounds at the beginning in which the vectors alone are trained, and no network (0, polyfed's
            choice; the authors' code has 50, of 2000).
        quiz_size: examples that a client holds out, at most half (10, authors' code: one minibatch); whole groups, if the
            examples have groups.
        weighted: weighs clients in the mean by their number of examples; False counts every client the same (False, authors'
            code).
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> sorted(FedL2G(guide="features").requires)
    ['classification', 'model', 'one_representation']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedl2g",
        summary="Learns a vector for each class that guides local training",
        paper="Zhang et al. 2024",
        evaluated="its own",
        small={"guide_rounds": 0, "quiz_size": 4},
    )

    requires: ClassVar[frozenset[str]] = frozenset({"model", "classification"})
    discloses: ClassVar[frozenset[str]] = frozenset({"guidance"})
    groups: ClassVar[tuple[str, ...]] = ("classes",)
    guide: Literal["logits", "features"] = "logits"
    server_lr: float | None = None
    guide_rounds: int = 0
    quiz_size: int = 10
    weighted: bool = False
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "guide_rounds")
        self._at_least(1, "quiz_size")
        if self.server_lr is not None:
            self._positive("server_lr")
        self._require(self.buffers == "local", "buffers", "'local', since networks stay with their clients")
        if self.guide == "features":
            object.__setattr__(self, "requires", self.requires | {"one_representation"})

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without guiding vectors, whose shape the first replies tell."""
        return {"guides": {}, "seed": server.seed}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns to every client the guiding vectors, once there are some, the learning rate, and the phase.

        The phase says whether networks are trained in this round.
        """
        if client_info.purpose == "personal":
            return Message()
        scalars = {"lr": self.lr_at(client_info.round, client_info.rounds),
                   "trains": float(client_info.round > self.guide_rounds)}  # fmt: skip
        return Message({"guides": server_state["guides"]} if server_state["guides"] else {}, scalars)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes that a client's reply must have: a gradient for each guiding vector."""
        guides = server_state["guides"]
        return expected_class_means_spec({"means": guides["vectors"]} if guides else {}, reply)

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False in round 1, when the server does not know the shape of the guiding vectors yet; True later."""
        return bool(server_state["guides"])

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state, after one step of the guiding vectors against the mean of their gradients.

        v_c ← v_c − η_S · (mean of ∇_{v_c} over the clients with class c); the vector of a class that none has stays.
        """
        gradients, _ = class_means_from_sums(mean["classes"])
        guides = server_state["guides"] or {
            "vectors": draw_first_vectors(gradients.shape[0], gradients.shape[1], server_state["seed"])
        }
        rate = self.server_lr or (0.1 if self.guide == "logits" else 100.0)
        return {**server_state, "guides": {"vectors": guides["vectors"] - rate * gradients}}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's network, drawn from the run's seed, and the rows of its quiz examples."""
        size = max(1, min(self.quiz_size, len(client.train) // 2))
        quiz_rows = draw_rows_of_whole_groups(client.train, size, derive_seed(seed, client.id, "quiz"))
        return {**super().client_init(client, seed), "quiz": quiz_rows, "seed": seed}

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless gradients of guiding vectors pass through the network on a few examples."""
        few = replace(client, train=client.train.head(4))
        client_state = self.client_init(few, 0)
        check_not_compiled(self.load_personal_network(client_state, few))
        self.local_update(Message({}, {"lr": 0.0, "trains": 0.0}), client_state, few, 0)

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the network on study examples; replies with the gradient of the quiz loss for each vector."""
        model = self.load_personal_network(client_state, client)
        lr = message.scalars["lr"]
        label_loss = self.criterion(client)
        study, quiz = split_study_and_quiz(client.train, client_state["quiz"])
        name = representation_module_name(model, client.train) if self.guide == "features" else None
        classes = count_outputs(model, client)
        width = classes if name is None else compute_representations(model, client.train.head(), module=name).shape[1]
        first = {"vectors": draw_first_vectors(classes, width, client_state["seed"])}
        vectors = message.tensors.get("guides", first)["vectors"].to(client.train.device)

        def loss(batch: ForwardPass) -> Tensor:
            z, y = batch.outputs if batch.representation is None else batch.representation, batch.targets
            return guided_loss(label_loss, batch.outputs, z, y, vectors)

        scalars: dict[str, float] = {"num_examples": len(study)}
        if message.scalars["trains"]:
            fit_result = fit(model, replace(client, train=repeat_single_example(study)), self, lr=lr, seed=seed, loss=loss,
                             representation=name, reported_loss="task")  # fmt: skip
            scalars = reply_scalars(replace(client, train=study), fit_result.loss)
        trained = copy_trained_weights_and_buffers(model)
        rows = torch.randperm(len(study), generator=torch_generator(derive_seed(seed, "study")))[
            : self.batch_size or None
        ]
        batch, all_quiz = minibatch_of_two_or_more(study, rows), minibatch_of_two_or_more(quiz, torch.arange(len(quiz)))
        with temporary_rng_seed(derive_seed(seed, "guide"), client.train.device):
            gradient = compute_guiding_gradient(model.train(), batch, all_quiz, vectors, lr, label_loss, name)
        return Message({"classes": {
            "sums": gradient.float().cpu(), "weights": (torch.bincount(batch[1].cpu(), minlength=classes) > 0).float(),
        }}, scalars), {**client_state, "model": trained}  # fmt: skip
