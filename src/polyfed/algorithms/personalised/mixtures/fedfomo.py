"""FedFomo: each client mixes the models of clients that do well on its held-out examples (Zhang, Sapra, Fidler, Yeung
and Alvarez, ICLR 2021).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.evaluation.evaluate import evaluate
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import draw_rows_of_whole_groups
from polyfed.core.methods.capabilities import KeepsServerStateByClient
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    BufferPolicy,
    extract_sent_tensors_and_client_state,
    load_client_model,
    load_model_for_eval,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import cached_module, initial_state
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict, StateDictSpec, clone_tensors, state_dict_spec, weighted_mean
from polyfed.core.tasks.task import Loss
from polyfed.core.training.client_loss import training_loss_without_penalties
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit

ServerState = dict[str, dict[str, Any]]
ClientState = dict[str, Any]
_MODEL_PREFIX = "model/"  # prefix of a sent model's group, followed by its owner's position


@final
@dataclass(frozen=True, kw_only=True)
class FedFomo(KeepsServerStateByClient, LocalTraining, Algorithm[ServerState, ClientState]):
    """Lets each client mix its model with those models of other clients that do better on the client's held-out
    examples, and then train the mixture.

    θ_i ← θ_i' + Σ_j w_ij(θ_j − θ_i'). θ_i' is the model from which client i started its last local training (the
    paper's θ_i^(t−1)), and the result of that training is among the θ_j, so that the client's own work has a weight
    like the others'. w_ij grows with how much better than θ_i' client i finds θ_j on its held-out examples. All clients
    have one architecture. The server keeps each client's last model and sends to each the models that it requested.
    Evaluated model: θ_i after local training.

    A client's reply has its request for the next round. Nothing is sent in its first round, and models of clients that have
    not trained yet are left out, since every client has these initial weights.

    Args:
        num_models: M, number of other clients' models that a client requests in each round (5; the paper has 5 and 10, and
            the authors' commands count the client's own among them); all others if there are fewer.
        epsilon: ε, the probability with which each of the M is a random client instead of the most preferred (0.3, authors'
            code).
        epsilon_decay: decrease of ε in each round (0.05, authors' code).
        holdout: the share of the training examples that a client holds out of training to weigh models (0.2, authors'
            code); whole groups, if the examples have groups. At least two examples are left for training; with fewer than
            three, a client weighs by all of them. (`Client.val` is not used: validation scores would flatter the method.)
        buffers: "local" only (polyfed's choice): models are mixed by parameters alone, each with the client's own buffers.

    The other fields are those of `LocalTraining`.

    >>> [round(FedFomo().exploration_probability_at(t), 4) for t in (1, 2, 20)]
    [0.3, 0.25, 0.0]
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedfomo",
        summary="Each client mixes others' models that do well on its data",
        paper="Zhang et al. 2021",
        evaluated="its own",
        published=frozenset({"before", "model"}),  # the second is a mixture of models that were sent
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture"})
    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "choice"})
    num_models: int = 5
    epsilon: float = 0.3
    epsilon_decay: float = 0.05
    holdout: float = 0.2
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "num_models")
        self._require(0 <= self.epsilon <= 1, "epsilon", "between 0 and 1")
        self._require(0 <= self.epsilon_decay <= 1, "epsilon_decay", "between 0 and 1")
        self._require(0 < self.holdout < 1, "holdout", "above 0 and below 1")
        self._require(self.buffers == "local", "buffers", "'local', since models are mixed by parameters alone")

    def exploration_probability_at(self, round_number: int) -> float:
        """Returns ε of a round (from 1), with which a client asks for a random model."""
        return max(0.0, self.epsilon - self.epsilon_decay * (round_number - 1))

    # -- server ---------------------------------------------------------------------------------------------------

    @property
    def groups_by_client(self) -> frozenset[str]:
        """Returns the groups of the server state that have an entry for each client: its model, and its requests."""
        return frozenset({"models", "requests"})

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, which holds no client's model or request for models yet.

        `models` has an entry for every client: a client's position is its rank in the order of ids. The common initial
        weights are kept for their shapes.
        """
        client_ids = sorted(info.id for info in server.clients)
        assert server.model is not None  # `requires` names "one_architecture"
        initial_model = tensors_to_send(
            initial_state(server.model, server.seed), cached_module(server.model).buffers, self.buffers
        )
        return {"model": initial_model, "models": {client: {} for client in client_ids}, "requests": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the other clients' models that the client asked for; empty for evaluation."""
        if client_info.purpose == "personal":
            return Message()
        client_ids = sorted(server_state["models"])
        positions = server_state["requests"].get(client_info.id, torch.zeros(0, dtype=torch.int64)).tolist()
        models = {k: server_state["models"][client_ids[k]] for k in positions}
        return Message(
            {f"{_MODEL_PREFIX}{k}": model for k, model in models.items() if model},
            {
                "lr": self.lr_at(client_info.round, client_info.rounds),
                "epsilon": self.exploration_probability_at(client_info.round),
                "clients": len(client_ids),
                "position": client_ids.index(client_info.id),
            },
        )

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Stores each replying client's newest model and its request for others, without averaging."""
        models = {client: reply.tensors["model"] for client, reply in sorted(replies.items())}
        requests = {
            client: reply.tensors["request"]["clients"]
            for client, reply in sorted(replies.items())
            if "request" in reply.tensors
        }
        return {
            "model": server_state["model"],
            "models": server_state["models"] | models,
            "requests": server_state["requests"] | requests,
        }

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of parameters and of the positions of min(M, N−1) other clients.

        Raises:
            ValueError: a position does not exist.
        """
        number = min(self.num_models, len(server_state["models"]) - 1)
        request_tensor = reply.tensors.get("request", {}).get("clients", torch.zeros(0))
        # Another shape is refused elsewhere.
        positions = request_tensor.tolist() if request_tensor.shape == (number,) else []
        if len(set(positions)) < len(positions) or not all(0 <= k < len(server_state["models"]) for k in positions):
            raise ValueError(
                f"it asks for the models of clients {positions}; a request names different positions from 0 to "
                f"{len(server_state['models']) - 1}: fix the client's software"
            )
        request: dict[str, StateDictSpec] = {"request": {"clients": ((number,), torch.int64)}} if number else {}
        return {"model": state_dict_spec(server_state["model"]), **request}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the common initial model, and which of the client's examples are held out."""
        assert client.model is not None  # `requires` names "one_architecture"
        buffer_names = cached_module(client.model).buffers
        initial_tensors = initial_state(client.model, seed)
        client_state: ClientState = {
            "model": {name: tensor for name, tensor in initial_tensors.items() if name not in buffer_names}
        }
        num_examples = len(client.train)
        # BatchNorm needs two examples to train on.
        num_holdout = min(max(1, round(self.holdout * num_examples)), num_examples - 2)
        if num_holdout > 0:
            holdout_seed = derive_seed(seed, client.id, "holdout")
            client_state["holdout"] = draw_rows_of_whole_groups(client.train, num_holdout, holdout_seed)
        return client_state

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Mixes own and received models (eq. 3), trains the mixture; replies with it and the next request."""
        num_clients, position = int(message.scalars["clients"]), int(message.scalars["position"])
        training, holdout = _split_holdout(client, client_state)
        models_by_position = {
            int(g.removeprefix(_MODEL_PREFIX)): state_dict
            for g, state_dict in message.tensors.items()
            if g.startswith(_MODEL_PREFIX)
        }
        theta: StateDict = client_state["model"]
        weights: dict[int, float] = {}
        if "before" in client_state:  # it has trained, so that there is a θ_i' to compare with
            models_by_position[position], theta = client_state["model"], client_state["before"]
            weights = _model_weights(
                models_by_position, theta, client_state, client, holdout, training_loss_without_penalties(client, self)
            )
        positive = {str(j): weight for j, weight in weights.items() if weight > 0}
        if positive:
            # eq. (5): max(w, 0), scaled to sum 1; then θ_i' + Σ_j w_ij(θ_j − θ_i') of eq. (3) is the mean Σ_j w_ij θ_j.
            theta = weighted_mean({j: models_by_position[int(j)] for j in positive}, positive)
        net = load_client_model(client, theta, client_state, self.buffers)
        fit_result = fit(net.module, replace(client, train=training), self, lr=message.scalars["lr"], seed=seed)
        model, buffer_state = extract_sent_tensors_and_client_state(net, self)

        preferences = (
            client_state["preferences"].clone()
            if "preferences" in client_state
            else torch.zeros(num_clients, dtype=torch.float64)
        )
        for j, weight in weights.items():
            preferences[j] += weight  # p_i ← p_i + w_i (section 3.3), the weights as they are
        tensors: dict[str, StateDict] = {"model": model}
        if num_clients > 1:
            generator = torch_generator(derive_seed(seed, "request"))
            tensors["request"] = {"clients": self._choose(preferences, position, message.scalars["epsilon"], generator)}
        holdout_state = {"holdout": client_state["holdout"]} if "holdout" in client_state else {}
        scalars = {"num_examples": len(training), "train_loss": fit_result.loss}
        models = {"model": clone_tensors(model), "before": dict(theta)}
        return Message(tensors, scalars), {**models, "preferences": preferences, **buffer_state, **holdout_state}

    def _choose(self, preferences: Tensor, position: int, epsilon: float, generator: torch.Generator) -> Tensor:
        """Chooses min(M, N−1) models to request: the most preferred left, or with ε a random one.

        Ties are broken at random.
        """
        shuffled = torch.randperm(len(preferences), generator=generator).tolist()
        candidates = sorted((k for k in shuffled if k != position), key=lambda k: -float(preferences[k]))
        positions = []
        for draw in torch.rand(
            min(self.num_models, len(candidates)), generator=generator, dtype=torch.float64
        ).tolist():
            place = int(torch.randint(len(candidates), (), generator=generator)) if draw < epsilon else 0
            positions.append(candidates.pop(place))
        return torch.tensor(positions, dtype=torch.int64)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its model θ_i."""
        return load_model_for_eval(client, client_state["model"], client_state, self.buffers)


def _split_holdout(client: Client, client_state: ClientState) -> tuple[Examples, Examples]:
    """Splits the client's training examples into those to train on and those on which models are compared."""
    if "holdout" not in client_state:
        return client.train, client.train
    train_mask = torch.ones(len(client.train), dtype=torch.bool)
    train_mask[client_state["holdout"]] = False
    device = client.train.device
    return client.train.select(train_mask.nonzero()[:, 0].to(device)), client.train.select(
        client_state["holdout"].to(device)
    )


def _model_weights(
    models_by_position: Mapping[int, StateDict],
    before: StateDict,
    client_state: ClientState,
    client: Client,
    holdout: Examples,
    criterion: Loss,
) -> dict[int, float]:
    """Computes by position how much a model improves held-out loss, relative to its distance.

    w_ij = (L_i(θ_i') − L_i(θ_j))/‖θ_j − θ_i'‖ (eq. 4). `before` is θ_i', and `criterion` the training loss. The weight
    is 0 for θ_i' itself, and where a loss is not finite.
    """

    def loss(model: StateDict) -> float:
        module = load_client_model(client, model, client_state, "local").module
        value = evaluate(module, holdout, client.task, loss=criterion)["loss"]
        return math.nan if value is None else value

    loss_before = loss(before)
    weights = {}
    for j, theta_j in sorted(models_by_position.items()):
        squares = (float((theta_j[name].to(torch.float64) - tensor).square().sum()) for name, tensor in before.items())
        distance = math.sqrt(sum(squares))
        weight = (loss_before - loss(theta_j)) / distance if distance else 0.0
        weights[j] = weight if math.isfinite(weight) else 0.0
    return weights
