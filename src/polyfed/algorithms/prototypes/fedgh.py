"""FedGH: the server trains one head on the clients' class means, which replaces the clients' heads (Yi et al., ACM
Multimedia 2023).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import nn

from polyfed.algorithms.base.heads.class_means import (
    class_means_as_examples,
    class_means_spec,
    class_means_with_weights,
    find_replaceable_head,
    train_network_on_class_means,
)
from polyfed.algorithms.base.heads.initial_heads import InitialHead
from polyfed.algorithms.base.heads.shared_heads import HeadFromServerMethod
from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.alignment.representations import compute_representations, representation_module_name
from polyfed.core.algorithm import Algorithm, Client, Message, ServerContext
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import (
    build_module,
    copy_trained_weights_and_buffers,
    fill_module,
    restore_all_but_weights_and_set_eval,
)
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDictSpec, state_dict_spec
from polyfed.core.training.loop import fit, reply_scalars

ServerState = dict[str, Any]  # "head": φ, empty before the first replies; "seed" of the run; "round"
ClientState = dict[str, Any]  # "model": W_i with the head that the client trained, and buffers


@final
@dataclass(frozen=True, kw_only=True)
class FedGH(HeadFromServerMethod, PersonalNetworkMethod, ValidatesNetworks, Algorithm[ServerState, ClientState]):
    """Trains each client's network, of any architecture, and at the server one head on the clients' class means, which
    replaces the heads (last layers) of all clients.

    Each client trains its network, whose head is replaced by the server's φ before each round, and sends the mean
    representation of its examples of each class. The server trains φ on these means, with their classes as labels. If φ
    never replaced a head, it would be Local, bit for bit. Evaluated model: W_i, the client's own network as it trained
    it; next to it W_i with the server's φ, as `global_...`.

    In round 1 the server sends no head, since it learns the head's shape from the first replies: the clients draw from the
    run's seed the φ from which the server starts. A class mean counts once, whatever the number of examples.

    Args:
        first_head: "form" starts every client with the server's first φ (public implementations: the server hands out one),
            "architecture" with the head of its architecture's own draw, as in `local`. A head that a network does not draw,
            such as a pretrained one, stays.
        evaluate: "trained", the network with the head that the client has trained on (authors' code), or "global", with
            the server's; the other is evaluated next to it.
        server_epochs: passes over the class means in a round (100, public implementations; the authors' code has one).
        server_lr: learning rate of φ, by SGD (0.01, authors' code).
        server_batch_size: class means in a step of φ (10, public implementations; the authors' code has one).
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> sorted(FedGH().discloses)
    ['class_means']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedgh",
        summary="The server trains a head on class means, for all clients",
        paper="Yi et al. 2023",
        evaluated="its own; also with the server's head",
        # With one network for all, the head of its own draw is common to all, and is that of the other methods.
        leaderboard={"*": {"first_head": "architecture"}, "architectures": {}},
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"model", "classification", "one_representation"})
    discloses: ClassVar[frozenset[str]] = frozenset({"class_means"})
    first_head: InitialHead = "form"
    evaluate: Literal["trained", "global"] = "trained"
    server_epochs: int = 100
    server_lr: float = 0.01
    server_batch_size: int = 10
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "server_epochs")
        self._positive("server_lr")
        self._require(self.server_batch_size >= 0, "server_batch_size", "at least 1, or 0 for all class means")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without a head, whose shape the first replies tell."""
        return {**super().server_init(server), "seed": server.seed, "round": 0}

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of class means, of the classes and width of the server's head."""
        if not server_state["head"]:
            return class_means_spec(reply, None)
        head_spec = state_dict_spec(server_state["head"])
        return class_means_spec(reply, {"classes": {"sums": head_spec["weight"], "weights": head_spec["bias"]}})

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Trains the server's head on the class means of all clients by cross-entropy."""
        means, round_number = class_means_as_examples(replies), server_state["round"] + 1
        if not len(means):
            return {**server_state, "round": round_number}
        classes, width = next(iter(replies.values())).tensors["classes"]["sums"].shape
        head = build_module(partial(nn.Linear, width, classes), derive_seed(server_state["seed"], "head"))
        fill_module(head, server_state["head"] or head.state_dict())
        seed = derive_seed(server_state["seed"], round_number, "server")
        head_state = train_network_on_class_means(
            head, means, self.server_epochs, self.server_batch_size, lr=self.server_lr, seed=seed
        )
        return {**server_state, "head": head_state, "round": round_number}

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless the network has a head (last layer) that can be replaced."""
        self.client_init(client, 0)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns a network drawn from the run's seed, with the server's first head."""
        client_state = {
            "model": self._draw_weights(client, 1, lambda _: derive_seed(seed, "head"), seed)  # the seed of φ
        }
        find_replaceable_head(super().personal_model(Message(), client_state, client, seed), client, "FedGH")
        return client_state

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the network with the server's head; replies with the mean representation of each class."""
        model = self._load_with_global_head(message, client_state, client, seed)
        fit_result = fit(model, client, self, lr=message.scalars["lr"], seed=seed)
        name = representation_module_name(model, client.train)
        features = compute_representations(restore_all_but_weights_and_set_eval(model), client.train, module=name)
        head = model.get_submodule(name)
        assert isinstance(head, nn.Linear)
        sums_and_weights = class_means_with_weights(features, client.train.labels, head.out_features)
        return Message({"classes": sums_and_weights}, reply_scalars(client, fit_result.loss)), {
            "model": copy_trained_weights_and_buffers(model)
        }

    def _load_with_global_head(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> nn.Module:
        """Loads the client's network W_i with the server's head φ in place of its own, if a head was received."""
        model = super().personal_model(message, client_state, client, seed)
        if "head" in message.tensors:
            head = find_replaceable_head(model, client, "FedGH")
            with torch.no_grad():
                head.weight.copy_(message.tensors["head"]["weight"])
                head.bias.copy_(message.tensors["head"]["bias"])
        return model

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the client's network with its own or the server's head, as `evaluate` chooses."""
        load_model = self._load_with_global_head if self.evaluate == "global" else super().personal_model
        return load_model(message, client_state, client, seed)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the client's network with the head that `evaluate` does not choose."""
        if self.evaluate == "global":
            yield "trained", super().personal_model(message, client_state, client, seed)
        else:
            yield "global", self._load_with_global_head(message, client_state, client, seed)
