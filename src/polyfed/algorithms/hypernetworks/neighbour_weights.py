"""Provides the server half of pFedLA and HeurpFedLA with `neighbours=k`: one hypernetwork for all clients, and for each
client the models of k neighbours in place of all N.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from polyfed.core.algorithm import ClientInfo
from polyfed.core.errors import UserError
from polyfed.core.machine.memory_limit import check_fits_in_memory
from polyfed.core.state_dict import StateDict
from polyfed.hypernetworks.layer_aggregation import (
    HypernetworkSizes,
    WeightNormalisation,
    aggregation_logits,
    hypernetwork_batch_slices,
    inner_products_with_updates,
    layer_aggregation_weights,
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
from polyfed.hypernetworks.shared_hypernetwork import (
    NO_NEIGHBOUR,
    SharedHypernetworkSizes,
    choose_neighbours,
    client_hypernetwork,
    init_client_part,
    init_trunk,
    score_candidates,
    with_neighbours,
)

# As pFedLA's, but "hypernetworks" has the part of each client that has taken part (`init_client_part`), "trunk" what all
# share, and "recent" the positions of the clients that replied last, the latest at the end
ServerState = dict[str, Any]
MAX_CANDIDATES = 4096
"""How many of the clients that replied last a client's neighbours are chosen from, so that a round costs the same for any
number of clients."""
_MAX_SHOWN_CLIENTS = 1000  # up to which a record has a weight for every pair of clients


class NeighbourOptions(Protocol):
    """Describes the fields of pFedLA and HeurpFedLA that this module reads."""

    @property
    def neighbours(self) -> int | None:
        """Returns k, itself included."""

    @property
    def embedding_dim(self) -> int:
        """Returns the number of entries of an embedding."""

    @property
    def hidden(self) -> int:
        """Returns the number of hidden units of the trunk."""

    @property
    def hn_lr(self) -> float | None:
        """Returns the learning rate of the hypernetwork; None takes k/10."""

    @property
    def normalise(self) -> WeightNormalisation:
        """Returns the name of the function that turns outputs into weights."""

    @property
    def _num_retained_layers(self) -> int:
        """Returns the number of layers that each client keeps to itself (HeurpFedLA)."""


def shared_hypernetwork_sizes(server_state: ServerState, options: NeighbourOptions) -> SharedHypernetworkSizes:
    """Returns the sizes of the shared hypernetwork; a client has at most as many neighbours as there are clients."""
    assert options.neighbours is not None
    number = min(options.neighbours, len(server_state["clients"]))
    return SharedHypernetworkSizes(number, len(server_state["layers"]), options.embedding_dim, options.hidden)


@final
class _Mixture(NamedTuple):
    """Holds what a client's model is mixed from, and the weights α, (1, L, m), before and after retaining.

    The client's part and network come first, then the m neighbours' positions, its own place among them, and their models.
    """

    client_part: Mapping[str, Tensor]
    network: Mapping[str, Tensor]
    neighbours: Sequence[int]
    own_place: int
    models: Sequence[StateDict]
    alpha: Tensor
    weights_used: Tensor
    retained_mask: Tensor


def initial_shared_state(server_state: ServerState, options: NeighbourOptions) -> dict[str, Any]:
    """Returns the trunk and the clients that replied last, parts that pFedLA does not have.

    Raises:
        UserError: the parts of all clients will not fit into memory.
    """
    sizes, num_clients = shared_hypernetwork_sizes(server_state, options), len(server_state["clients"])
    description = f"one hypernetwork for {num_clients} clients with neighbours={options.neighbours}"
    check_fits_in_memory(description, 4 * num_clients * sizes.num_entries_per_client)
    return {"trunk": init_trunk(sizes, server_state["seed"]), "recent": []}


def iterate_mixtures(
    server_state: ServerState, client_infos: Sequence[ClientInfo], options: NeighbourOptions
) -> Iterator[tuple[ClientInfo, dict[str, Tensor]]]:
    """Yields (client, model): the mixture of its neighbours' models without the layers that it retains."""
    recent_rows = _recent_rows(server_state, options)
    for client_info in client_infos:
        mixture = _mixture_of(server_state, client_info.id, options, recent_rows)
        (model,) = mix_models_by_layer(mixture.models, mixture.weights_used, server_state["layers"])
        retained_layers = mixture.retained_mask[0].tolist()
        yield client_info, leave_out_retained_layers(model, server_state["layers"], retained_layers)


def update_models_and_shared_hypernetwork(
    server_state: ServerState, replies: Mapping[str, StateDict], options: NeighbourOptions
) -> ServerState:
    """Returns the state with new models, the stepped hypernetwork, and new neighbours for those who replied.

    For each client the step is that of eq. 10 and 11 on its own network. Its embedding and biases take it; the trunk, and
    the rows of a client, take the mean of the steps of those whose networks they were part of.
    """
    clients, sizes = sorted(replies), shared_hypernetwork_sizes(server_state, options)
    rate = sizes.neighbours / 10 if options.hn_lr is None else options.hn_lr
    changed, trunks = dict[str, Mapping[str, Tensor]](), list[Mapping[str, Tensor]]()
    rows_by_position, recent_rows = defaultdict[int, list[Tensor]](list), _recent_rows(server_state, options)
    mixtures, products = dict[str, _Mixture](), dict[str, Tensor]()
    for client in clients:
        mixture = _mixture_of(server_state, client, options, recent_rows)
        products[client] = inner_products_with_updates(
            mixture.models, mixture.weights_used, [replies[client]], server_state["layers"]
        )
        mixtures[client] = mixture._replace(models=())
    stepped_by_client = _step_hypernetworks(mixtures, products, rate, sizes, options.normalise)
    for client, mixture in mixtures.items():
        stepped = stepped_by_client[client]
        trunks.append({name: stepped[name] for name in server_state["trunk"]})
        for place, position in enumerate(mixture.neighbours):
            rows_by_position[position].append(stepped["heads.weight"][:, place])
        biases = mixture.client_part["biases"].clone()
        biases[:, : len(mixture.neighbours)] = stepped["heads.bias"]
        changed[client] = {**mixture.client_part, "embedding": stepped["embedding"], "biases": biases}
    for position, stepped_rows in sorted(rows_by_position.items()):
        neighbour = server_state["clients"][position]
        part = changed.get(neighbour) or _client_part(server_state, neighbour, sizes)
        changed[neighbour] = {**part, "rows": torch.stack(stepped_rows).mean(0)}
    new_positions = [_position_of_client(server_state, client) for client in clients]
    replied_now = set(new_positions)
    recent = [*(position for position in server_state["recent"] if position not in replied_now), *new_positions]
    state = {
        **server_state,
        "models": server_state["models"] | replies,
        "hypernetworks": server_state["hypernetworks"] | changed,
        "trunk": {name: torch.stack([trunk[name] for trunk in trunks]).mean(0) for name in server_state["trunk"]},
        "recent": recent[-MAX_CANDIDATES:],
    }
    new_rows = _rows_of(state, state["recent"], sizes)
    linked = {client: _with_best_neighbours(state, client, new_rows, sizes) for client in clients}
    return {**state, "hypernetworks": server_state["hypernetworks"] | changed | linked}


def _step_hypernetworks(
    mixtures: Mapping[str, _Mixture],
    products: Mapping[str, Tensor],
    rate: float,
    sizes: SharedHypernetworkSizes,
    normalise: WeightNormalisation,
) -> dict[str, dict[str, Tensor]]:
    """Returns each client's hypernetwork after a gradient step; those with as many neighbours step together."""
    clients_by_number = defaultdict[int, list[str]](list)
    for client, mixture in mixtures.items():
        clients_by_number[len(mixture.neighbours)].append(client)
    stepped = dict[str, dict[str, Tensor]]()
    for number, clients in sorted(clients_by_number.items()):
        network_sizes = HypernetworkSizes(number, sizes.layers, sizes.embedding, sizes.hidden)
        for few in hypernetwork_batch_slices(len(clients), network_sizes):
            together = clients[few]
            networks = update_aggregation_hypernetworks(
                [mixtures[client].network for client in together],
                [mixtures[client].own_place for client in together],
                torch.cat([products[client] for client in together]),
                rate,
                normalise,
            )
            stepped |= dict(zip(together, networks, strict=True))
    return stepped


def analyse_mixtures(
    server_state: ServerState, client_ids: Sequence[str], options: NeighbourOptions
) -> Mapping[str, Tensor | Sequence[str] | float]:
    """Returns `{name: value}`: the mean weight of a client's own model, and the rows without a positive score.

    For at most 1,000 clients it returns every weight, too (0 for clients that are no neighbours).
    """
    own_weight, num_zero_rows, alphas = 0.0, 0, []
    recent_rows = _recent_rows(server_state, options)
    for client in client_ids:
        mixture = _mixture_of(server_state, client, options, recent_rows)
        own_weight += float(mixture.alpha[0, :, mixture.own_place].mean()) / len(client_ids)
        if options.normalise == "relu":
            logits = aggregation_logits(stack_hypernetworks([mixture.network]))
            num_zero_rows += int(rows_without_positive_entry(logits).sum())
        if len(server_state["clients"]) <= _MAX_SHOWN_CLIENTS:
            alpha = torch.zeros(len(server_state["layers"]), len(server_state["clients"]))
            alpha[:, list(mixture.neighbours)] = mixture.alpha[0]
            alphas.append(alpha)
    numbers = {"own_weight": own_weight, "zero_rows": num_zero_rows}
    if not alphas:
        return numbers
    names = {"rows": list(client_ids), "layers": list(server_state["layers"]), "clients": list(server_state["clients"])}
    return {"alpha": torch.stack(alphas), **names, **numbers}


def _position_of_client(server_state: ServerState, client: str) -> int:
    """Returns the position of a client in the sorted list of all clients."""
    return bisect_left(server_state["clients"], client)


def _client_part(server_state: ServerState, client: str, sizes: SharedHypernetworkSizes) -> Mapping[str, Tensor]:
    """Returns a client's part of the shared hypernetwork; that of a client that has not taken part is drawn again."""
    stored = server_state["hypernetworks"].get(client)
    return init_client_part(client, sizes, server_state["seed"]) if stored is None else stored


def _rows_of(server_state: ServerState, positions: Sequence[int], sizes: SharedHypernetworkSizes) -> Tensor:
    """Returns the rows of some clients, shape (number, L, H)."""
    rows = [_client_part(server_state, server_state["clients"][position], sizes)["rows"] for position in positions]
    return torch.stack(rows) if rows else torch.zeros(0, sizes.layers, sizes.hidden)


def _recent_rows(server_state: ServerState, options: NeighbourOptions) -> Callable[[], Tensor]:
    """Returns a function that returns the rows of the clients that replied last, and reads them at its first call."""
    return cache(
        lambda: _rows_of(server_state, server_state["recent"], shared_hypernetwork_sizes(server_state, options))
    )


def _with_best_neighbours(
    server_state: ServerState, client: str, recent_rows: Tensor, sizes: SharedHypernetworkSizes
) -> Mapping[str, Tensor]:
    """Returns a client's part with the best of its present neighbours and those that replied last.

    If k is the number of clients, all are its neighbours.

    `recent_rows` are the rows of the latter. Present neighbours count with their biases, which are the mean over layers of
    what their own models have proved to be worth.
    """
    part, own_position = _client_part(server_state, client, sizes), _position_of_client(server_state, client)
    if sizes.neighbours >= len(server_state["clients"]):
        return with_neighbours(part, range(len(server_state["clients"])))
    present = [p for p in part["neighbours"].tolist() if p != NO_NEIGHBOUR]
    recent = set(server_state["recent"])
    left = [p for p in present if p not in recent]
    candidates = [*server_state["recent"], *left]
    rows = torch.cat([recent_rows, _rows_of(server_state, left, sizes)])
    scores = score_candidates(server_state["trunk"], part["embedding"], rows)
    summed_biases = part["biases"].sum(0)
    place_of = {position: place for place, position in enumerate(candidates)}
    for place, position in enumerate(present):
        if position in place_of:
            scores[place_of[position]] += summed_biases[place]
    return with_neighbours(part, choose_neighbours(scores, candidates, own_position, sizes.neighbours))


def _mixture_of(
    server_state: ServerState, client: str, options: NeighbourOptions, recent_rows: Callable[[], Tensor]
) -> _Mixture:
    """Returns what a client's model is mixed from, and with which weights.

    Raises:
        UserError: the hypernetwork has diverged.
    """
    sizes = shared_hypernetwork_sizes(server_state, options)
    part = _client_part(server_state, client, sizes)
    own_position, num_clients = _position_of_client(server_state, client), len(server_state["clients"])
    if client not in server_state["hypernetworks"] or int(part["neighbours"][0]) == NO_NEIGHBOUR:
        part = _with_best_neighbours(server_state, client, recent_rows(), sizes)
    neighbours = [p for p in part["neighbours"].tolist() if p != NO_NEIGHBOUR]
    if own_position not in neighbours or not all(0 <= position < num_clients for position in neighbours):
        raise UserError(
            f"{type(options).__name__}: the server state names {neighbours[:5]} as neighbours of {client!r}, client number "
            f"{own_position} of {num_clients}; it is not of a run with these clients"
        )
    ids = [server_state["clients"][position] for position in neighbours]
    rows = [_client_part(server_state, neighbour, sizes)["rows"] for neighbour in ids]
    network, own_place = client_hypernetwork(server_state["trunk"], part, rows), neighbours.index(own_position)
    alpha = layer_aggregation_weights(stack_hypernetworks([network]), [own_place], options.normalise)
    if not bool(torch.isfinite(alpha).all()):
        raise UserError(
            f"{type(options).__name__}: the hypernetwork has diverged, its weights are not finite; lower hn_lr, which is "
            f"{options.hn_lr}"
        )
    mask = retained_layer_mask(alpha, [own_place], options._num_retained_layers)
    weights_used = set_own_weight_in_retained_layers(alpha, [own_place], mask)
    models = [server_state["models"][neighbour] for neighbour in ids]
    return _Mixture(part, network, neighbours, own_place, models, alpha, weights_used, mask)
