"""Defines pFedLA's hypernetworks, one per client, which compute the weight of every client's layers in this client's
model (Ma et al., CVPR 2022, section 3.2 and Fig. 3).

Each maps its embedding v_i to α_i, one weight per layer and client. They are stored one by one, so that a round
replaces only those of its clients, and evaluated in batches.

Dimensions: N clients, B of them in a round, L layers, E entries of an embedding, H hidden units.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from polyfed.core.machine.threads import map_in_threads
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict

WeightNormalisation = Literal["relu", "softmax"]
SimilarityMeasure = Literal["distance", "cosine"]
Hypernetwork = Mapping[str, Tensor]
_DEPTH = 3
_EPSILON = 1e-8
_TINY = 1e-300
_STACKED = 2**18  # floats of hypernetworks that are stacked at one time: 1 MB
_CHUNK = 2**21  # floats of all clients' models that are stacked at one time: 8 MB
_PIECE = 2**22  # floats of new models that are allocated together: 16 MB, which glibc keeps for the next round
_NEAR = 2**17  # floats that are multiplied at one time: 512 kB, which fits into a core's own cache
_LINE = 16  # floats in a cache line


@final
@dataclass(frozen=True)
class HypernetworkSizes:
    """Holds the numbers of clients (N), layers (L), an embedding's entries (E), and hidden units (H)."""

    clients: int
    layers: int
    embedding: int
    hidden: int

    @property
    def num_parameters(self) -> int:
        """Returns the number of entries in all tensors of one hypernetwork together."""
        trunk = self.hidden * (self.embedding + 1) + (_DEPTH - 1) * self.hidden * (self.hidden + 1)
        return self.embedding + trunk + self.layers * self.clients * (self.hidden + 1)


def init_aggregation_hypernetwork(client: str, sizes: HypernetworkSizes, seed: int) -> dict[str, Tensor]:
    """Returns the random initial embedding and parameters {v_i, ψ_i} of a client.

    The network is a trunk of three linear layers with ReLU, and for each layer of the model a linear head with N outputs.
    The draw depends on the client's name and the seed only, so that a client that has not taken part needs no stored
    network: all of them together have N² numbers.

    Heads start with weights from U(0, 1) and biases of 0: the trunk's outputs after the ReLU are not negative, so no z is
    negative, and all weights start near 1/N. The rest starts as torch's `nn.Embedding`, N(0, 1), and `nn.Linear`,
    U(−1/√inputs, 1/√inputs).

    Returns:
        "embedding" (E), "trunk.K.weight" (H, E or H), "trunk.K.bias" (H), "heads.weight" (L, N, H), "heads.bias" (L, N).

    >>> network = init_aggregation_hypernetwork("north", HypernetworkSizes(5, 2, 4, 3), seed=0)
    >>> tuple(network["heads.weight"].shape)
    (2, 5, 3)
    """
    generator = torch_generator(derive_seed(seed, "aggregation hypernetwork", client))
    params = {"embedding": torch.randn(sizes.embedding, generator=generator)}
    for k in range(_DEPTH):
        inputs = sizes.hidden if k else sizes.embedding
        for part, shape in {"weight": (sizes.hidden, inputs), "bias": (sizes.hidden,)}.items():
            params[f"trunk.{k}.{part}"] = torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(inputs**0.5)
    params["heads.weight"] = torch.rand(sizes.layers, sizes.clients, sizes.hidden, generator=generator)
    params["heads.bias"] = torch.zeros(sizes.layers, sizes.clients)
    return params


def stack_hypernetworks(networks: Sequence[Hypernetwork]) -> dict[str, Tensor]:
    """Returns the tensors of B clients' hypernetworks stacked along a new first dimension of size B."""
    return {name: torch.stack([network[name] for network in networks]) for name in networks[0]}


def hypernetwork_batch_slices(num_hypernetworks: int, sizes: HypernetworkSizes) -> list[slice]:
    """Returns slices that divide `num_hypernetworks` hypernetworks into batches small enough to be stacked in memory."""
    size = max(1, _STACKED // sizes.num_parameters)
    return [slice(first, first + size) for first in range(0, num_hypernetworks, size)]


def aggregation_logits(networks: Hypernetwork) -> Tensor:
    """Returns scores for aggregation weights, (B, L, N), of `stack_hypernetworks`.

    The outputs of a network do not depend on the others in the batch, not even in the last bit: the server recomputes the
    weights to find out which layers it had retained.
    """
    hidden = networks["embedding"]
    for k in range(_DEPTH):
        hidden = _linear_layers(networks[f"trunk.{k}.weight"], hidden, networks[f"trunk.{k}.bias"]).relu()
    weight, bias = networks["heads.weight"], networks["heads.bias"]
    return _linear_layers(weight.flatten(1, 2), hidden, bias.flatten(1)).view(bias.shape)


def _linear_layers(weight: Tensor, inputs: Tensor, bias: Tensor) -> Tensor:
    """Applies B linear layers, (B, out, in), to B inputs, (B, in), each independent of the batch.

    The products are of row vectors and matrices. torch multiplies one matrix with one column in another way than with
    several; the bits would depend on the batch.
    """
    return torch.bmm(inputs[:, None, :], weight.transpose(1, 2))[:, 0] + bias


def layer_aggregation_weights(
    networks: Hypernetwork, client_rows: Sequence[int], normalise: WeightNormalisation
) -> Tensor:
    """Returns clients' weights α in each layer of B models, (B, L, N), with rows that sum to 1.

    α_i = HN_i(v_i; ψ_i) (eq. 4) is ReLU(z)/(ΣReLU(z) + ε), or softmax(z). Where all z of a row are ≤ 0, ReLU leaves no
    weights, and the client keeps its own layer: α_i^{l,i} = 1.

    Args:
        networks: hypernetworks of B clients, from `stack_hypernetworks`.
        client_rows: the positions of these clients among the N.
        normalise: "relu" or "softmax".

    >>> networks = stack_hypernetworks(
    ...     [init_aggregation_hypernetwork(f"client-{i}", HypernetworkSizes(4, 2, 8, 8), seed=0) for i in range(4)])
    >>> layer_aggregation_weights(networks, range(4), normalise="relu").sum(2).round(decimals=4).unique()
    tensor([1.])
    """
    z = aggregation_logits(networks)
    if normalise == "softmax":
        return z.softmax(2)
    positive = z.relu()
    one_hot_self = torch.nn.functional.one_hot(torch.tensor(list(client_rows)), z.shape[2]).to(z.dtype)[:, None, :]
    return torch.where(
        rows_without_positive_entry(z)[:, :, None], one_hot_self, positive / (positive.sum(2, keepdim=True) + _EPSILON)
    )


def rows_without_positive_entry(scores: Tensor) -> Tensor:
    """Returns a mask of shape (B, L): True where a row of the scores, shape (B, L, N), has no positive entry."""
    return (scores <= 0).all(2)


def update_aggregation_hypernetworks(
    networks: Sequence[Hypernetwork],
    client_rows: Sequence[int],
    inner_products: Tensor,
    learning_rate: float,
    normalise: WeightNormalisation,
) -> list[dict[str, Tensor]]:
    """Returns B clients' hypernetworks after one gradient step towards the clients' trained models (eq. 10 and 11).

    v_i ← v_i + rate · (∇_v θ̄_i)ᵀ Δθ_i, and ψ_i likewise. The sign makes it a descent: Δθ_i is about −η∇L_i, so that
    the step decreases L_i(θ̄_i(v_i, ψ_i)), and also ½‖θ̄_i − θ_i‖². Since θ̄_i^l = Σ_j α_i^{l,j} θ_j^l, the step needs
    Δθ_i only through N inner products per layer.

    Args:
        networks: hypernetworks of the B clients.
        client_rows: positions of these clients among the N.
        inner_products: ⟨θ_j^l, Δθ_i^l⟩, (B, L, N), from `inner_products_with_updates`.
        learning_rate: the hypernetworks' learning rate.
        normalise: "relu" or "softmax".
    """
    with torch.enable_grad():
        leaves = {name: tensor.requires_grad_() for name, tensor in stack_hypernetworks(networks).items()}
        alpha = layer_aggregation_weights(leaves, client_rows, normalise)
        ascent = torch.autograd.grad(alpha, list(leaves.values()), inner_products.to(alpha.dtype))
    steps = dict(zip(leaves, ascent, strict=True))
    stepped = []
    for i, network in enumerate(networks):
        new_tensors = _allocate_contiguous(network)
        for name, tensor in network.items():
            torch.add(tensor, steps[name][i], alpha=learning_rate, out=new_tensors[name])
        stepped.append(new_tensors)
    return stepped


def _allocate_contiguous(like: Hypernetwork) -> dict[str, Tensor]:
    """Allocates uninitialised tensors with the names and shapes of the given ones, in one block of memory."""
    sizes = [tensor.numel() for tensor in like.values()]
    parts = torch.split(torch.empty(sum(sizes), dtype=next(iter(like.values())).dtype), sizes)
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def group_tensor_names_into_layers(
    tensor_names: Sequence[str], tensor_names_by_module: Mapping[str, Sequence[str]], granularity: str
) -> dict[str, list[str]]:
    """Returns `{layer: tensor names}` in order; each layer gets a weight per client.

    Args:
        tensor_names: names of the tensors that are aggregated.
        tensor_names_by_module: module -> names of the tensors it owns (`models.structure.tensor_names_by_module`).
        granularity: a layer is a "module" (the owner of a tensor), a "block" (the top-level module around it), a "tensor",
            or the whole "model".

    >>> group_tensor_names_into_layers(["a.0.weight", "a.0.bias", "b.weight"],
    ...                   {"a.0": ["a.0.weight", "a.0.bias"], "b": ["b.weight"]}, "block")
    {'a': ['a.0.weight', 'a.0.bias'], 'b': ['b.weight']}
    """
    owner = {name: module for module, names in tensor_names_by_module.items() for name in names}
    label: dict[str, Callable[[str], str]] = {
        "module": lambda name: owner[name] or name,
        "block": lambda name: name.partition(".")[0],
        "tensor": lambda name: name,
        "model": lambda _: "model",
    }
    by_layer: dict[str, list[str]] = {}
    for name in tensor_names:
        by_layer.setdefault(label[granularity](name), []).append(name)
    return by_layer


def mix_models_by_layer(
    models: Sequence[StateDict], alpha: Tensor, layers: Mapping[str, Sequence[str]]
) -> list[dict[str, Tensor]]:
    """Returns B personalised models, each layer a weighted mean over all clients' models.

    θ̄_i^l = Σ_j α_i^{l,j} θ_j^l (eq. 6).

    Args:
        models: θ_1 ... θ_N.
        alpha: the weights α, (B, L, N).
        layers: the L layers, each with the names of its tensors.

    Returns:
        B models; each tensor is a view of one that holds the tensors of several clients.
    """
    few = {name: max(1, _PIECE // max(1, tensor.numel())) for name, tensor in models[0].items()}
    pieces = {
        name: [
            torch.empty(min(few[name], len(alpha) - first), *tensor.shape, dtype=tensor.dtype)
            for first in range(0, len(alpha), few[name])
        ]
        for name, tensor in models[0].items()
    }
    thetas = _split_tensors(models, layers, len(models))

    def mix(part: _TensorPart) -> None:
        theta = part.stack_models(thetas)
        weights, products = alpha[:, part.layer].to(theta.dtype), theta.new_empty(len(alpha), theta.shape[1])
        for near in _cache_sized_blocks(theta):
            torch.mm(weights, theta[:, near], out=products[:, near])
        for piece, values in zip(pieces[part.name], torch.split(products, few[part.name]), strict=True):
            piece.view(len(piece), -1)[:, part.where] = values

    for _ in map_in_threads(mix, _list_tensor_parts(models, layers)):
        pass
    mixed = {name: [tensor for piece in tensor_pieces for tensor in piece] for name, tensor_pieces in pieces.items()}
    return [{name: tensors[i] for name, tensors in mixed.items()} for i in range(len(alpha))]


def inner_products_with_updates(
    models: Sequence[StateDict],
    served_models: Tensor,
    replies: Sequence[StateDict],
    layers: Mapping[str, Sequence[str]],
) -> Tensor:
    """Returns by layer all models' inner products with B clients' changes, (B, L, N), float64.

    ⟨θ_j^l, Δθ_i^l⟩ with Δθ_i = θ_i − θ̄_i.

    Args:
        models: θ_1 ... θ_N at the start of the round.
        served_models: the weights α with which θ̄_i was computed, (B, L, N).
        replies: θ_i of the B clients after local training.
        layers: as for `mix_models_by_layer`.
    """
    total = torch.zeros(served_models.shape, dtype=torch.float64)

    thetas, afters = _split_tensors(models, layers, len(models)), _split_tensors(replies, layers, len(models))

    def product(part: _TensorPart) -> tuple[int, Tensor]:
        theta, delta = part.stack_models(thetas), part.stack_models(afters)
        weights = served_models[:, part.layer].to(theta.dtype)
        for near in _cache_sized_blocks(theta):
            delta[:, near].addmm_(weights, theta[:, near], alpha=-1)
        return part.layer, delta @ theta.T

    for layer, products in map_in_threads(product, _list_tensor_parts(models, layers)):
        total[:, layer] += products
    return total


def layer_similarity_weights(
    models: Sequence[StateDict],
    layers: Mapping[str, Sequence[str]],
    rows: Sequence[int],
    measure: SimilarityMeasure,
    sharpness: float,
) -> Tensor:
    """Returns weights, (B, L, N), from layers' similarity without hypernetworks (as in Fig. 1).

    α_i^{l,j} = softmax_j(sharpness · s_ij^l), (B, L, N), float32. If one layer is the whole model, weights are model-wise.

    s is the cosine of θ_i^l and θ_j^l, or minus their squared distance divided by its mean over all pairs of different
    clients, so that it does not depend on the size of a layer. A layer that is the same for all clients has weights 1/N.

    Args:
        models: θ_1 ... θ_N.
        layers: as for `mix_models_by_layer`.
        rows: the positions of the B clients among the N.
        measure: "cosine" or "distance".
        sharpness: factor of the similarity, 0 or more; 0 gives all clients equal weights.

    >>> models = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 3.0])}]
    >>> layer_similarity_weights(models, {"w": ["w"]}, [0], "cosine", sharpness=1000.0).tolist()
    [[[0.5, 0.5, 0.0]]]
    """
    n = len(models)
    products = torch.zeros(len(layers), n, n, dtype=torch.float64)

    thetas = _split_tensors(models, layers, n)

    def product(part: _TensorPart) -> tuple[int, Tensor]:
        theta = part.stack_models(thetas).double()
        if measure == "distance":  # products of nearly equal models would be rounding errors only
            theta = theta - theta.mean(0)
        return part.layer, theta @ theta.T

    for layer, part_products in map_in_threads(product, _list_tensor_parts(models, layers)):
        products[layer] += part_products
    squares = products.diagonal(dim1=1, dim2=2)
    if measure == "cosine":
        lengths = squares.clamp_min(0).sqrt()
        scores = products / (lengths[:, :, None] * lengths[:, None, :]).clamp_min(_TINY)
    else:
        squared_distances = (squares[:, :, None] + squares[:, None, :] - 2 * products).clamp_min(0)
        scores = -squared_distances / (squared_distances.sum((1, 2), keepdim=True) / max(n * (n - 1), 1)).clamp_min(
            _TINY
        )
    return (sharpness * scores).softmax(2).transpose(0, 1)[list(rows)].float()


_TensorParts = Mapping[str, Sequence[Sequence[Tensor]]]
"""Name of a tensor -> its parts -> the views of a part, one per model."""


@final
@dataclass(frozen=True)
class _TensorPart:
    """Describes a part of a tensor: the position of its layer, the tensor's name, the part's number, and its slice."""

    layer: int
    name: str
    number: int
    where: slice

    def stack_models(self, cut: _TensorParts) -> Tensor:
        """Stacks this part of all models' tensors, shape (number of models, size of the part)."""
        return torch.stack(list(cut[self.name][self.number]))


def _columns_per_block(numbers: int, rows: int) -> int:
    """Returns how many columns of `rows` entries make about `numbers` entries, in multiples of a cache line.

    Products of rows that begin within a cache line take half as long again.
    """
    return max(1, numbers // rows // _LINE) * _LINE


def _cache_sized_blocks(theta: Tensor) -> list[slice]:
    """Returns slices of a matrix's columns that fit into a core's cache, where products take less than half the time."""
    width = _columns_per_block(_NEAR, len(theta))
    return [slice(start, start + width) for start in range(0, theta.shape[1], width)]


def _split_tensors(models: Sequence[StateDict], layers: Mapping[str, Sequence[str]], number: int) -> _TensorParts:
    """Splits models into the parts of `_list_tensor_parts`, as views; `number` is N, all models.

    It makes one call per tensor, since the number of calls determines the time.
    """
    width = _columns_per_block(_CHUNK, number)
    names = [name for names in layers.values() for name in names]
    return {n: list(zip(*(torch.split(model[n].reshape(-1), width) for model in models), strict=True)) for n in names}


def _list_tensor_parts(models: Sequence[StateDict], layers: Mapping[str, Sequence[str]]) -> list[_TensorPart]:
    """Lists a model's tensors in parts, of which those of all models fit into a core's cache."""
    width = _columns_per_block(_CHUNK, len(models))
    return [
        _TensorPart(layer, name, number, slice(start, start + width))
        for layer, names in enumerate(layers.values())
        for name in names
        for number, start in enumerate(range(0, models[0][name].numel(), width))
    ]
