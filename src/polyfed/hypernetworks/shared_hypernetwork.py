"""Defines the one hypernetwork that all clients share if each of them has `neighbours=k`: pFedLA in memory that grows
with N, not with N².

The paper has a network HN_i per client, with N outputs per layer (Ma et al., CVPR 2022, section 3.2). Here the trunk is
common, each client j has one row of output weights per layer, and client i's network is put together from the trunk, i's
embedding and biases, and the rows of its k neighbours. It is a network of the paper's form with k outputs per layer, so
that everything in `layer_aggregation` works on it.

Dimensions: L layers, E entries of an embedding, H hidden units, m ≤ k neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.hypernetworks.layer_aggregation import HypernetworkSizes, aggregation_logits, init_aggregation_hypernetwork

ClientPart = Mapping[str, Tensor]
NO_NEIGHBOUR = -1
"""Stands in "neighbours" behind the last neighbour, so that this tensor always has k entries."""


@final
@dataclass(frozen=True)
class SharedHypernetworkSizes:
    """Holds the numbers of neighbours (k), layers (L), an embedding's entries (E), and hidden units (H)."""

    neighbours: int
    layers: int
    embedding: int
    hidden: int

    @property
    def num_entries_per_client(self) -> int:
        """Returns the number of entries in all tensors of one client's part together: E + L·H + L·k + k."""
        return self.embedding + self.layers * (self.hidden + self.neighbours) + self.neighbours


def init_trunk(sizes: SharedHypernetworkSizes, seed: int) -> dict[str, Tensor]:
    """Returns the initial trunk, `{name: tensor}`: "trunk.K.weight" (H, E or H) and "trunk.K.bias" (H) for three layers.

    Weights are drawn from N(0, 2/inputs) and biases are 0 (He et al. 2015; polyfed's choice): with torch's own start the
    outputs for different embeddings would be nearly the same, and a common trunk has to distinguish clients. The last
    layer's weights are divided by √H, so that its output has a norm near 1 for any H.
    """
    like = init_aggregation_hypernetwork("", HypernetworkSizes(0, 0, sizes.embedding, sizes.hidden), 0)
    generator = torch_generator(derive_seed(seed, "shared aggregation hypernetwork"))
    trunk = {name: torch.zeros_like(tensor) for name, tensor in like.items() if name.startswith("trunk.")}
    weights = [tensor for tensor in trunk.values() if tensor.dim() == 2]
    for weight in weights:
        weight.normal_(generator=generator).mul_((2 / weight.shape[1]) ** 0.5)
    weights[-1].div_(sizes.hidden**0.5)
    return trunk


def init_client_part(client: str, sizes: SharedHypernetworkSizes, seed: int) -> dict[str, Tensor]:
    """Returns a client's initial part by its id and the seed alone, so that none needs to be stored.

    Returns:
        "embedding" (E), drawn from N(0, 1); "rows" (L, H), the output weights for this client as a neighbour of others,
        drawn from U(0, 1), as the paper's heads; "neighbours" (k, int64), positions of its neighbours, none yet; "biases"
        (L, k), of the outputs for these neighbours, 0.

    >>> part = init_client_part("north", SharedHypernetworkSizes(neighbours=3, layers=2, embedding=4, hidden=5), seed=0)
    >>> {name: tuple(tensor.shape) for name, tensor in part.items()}
    {'embedding': (4,), 'rows': (2, 5), 'neighbours': (3,), 'biases': (2, 3)}
    """
    generator = torch_generator(derive_seed(seed, "aggregation hypernetwork", client))
    return {
        "embedding": torch.randn(sizes.embedding, generator=generator),
        "rows": torch.rand(sizes.layers, sizes.hidden, generator=generator),
        "neighbours": torch.full((sizes.neighbours,), NO_NEIGHBOUR),
        "biases": torch.zeros(sizes.layers, sizes.neighbours),
    }


def client_hypernetwork(
    trunk: Mapping[str, Tensor], client_part: ClientPart, neighbour_rows: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Returns a client's hypernetwork in the paper's form, an output per layer and neighbour.

    See `init_aggregation_hypernetwork`.

    Args:
        trunk: the common trunk.
        client_part: of the client.
        neighbour_rows: the "rows" of its m neighbours, in the order of its "neighbours".
    """
    heads = torch.stack(list(neighbour_rows), dim=1)
    biases = client_part["biases"][:, : len(neighbour_rows)]
    return {"embedding": client_part["embedding"], **trunk, "heads.weight": heads, "heads.bias": biases}


def score_candidates(trunk: Mapping[str, Tensor], embedding: Tensor, candidate_rows: Tensor) -> Tensor:
    """Returns candidates' scores as neighbours, (C,): outputs without biases, summed over layers.

    The outputs are z^{l,j} = ⟨rows_j^l, trunk(v_i)⟩, so that a client finds those whose rows point where its embedding
    does, also among clients with which its model was never mixed.

    Args:
        trunk: the common trunk.
        embedding: v_i of the client, shape (E,).
        candidate_rows: "rows" of the C candidates, shape (C, L, H).
    """
    summed_rows = candidate_rows.sum(1)[None]
    network = {
        **trunk,
        "embedding": embedding,
        "heads.weight": summed_rows,
        "heads.bias": summed_rows.new_zeros(1, len(candidate_rows)),
    }
    return aggregation_logits({name: tensor[None] for name, tensor in network.items()})[0, 0]


def choose_neighbours(scores: Tensor, candidates: Sequence[int], own_position: int, number: int) -> list[int]:
    """Returns, ascending, a client's own position and those of the largest scores, at most `number`.

    Of equal scores, the earlier candidate is taken.

    Args:
        scores: of the candidates, shape (C,).
        candidates: their positions among all clients, each once.
        own_position: the client's own.
        number: k.

    >>> choose_neighbours(torch.tensor([1.0, 3.0, 2.0]), [4, 5, 7], own_position=5, number=2)
    [5, 7]
    """
    others = [
        candidates[place]
        for place in scores.argsort(descending=True, stable=True).tolist()
        if candidates[place] != own_position
    ]
    return sorted([own_position, *others[: number - 1]])


def with_neighbours(client_part: ClientPart, neighbours: Sequence[int]) -> dict[str, Tensor]:
    """Returns a client's part with other neighbours; those that stay keep their biases, and new ones start with 0.

    Args:
        client_part: of the client.
        neighbours: positions of the new neighbours, at most k.
    """
    new = {name: tensor.clone() for name, tensor in client_part.items() if name in ("neighbours", "biases")}
    new["neighbours"].fill_(NO_NEIGHBOUR)
    new["biases"].zero_()
    place_before = {position: place for place, position in enumerate(client_part["neighbours"].tolist())}
    for place, position in enumerate(neighbours):
        new["neighbours"][place] = position
        if position in place_before:
            new["biases"][:, place] = client_part["biases"][:, place_before[position]]
    return {**client_part, **new}
