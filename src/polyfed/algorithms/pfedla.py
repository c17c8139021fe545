"""pFedLA: a hypernetwork per client on the server weighs every layer of every client (Ma et al., CVPR 2022, algorithm 1)."""

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.buffers import Policy, extract_update, load_client_model, prepare_for_eval, shared_tensors
from polyfed.core.errors import UserError
from polyfed.core.room import check_room
from polyfed.core.scratch import initial_state, scratch
from polyfed.core.threads import in_threads
from polyfed.core.training import LocalTraining, fit, scalars_of
from polyfed.core.tree import Tree, copied
from polyfed.hypernetworks.aggregation import (
    Hypernetwork,
    Normalise,
    Similarity,
    Sizes,
    alphas,
    create,
    in_groups,
    inner_products,
    layers_of,
    mixtures,
    scores,
    similarities,
    stacked,
    updated,
    zero_rows,
)
from polyfed.models.split import layer_owners

# "models": θ_j of every client; "hypernetworks": v_i, ψ_i of each that has taken part; "clients" and "layers": their names
ServerState = dict[str, Any]
ClientState = dict[str, Tree]
Granularity = Literal["module", "block", "tensor", "model"]
Weights = Literal["hypernetwork", "similarity"]
_BLOCK = 2**26  # numbers in the personalised models that are made at one time: 256 MB


@dataclass(frozen=True, kw_only=True)
class LayerAggregation(LocalTraining, ABC):
    """Hyper-parameters of pFedLA and HeurpFedLA.

    Args:
        weights: where α comes from: the "hypernetwork" of each client (paper, section 3.2), or the "similarity" of the
            clients' layers, with nothing to learn, as in both curves of the paper's Fig. 1 (paper, section 1); with
            `layer: model` it is the similarity of whole models.
        similarity: "distance" of squared differences over their mean, or "cosine" (polyfed's choice; the paper says
            "calculating the similarity" and no more).
        sharpness: how much more the similar weigh: α = softmax(sharpness · similarity); 0 is the plain mean (3, polyfed's
            choice).
        hn_lr: rate of the hypernetworks' update; None takes N/10 for N clients (polyfed's choice: chosen on
            validation examples, see docs/methods/pfedla.md; the paper leaves it open). It matters as much as `lr`.
        normalise: "relu", α = ReLU(z)/ΣReLU(z) (public implementations; the paper says that rows sum to 1), or "softmax".
        layer: what gets a weight of its own: each "module" that owns parameters (paper), each top-level "block", each
            "tensor", or the whole "model" (the paper's Fig. 1 compares with it).
        embedding_dim: entries of v_i (100, public implementations; the paper refers to a supplement).
        hidden: width of the hypernetwork's trunk (100, as embedding_dim: public implementations).
        evaluate_trained: evaluate the network after local training too (polyfed's choice); each client then keeps it.
        buffers: "local" (polyfed's choice) or "recompute"; the weights are of parameters.
    """

    weights: Weights = "hypernetwork"
    similarity: Similarity = "distance"
    sharpness: float = 3.0
    hn_lr: float | None = None
    normalise: Normalise = "relu"
    layer: Granularity = "module"
    embedding_dim: int = 100
    hidden: int = 100
    evaluate_trained: bool = True
    buffers: Policy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "hn_lr", "sharpness")
        self._at_least(1, "embedding_dim", "hidden")
        self._require(
            self.buffers != "average", "buffers", "'local' or 'recompute' (clients' layers are weighed, not averaged)"
        )


@final
@dataclass(frozen=True, kw_only=True)
class PFedLA(LayerAggregation, Algorithm[ServerState, ClientState]):
    """Layer-wise personalised aggregation. Evaluated model: θ̄_i, what the client would download next (the paper's output);
    next to it, as `trained_...`, θ_i, the client's network after its last local training.

    Every client's weights go over all N clients; one that has not taken part yet counts with the initial weights. The fields
    are those of `LayerAggregation` and `LocalTraining`.

    >>> PFedLA(lr=0.005, local_epochs=10, hn_lr=1.0).layer
    'module'
    """

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture"})

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Models, hypernetworks and embeddings of all clients (line 1)."""
        return begin(server, self)

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """The same for many clients by one product of matrices a layer."""
        for who, model in personalised(server_state, client_infos, self):
            yield Message({"model": model}, {"lr": self.lr_at(who.round, who.rounds)})

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """θ_i of the round's clients are replaced (line 7), v_i and ψ_i updated (line 8)."""
        return learned(server_state, {i: reply.tensors["model"] for i, reply in replies.items()}, self)

    def analysis(
        self, server_state: ServerState, client_ids: Sequence[str]
    ) -> Mapping[str, Tensor | Sequence[str] | float]:
        """α_i of the round's clients after the round."""
        return weights_for_plots(server_state, client_ids, self)

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Nothing private before the first round."""
        return {}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """θ_i: θ̄_i after `local_epochs` (lines 10 to 14). θ_i goes up, from which the server takes Δθ_i = θ_i − θ̄_i: the
        paper sends Δθ_i, which says the same, but adding it to θ̄_i again would round."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        found = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        model, after = extract_update(net, self)
        if self.evaluate_trained:
            after["model"] = copied(model)
        return Message({"model": model}, scalars_of(client, found.loss)), after

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """θ̄_i."""
        return prepare_for_eval(
            load_client_model(client, message.tensors["model"], client_state, self.buffers),
            client,
            client_state,
            self.buffers,
        )

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """θ_i, for a client that has taken part."""
        if self.evaluate_trained and "model" in client_state:
            net = load_client_model(client, client_state["model"], client_state, self.buffers)
            yield "trained", prepare_for_eval(net, client, client_state, self.buffers)


# -- the server half, which HeurpFedLA shares: k layers of each client are retained, none in pFedLA ---------------------


def begin(server: ServerContext, options: LayerAggregation, k: int = 0) -> ServerState:
    """The state before round 1.

    Raises:
        UserError: there are fewer than `k` layers.
    """
    assert server.model is not None  # `requires` names "one_architecture"
    model = shared_tensors(initial_state(server.model, server.seed), scratch(server.model).buffers, "local")
    module = scratch(server.model).module
    layers = layers_of(list(model), layer_owners(module), options.layer)
    if k > len(layers):
        raise UserError(
            f"{type(options).__name__}: k={k} layers are to be retained, but the network has {len(layers)} "
            f"({', '.join(layers)}); k must be at most {len(layers)}, which is training alone"
        )
    ids = sorted(who.id for who in server.clients)
    state = {
        "clients": ids,
        "layers": layers,
        "same": {},  # nothing now; it is there so that checkpoints are as they were
        "models": dict.fromkeys(ids, model),
        "hypernetworks": {},
        "seed": server.seed,
    }
    if options.weights == "hypernetwork":
        what = f"hypernetworks of {len(ids)} clients with embedding_dim={options.embedding_dim} and hidden={options.hidden}"
        check_room(what, 4 * len(ids) * _sizes(state, options).numbers)
    return state


def _sizes(server_state: ServerState, options: LayerAggregation) -> Sizes:
    return Sizes(len(server_state["clients"]), len(server_state["layers"]), options.embedding_dim, options.hidden)


def hypernetworks(
    server_state: ServerState, clients: Sequence[str], options: LayerAggregation
) -> Iterator[tuple[slice, list[Hypernetwork]]]:
    """v_i and ψ_i of these clients, a few clients at a time, with their places."""
    for few in in_groups(len(clients), _sizes(server_state, options)):
        yield few, _known(server_state, clients[few], options)


def _known(server_state: ServerState, clients: Sequence[str], options: LayerAggregation) -> list[Hypernetwork]:
    """Those of a client that has not taken part are still as they were drawn (line 1), and are drawn again."""
    sizes, known = _sizes(server_state, options), server_state["hypernetworks"]
    return [known[client] if client in known else create(client, sizes, server_state["seed"]) for client in clients]


def weights(server_state: ServerState, clients: Sequence[str], options: LayerAggregation) -> tuple[list[int], Tensor]:
    """The clients' positions among all, and α_i of each, (clients, layers, N): HN_i(v_i; ψ_i), or from the similarity of
    layers.

    Raises:
        UserError: the hypernetworks have diverged.
    """
    rows = [server_state["clients"].index(client) for client in clients]
    if options.weights == "similarity":
        models = [server_state["models"][client] for client in server_state["clients"]]
        return rows, similarities(models, server_state["layers"], rows, options.similarity, options.sharpness)

    def weigh(few: slice) -> Tensor:
        return alphas(stacked(_known(server_state, clients[few], options)), rows[few], options.normalise)

    alpha = torch.cat(list(in_threads(weigh, in_groups(len(clients), _sizes(server_state, options)))))
    if not bool(torch.isfinite(alpha).all()):
        raise UserError(
            f"{type(options).__name__}: the hypernetworks have diverged, their weights are no numbers; lower "
            f"hn_lr, which is {options.hn_lr}"
        )
    return rows, alpha


def retained(alpha: Tensor, rows: Sequence[int], k: int) -> Tensor:
    """Which layers each client keeps: the k with the largest weight of its own, AT_k (eq. 12), the earlier of equals;
    (clients, layers) of bool."""
    net = alpha[torch.arange(len(rows)), :, torch.tensor(list(rows))]
    largest = net.argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.zeros(net.shape, dtype=torch.bool).scatter_(1, largest, True)


def with_retained(alpha: Tensor, rows: Sequence[int], kept: Tensor) -> Tensor:
    """α with which θ̄_i is in effect made: a retained layer is the client's own."""
    alone = torch.nn.functional.one_hot(torch.tensor(list(rows)), alpha.shape[2]).to(alpha.dtype)
    return torch.where(kept[:, :, None], alone[:, None, :], alpha)


def personalised(
    server_state: ServerState, client_infos: Sequence[ClientInfo], options: LayerAggregation, k: int = 0
) -> Iterator[tuple[ClientInfo, dict[str, Tensor]]]:
    """Each client with θ̄_i (eq. 5 and 6), without its k retained layers."""
    models = [server_state["models"][client] for client in server_state["clients"]]
    size = max(1, _BLOCK // max(1, sum(tensor.numel() for tensor in models[0].values())))
    for first in range(0, len(client_infos), size):
        block = client_infos[first : first + size]
        rows, alpha = weights(server_state, [who.id for who in block], options)
        kept = retained(alpha, rows, k)
        mixed = mixtures(models, with_retained(alpha, rows, kept), server_state["layers"])
        for who, model, keeps in zip(block, mixed, kept.tolist(), strict=True):
            sent = [
                name
                for names, keep in zip(server_state["layers"].values(), keeps, strict=True)
                if not keep
                for name in names
            ]
            yield who, {name: model[name] for name in sent}


def learned(
    server_state: ServerState, replies: Mapping[str, Tree], options: LayerAggregation, k: int = 0
) -> ServerState:
    """The state after a round: the clients' new θ_i, and v_i, ψ_i after eq. 10 and 11.

    The state says what was sent, so that Δθ_i = θ_i − θ̄_i needs no other memory of it. All clients' θ_j are those of the
    round's start. Retained layers have a Δθ_i too (algorithm 2), and their weights go on learning from it.
    """
    if options.weights == "similarity":
        return {**server_state, "models": {**server_state["models"], **replies}}
    clients = sorted(replies)
    rows, alpha = weights(server_state, clients, options)
    served = with_retained(alpha, rows, retained(alpha, rows, k))
    models = [server_state["models"][client] for client in server_state["clients"]]
    products = inner_products(models, served, [replies[c] for c in clients], server_state["layers"])
    rate = len(models) / 10 if options.hn_lr is None else options.hn_lr

    def learn(few: slice) -> list[dict[str, Tensor]]:
        own = _known(server_state, clients[few], options)
        return updated(own, rows[few], products[few], rate, options.normalise)

    learnt = chain.from_iterable(in_threads(learn, in_groups(len(clients), _sizes(server_state, options))))
    after = {**server_state["hypernetworks"], **dict(zip(clients, learnt, strict=True))}
    return {**server_state, "models": {**server_state["models"], **replies}, "hypernetworks": after}


def weights_for_plots(
    server_state: ServerState, client_ids: Sequence[str], options: LayerAggregation
) -> Mapping[str, Tensor | Sequence[str] | float]:
    """α of these clients with the names of its dimensions, and how many rows had no weight to give."""
    _, alpha = weights(server_state, client_ids, options)
    relu = options.weights == "hypernetwork" and options.normalise == "relu"
    groups = hypernetworks(server_state, client_ids, options) if relu else ()
    dead = sum(int(zero_rows(scores(stacked(own))).sum()) for _, own in groups)
    names = {"rows": list(client_ids), "layers": list(server_state["layers"]), "clients": list(server_state["clients"])}
    return {"alpha": alpha, **names, "zero_rows": dead}
