"""Defines the graph hypernetwork (FLHA-GHN, section 4.2), which generates a network's weights from the graph of its
layers.

It consists of a graph neural network and one MLP (head) per layer type.

Dimensions: V nodes, E edges, k node types (the catalogue and three marks), d latent entries of a node, H hidden units of a
head, n sets of weights of one layer type, P entries of a weight tensor.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.core.seeds import temporary_rng_seed
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.core.state_dict import StateDict
from polyfed.graphs.architecture import TRANSPOSED, ArchitectureGraph, LayerType, ParameterRole
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.hypernetworks.ghn_heads import TypeHead
from polyfed.hypernetworks.ghn_layers import (
    GatedGraphConv,
    GraphConv,
    Level,
    aggregate_predecessors,
    forward_backward_levels,
)
from polyfed.hypernetworks.lowrank_decoder import DESCRIPTION_COLUMNS, LowRankDecoder, Sizes, describe_node

Gnn = Literal["graphconv", "gated", "sage"]
Head = Literal["mlp", "factored", "lowrank"]
Passing = Literal["synchronous", "asynchronous"]
MAX_DENSE_BYTES = 50 * 2**20
"""Size of a hypernetwork in bytes above which its heads are factored, unless the method's settings choose the heads."""


LIGHT_FACTOR = 2
"""How many times the size of the largest network a message may have with light heads."""
_LIGHT_SIZES = ((32, 51, 16), (32, 32, 16), (32, 16, 16), (16, 16, 16), (8, 16, 16), (4, 16, 16), (4, 8, 8), (2, 8, 4))
"""(rank, latent, hidden) of light heads, in the order of trial."""


@final
@dataclass(frozen=True)
class GHNConfig:
    """Describes the form of a graph hypernetwork; hypernetworks with equal configurations can exchange weights.

    Args:
        catalogue: the layer types.
        depth: T, number of layers of the graph neural network; with 0 the heads see only the node's type.
        latent: d.
        hidden: H.
        head: "mlp" (paper), "factored" (polyfed's choice), see `Factored`, or "lowrank", see `LowRankDecoder`.
        rank: rank of the factored heads, or of the decoder.
        normalise: makes the GNN keep the variance of its input, and heads scale their hidden activations z to mean square 1
            (polyfed's choice). With the initialisation of PyG and torch, each layer shrinks differences between nodes to
            3 % of ‖h‖, and z is about 0.05: then nearly all of a step goes into the last layers' biases, which are the same
            for all nodes of a type.
        gnn: layers of the graph neural network: "graphconv" (paper, eq. 2), or the two others that appendix D tried,
            "gated" (`GatedGraphConv`) and "sage" (`GraphConv` with means).
        passing: "synchronous" (paper): a layer updates all nodes at once. "asynchronous" (tried in section 4.3): a layer
            updates nodes in the order of the data flow, and then in the reverse order, each from the current states of the
            others, with the same parameters in both directions (Zhang et al. 2019).
        sizes: largest numbers of rows, columns and kernel positions of the low-rank decoder; (0, 0, 0) for other heads.
        own_start: whether the low-rank decoder lets all layers start with the deviation of the client's own network.
    """

    catalogue: LayerCatalogue
    depth: int = 6
    latent: int = 51
    hidden: int = 16
    head: Head = "mlp"
    rank: int = 32
    normalise: bool = True
    gnn: Gnn = "graphconv"
    passing: Passing = "synchronous"
    sizes: Sizes = (0, 0, 0)
    own_start: bool = False

    @property
    def feature_columns(self) -> int:
        """Returns the number of features of a node."""
        return DESCRIPTION_COLUMNS if self.head == "lowrank" else len(self.catalogue.node_types)


@final
@dataclass(frozen=True, eq=False)
class GraphTensors:
    """Holds the graph of a network as tensors, which are the input of the graph hypernetwork.

    Attributes:
        features: one-hot node features X, (V, k).
        edges: int64 (2, E), from and to.
        weight_sets: layer type -> (the nodes that use weights of this type (m,), which of the n sets each node uses (m,),
            and for each set role -> parameter's name).
        levels: levels of asynchronous passing; empty for synchronous passing.
    """

    features: Tensor
    edges: Tensor
    weight_sets: Mapping[LayerType, tuple[Tensor, Tensor, tuple[Mapping[str, str], ...]]]
    levels: tuple[Level, ...] = ()


def graph_to_tensors(
    graph: ArchitectureGraph, catalogue: LayerCatalogue | None, device: torch.device, passing: Passing = "synchronous"
) -> GraphTensors:
    """Converts a graph to tensors; the catalogue must have all its layer types.

    See `ArchitectureGraph.restrict_to_types`. Without a catalogue, nodes are described by their kinds and sizes.
    """
    if catalogue is None:
        features = torch.tensor([describe_node(node.type) for node in graph.nodes], device=device)
        features = features.reshape(-1, DESCRIPTION_COLUMNS)
    else:
        columns = {kind: column for column, kind in enumerate(catalogue.node_types)}
        types = torch.tensor([columns[node.type] for node in graph.nodes], device=device)
        features = F.one_hot(types, len(columns)).float()
    edges = torch.tensor(graph.edges, dtype=torch.int64, device=device).reshape(-1, 2).T.contiguous()
    sets = {}
    for kind in graph.layer_types:
        members = [weight_set for weight_set in graph.generated_weights if weight_set.type == kind]
        nodes = [(node, row) for row, weight_set in enumerate(members) for node in weight_set.nodes]
        positions, rows = (torch.tensor(column, device=device) for column in zip(*nodes, strict=True))
        sets[kind] = (positions, rows, tuple(weight_set.parameters for weight_set in members))
    order = forward_backward_levels(graph.edges, len(graph.nodes), device) if passing == "asynchronous" else ()
    return GraphTensors(features, edges, sets, order)


@final
class GHN(nn.Module):
    """Generates weights from a graph: a graph network computes layers' states, heads turn them into weights.

    The GNN is G(·; W_G), and the heads are {H_l(·; W_H^l)}. Layer t of the GNN is eq. 2, a `GraphConv` with ReLU: h_v ←
    σ(A h_v + B Σ_{u→v} h_u + b). Weights are eq. 3, θ^v = H_l(h_v^T). Weights that several nodes share are generated
    from the mean of their h_v^T, so that the order of the nodes does not matter. Where the first layer needs h_v with d
    entries (a GRU, or asynchronous passing), a linear map computes them from X (polyfed's choice; Li et al. append
    zeros, which allows at most d types).

    `forward` takes `GraphTensors` and returns name -> generated parameter, in its shape.
    """

    def __init__(self, config: GHNConfig) -> None:
        super().__init__()
        columns = config.feature_columns
        self.config, gated = config, config.gnn == "gated"
        embedded = config.depth > 0 and (gated or config.passing == "asynchronous")
        self.gnn = nn.ModuleList(
            GatedGraphConv(config.latent)
            if gated
            else GraphConv(config.latent if t or embedded else columns, config.latent, mean=config.gnn == "sage")
            for t in range(config.depth)
        )
        if embedded:
            self.embed = nn.Linear(columns, config.latent, bias=False)
        if gated and config.depth:
            self.cell = nn.GRUCell(config.latent, config.latent)
        inputs, rank = config.latent if config.depth else columns, config.rank if config.head == "factored" else None
        if config.head == "lowrank":
            self.decoder = LowRankDecoder(
                inputs, config.hidden, config.rank, config.sizes, config.normalise, config.own_start
            )
            return
        self.heads = nn.ModuleDict({
            kind.key: TypeHead(kind, inputs, config.hidden, rank, config.normalise) for kind in config.catalogue.types
        })  # fmt: skip

    def encode_nodes(self, features: Tensor, edges: Tensor, levels: tuple[Level, ...] = ()) -> Tensor:
        """Returns nodes' final states, (V, d), from features, (V, k), and edges, (2, E).

        Asynchronous passing needs the graph's levels.
        """
        h = self.embed(features) if hasattr(self, "embed") else features
        sources, targets = edges
        mean = self.config.gnn == "sage"
        for layer in self.gnn:
            if self.config.passing == "synchronous":
                h = self._update_nodes(layer, h, aggregate_predecessors(h, sources, targets, len(h), mean))
                continue
            for nodes, level_sources, level_targets in levels:
                incoming = aggregate_predecessors(h, level_sources, level_targets, len(nodes), mean)
                h = h.index_copy(0, nodes, self._update_nodes(layer, h[nodes], incoming))
        return h

    def _update_nodes(self, layer: Any, node_states: Tensor, messages: Tensor) -> Tensor:
        if self.config.gnn == "gated":
            gated: Tensor = layer.update_nodes(node_states, messages, self.cell)
            return gated
        new: Tensor = layer.update_nodes(node_states, messages).relu()  # eq. 2
        return new

    def forward(self, graph: GraphTensors) -> dict[str, Tensor]:
        """Returns `{parameter: generated weight}` of a graph's network; a head does its type in one batch."""
        return dict(self.iterate_generated_weights(graph))

    def iterate_generated_weights(self, graph: GraphTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields (parameter's name, generated weight) for all parameters of the network, one head after the other.

        A caller that converts each weight at once keeps both versions in memory for one head only.
        """
        h = self.encode_nodes(graph.features, graph.edges, graph.levels)
        for kind, (nodes, rows, parameters) in graph.weight_sets.items():
            states = h[nodes]
            if len(nodes) > len(parameters):
                sums = states.new_zeros(len(parameters), states.shape[1]).index_add(0, rows, states)
                states = sums / rows.bincount(minlength=len(parameters))[:, None]
            shared = self.config.head == "lowrank"
            tensors_by_role = self.decoder(kind, states) if shared else self.heads[kind.key](states)
            yield from _name_weights(tensors_by_role, parameters)  # eq. 3


def _name_weights(
    tensors_by_role: Mapping[ParameterRole, Sequence[Tensor]], parameters: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (parameter's name, weight) for n layers of one type, from the weights that the head generated by role."""
    for role, all_sets in tensors_by_role.items():
        for names, tensor in zip(parameters, all_sets, strict=True):
            yield (names[role], tensor) if role in names else (names[TRANSPOSED], tensor.mT)


@lru_cache(maxsize=8)
def hypernetwork_size_in_bytes(config: GHNConfig) -> int:
    """Returns the bytes of a hypernetwork's tensors with names in a message, without allocating them.

    >>> hypernetwork_size_in_bytes(GHNConfig(LayerCatalogue((LayerType("linear", 20, 10),)), depth=0, hidden=4))
    5180
    """
    with torch.device("meta"), temporary_rng_seed(0):
        return safetensors_num_bytes({f"ghn/{name}": tensor for name, tensor in GHN(config).state_dict().items()})


def use_factored_heads_if_large(config: GHNConfig) -> GHNConfig:
    """Changes to low-rank ("factored") heads if dense ones would take more than `MAX_DENSE_BYTES`."""
    dense = replace(config, head="mlp")
    if build_after_memory_check(_describe_size(config), lambda: hypernetwork_size_in_bytes(dense)) > MAX_DENSE_BYTES:
        return replace(config, head="factored")
    return config


def shrink_to_size_of_networks(config: GHNConfig) -> GHNConfig:
    """Returns low-rank ("factored") heads, reduced until a message suits the largest network.

    Rank, latent entries and hidden units are reduced until it is no larger than `LIGHT_FACTOR` times the largest network
    of the catalogue, or the smallest form is reached.

    A catalogue that does not know the largest network stands for one that has each layer type once. `rank`, `latent` and
    `hidden` of the configuration are the largest values.

    >>> wide = GHNConfig(LayerCatalogue((LayerType("linear", 640, 320), LayerType("linear", 320, 100))))
    >>> light = shrink_to_size_of_networks(wide)
    >>> (light.head, light.rank, light.latent, light.hidden)
    ('factored', 32, 51, 16)
    >>> hypernetwork_size_in_bytes(light) < hypernetwork_size_in_bytes(wide) / 8
    True
    """
    shapes = (shape for kind in config.catalogue.types for shape in kind.parameter_shapes.values())
    largest = config.catalogue.largest_network or sum(math.prod(shape) for shape in shapes)
    light = replace(config, head="factored")
    for rank, latent, hidden in _LIGHT_SIZES:
        rank, latent, hidden = min(rank, config.rank), min(latent, config.latent), min(hidden, config.hidden)
        light = replace(light, rank=rank, latent=latent, hidden=hidden)
        size = build_after_memory_check(_describe_size(light), partial(hypernetwork_size_in_bytes, light))
        if size <= LIGHT_FACTOR * 4 * largest:
            break
    return light


def read_sizes_from_weights(config: GHNConfig, tensors: StateDict) -> GHNConfig:
    """Returns the configuration with the sizes of these tensors, however the server chose them.

    >>> from polyfed.hypernetworks.ghn_start import init_ghn_params
    >>> light = GHNConfig(LayerCatalogue((LayerType("linear", 64, 32),)), latent=8, hidden=4, head="factored", rank=2)
    >>> read_sizes_from_weights(replace(light, latent=51, hidden=16, rank=32), init_ghn_params(light, "kaiming", 0)) == light
    True
    """
    rank = next((t.shape[1] for name, t in tensors.items() if name.endswith(".rows")), config.rank)
    layers = (t.shape for name, t in tensors.items() if name.endswith(".hidden.weight"))
    hidden, inputs = next(layers, (config.hidden, config.latent))
    return replace(config, rank=rank, hidden=hidden, latent=inputs if config.depth else config.latent)


def describe_message_size_of_heads(config: GHNConfig) -> str:
    """Says how many MB a message takes with low-rank heads, and how many with dense ones."""
    factored, dense = (hypernetwork_size_in_bytes(replace(config, head=head)) / 2**20 for head in ("factored", "mlp"))
    return f"factored: {factored:.0f} MB each way a round, where the paper's heads (mlp) would send {dense:.0f} MB"


def build_ghn(config: GHNConfig) -> GHN:
    """Builds a hypernetwork; raises a `UserError` that describes its size if memory does not suffice."""
    return build_after_memory_check(_describe_size(config), lambda: GHN(config))


def _describe_size(config: GHNConfig) -> str:
    sizes = f"depth={config.depth}, latent={config.latent} and hidden={config.hidden}"
    return f"a graph hypernetwork of {len(config.catalogue.types)} layer types with {sizes}"


def decoder_sizes_from_weights(tensors: StateDict) -> Sizes:
    """Returns the sizes of a low-rank decoder, read from the shapes of a hypernetwork's tensors.

    Raises:
        ValueError: the hypernetwork has other heads.
    """
    names = ("decoder.rows", "decoder.columns", "decoder.core")
    if not all(name in tensors for name in names):
        raise ValueError(
            "the hypernetwork that the server sent has no low-rank decoder, and this client's settings say head=lowrank"
        )
    rows, columns, positions = (len(tensors[name]) for name in names)
    return rows, columns, positions


def catalogue_from_weights(tensors: StateDict) -> LayerCatalogue:
    """Returns the catalogue of layer types in the names of a hypernetwork's tensors.

    >>> from polyfed.hypernetworks.ghn_start import init_ghn_params
    >>> form = GHNConfig(LayerCatalogue((LayerType("linear", 20, 10),)))
    >>> catalogue_from_weights(init_ghn_params(form, "kaiming", seed=0)) == form.catalogue
    True
    """
    keys = {name.split(".")[1] for name in tensors if name.startswith("heads.")}
    return LayerCatalogue(tuple(LayerType.from_key(key) for key in keys))


@lru_cache(maxsize=4)
def cached_ghn(config: GHNConfig, device: torch.device) -> GHN:
    """Returns the process's hypernetwork of this configuration, into which callers load weights."""
    with temporary_rng_seed(0):  # the drawn weights are replaced; the caller's random state stays
        return build_ghn(config).to(device)
