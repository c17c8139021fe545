"""Defines pFedLA: for each client, a hypernetwork on the server decides how much every client's layers count in its
model (Ma et al., CVPR 2022, algorithm 1)."""

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.hypernetworks import neighbour_weights
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.machine.memory_limit import check_fits_in_memory
from polyfed.core.machine.threads import map_in_threads
from polyfed.core.methods.capabilities import AddsServerTensors, KeepsServerStateByClient
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    BufferPolicy,
    extract_sent_tensors_and_client_state,
    load_client_model,
    load_model_for_eval,
    recompute_norm_statistics_if_needed,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import cached_module, initial_state
from polyfed.core.state_dict import StateDict, clone_tensors
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.hypernetworks.layer_aggregation import (
    Hypernetwork,
    HypernetworkSizes,
    SimilarityMeasure,
    WeightNormalisation,
    aggregation_logits,
    group_tensor_names_into_layers,
    hypernetwork_batch_slices,
    init_aggregation_hypernetwork,
    inner_products_with_updates,
    layer_aggregation_weights,
    layer_similarity_weights,
    mix_models_by_layer,
    rows_without_positive_entry,
    stack_hypernetworks,
    update_aggregation_hypernetworks,
)
from polyfed.hypernetworks.retained_layers import (
    leave_out_retained_layers,
    retained_layer_mask,
    set_own_weight_in_retained_layers,
)
from polyfed.hypernetworks.shared_hypernetwork import init_client_part
from polyfed.models.structure import tensor_names_by_module

# "models": θ_j of every client; "hypernetworks": v_i, ψ_i of each client that has taken part; "clients" and "layers": names
ServerState = dict[str, Any]
ClientState = dict[str, StateDict]
LayerGranularity = Literal["module", "block", "tensor", "model"]
WeightSource = Literal["hypernetwork", "similarity"]
_BLOCK = 2**26  # floats of the personalised models that are computed at one time: 256 MB


@dataclass(frozen=True, kw_only=True)
class LayerAggregationMethod(
    AddsServerTensors, KeepsServerStateByClient, LocalTraining, Algorithm[ServerState, ClientState], ABC
):
    """Implements what pFedLA and HeurpFedLA share: the server computes for each client a weighted mean of all clients'
    models, with separate weights for each layer.

    Args:
        weights: source of α: the "hypernetwork" of each client (paper, section 3.2), or the "similarity" of the clients'
            layers, without learning, as in both curves of the paper's Fig. 1 (paper, section 1); with `layer: model` it is
            the similarity of whole models.
        similarity: "distance", minus squared distances over their mean, or "cosine" (polyfed's choice; the paper says only
            "calculating the similarity").
        sharpness: factor of the similarity, α = softmax(sharpness · similarity); 0 gives the plain mean (3, polyfed's
            choice).
        hn_lr: learning rate of the hypernetworks; None takes N/10 for N clients (polyfed's choice: chosen on validation
            examples, see docs/methods/pfedla.md; the paper leaves it open). It matters as much as `lr`.
        normalise: "relu", α = ReLU(z)/ΣReLU(z) (public implementations; the paper says that rows sum to 1), or "softmax".
        layer: unit that gets its own weight: each "module" that owns parameters (paper), each top-level "block", each
            "tensor", or the whole "model" (the paper's Fig. 1 compares with it).
        embedding_dim: entries of v_i (100, public implementations; the paper refers to a supplement).
        hidden: width of the hypernetwork's trunk (100, as embedding_dim: public implementations).
        neighbours: k, the clients whose models are mixed for each client, itself among them; None mixes all N (paper). With
            k, one hypernetwork serves all clients, so that the server's numbers besides the models grow with N and not with
            N²; see docs/methods/pfedla.md for what equals the paper's form at k = N, and what k costs.
        evaluate_trained: also evaluates the network after local training (polyfed's choice); each client then keeps it.
        buffers: "local" (polyfed's choice) or "recompute"; α weighs parameters only.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture"})
    weights: WeightSource = "hypernetwork"
    similarity: SimilarityMeasure = "distance"
    sharpness: float = 3.0
    hn_lr: float | None = None
    normalise: WeightNormalisation = "relu"
    layer: LayerGranularity = "module"
    embedding_dim: int = 100
    hidden: int = 100
    neighbours: int | None = None
    evaluate_trained: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "hn_lr", "sharpness")
        self._at_least(1, "embedding_dim", "hidden", "neighbours")
        finds_neighbours = self.neighbours is None or self.weights == "hypernetwork"
        self._require(
            finds_neighbours, "neighbours", "none with weights='similarity', which compares all clients' models"
        )
        self._require(
            self.buffers != "average", "buffers", "'local' or 'recompute' (clients' layers are weighed, not averaged)"
        )

    # -- server ---------------------------------------------------------------------------------------------------

    @property
    def _num_retained_layers(self) -> int:
        """Returns the number of layers that each client retains: k in HeurpFedLA, 0 in pFedLA."""
        return 0

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the state before round 1, with the initial models of all clients (algorithms 1 and 2, line 1)."""
        return init_server_state(server, self, self._num_retained_layers)

    @property
    def groups_by_client(self) -> frozenset[str]:
        """Returns the groups of the server state that have an entry for each client: its model and its hypernetwork."""
        return frozenset({"models", "hypernetworks"})

    def later_server_tensors(self, server_state: ServerState) -> StateDict:
        """Returns a hypernetwork of the form that each client's has once it has replied."""
        if self.weights == "similarity":
            return {}
        if self.neighbours is not None:
            return init_client_part("", neighbour_weights.shared_hypernetwork_sizes(server_state, self), 0)
        return init_aggregation_hypernetwork("", _hypernetwork_sizes(server_state, self), 0)

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """Yields the message to each client: its personalised model θ̄_i, without the layers that the client retains.

        The models of many clients take one matrix product per layer.
        """
        if self.neighbours is None:
            models = iterate_personalised_models(server_state, client_infos, self, self._num_retained_layers)
        else:
            models = neighbour_weights.iterate_mixtures(server_state, client_infos, self)
        for client_info, model in models:
            yield Message({"model": model}, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Stores the models θ_i that clients sent, and updates their hypernetworks v_i and ψ_i.

        It is lines 7 and 8 of algorithm 1, and lines 9 and 10 of algorithm 2.
        """
        models = {i: reply.tensors["model"] for i, reply in replies.items()}
        if self.neighbours is not None:
            return neighbour_weights.update_models_and_shared_hypernetwork(server_state, models, self)
        return update_models_and_hypernetworks(server_state, models, self, self._num_retained_layers)

    def analysis(
        self, server_state: ServerState, client_ids: Sequence[str]
    ) -> Mapping[str, Tensor | Sequence[str] | float]:
        """Returns, for the report, the weights with which models are mixed for each client of the round."""
        if self.neighbours is not None:
            return neighbour_weights.analyse_mixtures(server_state, client_ids, self)
        return analyse_aggregation_weights(server_state, client_ids, self)


@final
@dataclass(frozen=True, kw_only=True)
class PFedLA(LayerAggregationMethod):
    """Gives each client a weighted mean of all clients' models, with weights for each layer that a hypernetwork on the
    server learns for this client.

    Layer l of client i's model is θ̄_i^l = Σ_j α_i^{l,j} θ_j^l, with α_i from its hypernetwork. Evaluated model: θ̄_i,
    which the client would download next (the paper's output); next to it, as `trained_...`, θ_i, the client's network
    after its last local training.

    The sum is over all N clients; a client that has not taken part yet has the initial weights. The fields are those of
    `LayerAggregationMethod` and `LocalTraining`.

    >>> PFedLA(lr=0.005, local_epochs=10, hn_lr=1.0).layer
    'module'
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="pfedla",
        summary="Hypernetworks weigh every layer of every client",
        paper="Ma et al. 2022",
        evaluated="the aggregated model; also the trained one",
        published=frozenset({"model"}),
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1, which is empty."""
        return {}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the personalised model for `local_epochs` (lines 10 to 14); replies with θ_i.

        The server computes Δθ_i = θ_i − θ̄_i from it. The paper sends Δθ_i, which is equivalent, but adding it to θ̄_i
        again would round.
        """
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        model, state_after = extract_sent_tensors_and_client_state(net, self)
        if self.evaluate_trained:
            state_after["model"] = clone_tensors(model)
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), state_after

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its personalised model, the mixture from the server."""
        return load_model_for_eval(client, message.tensors["model"], client_state, self.buffers)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the client's model θ_i after its last training, if it has taken part."""
        if self.evaluate_trained and "model" in client_state:
            net = load_client_model(client, client_state["model"], client_state, self.buffers)
            yield "trained", recompute_norm_statistics_if_needed(net, client, client_state, self.buffers)


# -- the server half, shared with HeurpFedLA: each client retains k layers, none in pFedLA ------------------------------


def init_server_state(server: ServerContext, options: LayerAggregationMethod, k: int = 0) -> ServerState:
    """Returns the server state of pFedLA and HeurpFedLA before round 1; raises a `UserError` for fewer than `k` layers."""
    assert server.model is not None  # `requires` names "one_architecture"
    model = tensors_to_send(initial_state(server.model, server.seed), cached_module(server.model).buffers, "local")
    module = cached_module(server.model).module
    layers = group_tensor_names_into_layers(list(model), tensor_names_by_module(module), options.layer)
    if k > len(layers):
        raise UserError(
            f"{type(options).__name__}: k={k} layers are to be retained, but the network has {len(layers)} "
            f"({', '.join(layers)}); k must be at most {len(layers)}, which is training alone"
        )
    ids = sorted(client_info.id for client_info in server.clients)
    state = {
        "clients": ids,
        "layers": layers,
        "models": dict.fromkeys(ids, model),
        "hypernetworks": {},
        "seed": server.seed,
    }
    if options.neighbours is not None:
        state |= neighbour_weights.initial_shared_state(state, options)
    elif options.weights == "hypernetwork":
        description = (
            f"hypernetworks of {len(ids)} clients with embedding_dim={options.embedding_dim} and "
            f"hidden={options.hidden}"
        )
        check_fits_in_memory(description, 4 * len(ids) * _hypernetwork_sizes(state, options).num_parameters)
    return state


def _hypernetwork_sizes(server_state: ServerState, options: LayerAggregationMethod) -> HypernetworkSizes:
    return HypernetworkSizes(
        len(server_state["clients"]), len(server_state["layers"]), options.embedding_dim, options.hidden
    )


def iterate_hypernetworks(
    server_state: ServerState, clients: Sequence[str], options: LayerAggregationMethod
) -> Iterator[tuple[slice, list[Hypernetwork]]]:
    """Yields (slice, hypernetworks) of groups of clients, where `clients[slice]` are those of the group."""
    for group in hypernetwork_batch_slices(len(clients), _hypernetwork_sizes(server_state, options)):
        yield group, _hypernetworks_of(server_state, clients[group], options)


def _hypernetworks_of(
    server_state: ServerState, clients: Sequence[str], options: LayerAggregationMethod
) -> list[Hypernetwork]:
    """Returns the clients' hypernetworks; of a client that never took part, drawn again (line 1)."""
    sizes, by_client = _hypernetwork_sizes(server_state, options), server_state["hypernetworks"]
    return [
        by_client[client] if client in by_client else init_aggregation_hypernetwork(client, sizes, server_state["seed"])
        for client in clients
    ]


def client_positions(server_state: ServerState, clients: Sequence[str]) -> list[int]:
    """Returns the position of each of the given clients in the list of all clients of the server state."""
    return [server_state["clients"].index(client) for client in clients]


def compute_aggregation_weights(
    server_state: ServerState, clients: Sequence[str], options: LayerAggregationMethod
) -> Tensor:
    """Returns the weights of all N clients' models for each client, (clients, layers, N).

    Raises:
        UserError: the hypernetworks have diverged.
    """
    rows = client_positions(server_state, clients)
    if options.weights == "similarity":
        models = [server_state["models"][client] for client in server_state["clients"]]
        return layer_similarity_weights(models, server_state["layers"], rows, options.similarity, options.sharpness)

    def weigh_group(group: slice) -> Tensor:
        return layer_aggregation_weights(
            stack_hypernetworks(_hypernetworks_of(server_state, clients[group], options)),
            rows[group],
            options.normalise,
        )

    groups = hypernetwork_batch_slices(len(clients), _hypernetwork_sizes(server_state, options))
    alpha = torch.cat(list(map_in_threads(weigh_group, groups)))
    if not bool(torch.isfinite(alpha).all()):
        raise UserError(
            f"{type(options).__name__}: the hypernetworks have diverged, their weights are not finite; lower "
            f"hn_lr, which is {options.hn_lr}"
        )
    return alpha


def iterate_personalised_models(
    server_state: ServerState, client_infos: Sequence[ClientInfo], options: LayerAggregationMethod, k: int = 0
) -> Iterator[tuple[ClientInfo, dict[str, Tensor]]]:
    """Yields (client, model): its mixture of all models (eqs. 5, 6) without the k layers that it retains."""
    models = [server_state["models"][client] for client in server_state["clients"]]
    size = max(1, _BLOCK // max(1, sum(tensor.numel() for tensor in models[0].values())))
    for first in range(0, len(client_infos), size):
        block = client_infos[first : first + size]
        ids = [client_info.id for client_info in block]
        rows, alpha = client_positions(server_state, ids), compute_aggregation_weights(server_state, ids, options)
        retained_mask = retained_layer_mask(alpha, rows, k)
        weights = set_own_weight_in_retained_layers(alpha, rows, retained_mask)
        mixed = mix_models_by_layer(models, weights, server_state["layers"])
        for client_info, model, retained_row in zip(block, mixed, retained_mask.tolist(), strict=True):
            yield client_info, leave_out_retained_layers(model, server_state["layers"], retained_row)


def update_models_and_hypernetworks(
    server_state: ServerState, replies: Mapping[str, StateDict], options: LayerAggregationMethod, k: int = 0
) -> ServerState:
    """Returns the state with new models, and hypernetworks after a gradient step (eqs. 10, 11).

    The server recomputes θ̄_i from its state at the start of the round, so that Δθ_i = θ_i − θ̄_i needs no stored
    copy. All θ_j are those of the round's start. Retained layers have a Δθ_i, too (algorithm 2), from which their
    weights are trained.
    """
    if options.weights == "similarity":
        return {**server_state, "models": server_state["models"] | replies}
    clients = sorted(replies)
    rows, alpha = client_positions(server_state, clients), compute_aggregation_weights(server_state, clients, options)
    weights_used = set_own_weight_in_retained_layers(alpha, rows, retained_layer_mask(alpha, rows, k))
    models = [server_state["models"][client] for client in server_state["clients"]]
    products = inner_products_with_updates(models, weights_used, [replies[c] for c in clients], server_state["layers"])
    rate = len(models) / 10 if options.hn_lr is None else options.hn_lr

    def update_group(group: slice) -> list[dict[str, Tensor]]:
        networks = _hypernetworks_of(server_state, clients[group], options)
        return update_aggregation_hypernetworks(networks, rows[group], products[group], rate, options.normalise)

    new_hypernetworks = chain.from_iterable(
        map_in_threads(
            update_group, hypernetwork_batch_slices(len(clients), _hypernetwork_sizes(server_state, options))
        )
    )
    by_client = server_state["hypernetworks"] | dict(zip(clients, new_hypernetworks, strict=True))
    return {**server_state, "models": server_state["models"] | replies, "hypernetworks": by_client}


def analyse_aggregation_weights(
    server_state: ServerState, client_ids: Sequence[str], options: LayerAggregationMethod
) -> Mapping[str, Tensor | Sequence[str] | float]:
    """Returns mixing weights, names of rows, layers and clients, and rows without a positive score, by name."""
    alpha = compute_aggregation_weights(server_state, client_ids, options)
    uses_relu = options.weights == "hypernetwork" and options.normalise == "relu"
    groups = iterate_hypernetworks(server_state, client_ids, options) if uses_relu else ()
    num_zero_rows = sum(
        int(rows_without_positive_entry(aggregation_logits(stack_hypernetworks(group))).sum()) for _, group in groups
    )
    names = {"rows": list(client_ids), "layers": list(server_state["layers"]), "clients": list(server_state["clients"])}
    return {"alpha": alpha, **names, "zero_rows": num_zero_rows}
