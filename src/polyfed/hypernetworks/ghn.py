"""Defines the graph hypernetwork (FLHA-GHN, section 4.2), which generates a network's weights from the graph of its
layers.

It consists of a graph neural network and one MLP (head) per layer type.

Dimensions: V nodes, E edges, k node types (the catalogue and three marks), d latent entries of a node, H hidden units of a
head, n sets of weights of one layer type, P entries of a weight tensor.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.core.seeds import derive_seed, temporary_rng_seed, torch_generator
from polyfed.core.state_dict import StateDict
from polyfed.graphs.architecture import NODE_MARKS, ArchitectureGraph, LayerType, ParameterRole
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.hypernetworks.ghn_heads import Factored, TypeHead
from polyfed.hypernetworks.ghn_layers import (
    GatedGraphConv,
    GraphConv,
    Level,
    aggregate_predecessors,
    forward_backward_levels,
)

Gnn = Literal["graphconv", "gated", "sage"]
Head = Literal["mlp", "factored"]
Passing = Literal["synchronous", "asynchronous"]
Init = Literal["kaiming", "paper", "last_layer"]
MAX_DENSE_BYTES = 50 * 2**20
"""Size of a hypernetwork in bytes above which its heads are factored, unless the method's settings choose the heads."""
_CHAINS = 16  # number of random graphs on which the heads' activations are measured at initialisation


@final
@dataclass(frozen=True)
class GHNConfig:
    """Describes the form of a graph hypernetwork; hypernetworks with equal configurations can exchange weights.

    Args:
        catalogue: the layer types.
        depth: T, number of layers of the graph neural network; with 0 the heads see only the node's type.
        latent: d.
        hidden: H.
        head: "mlp" (paper) or "factored" (polyfed's choice), see `Factored`.
        rank: rank of the factored heads.
        normalise: makes the GNN keep the variance of its input, and heads scale their hidden activations z to mean square 1
            (polyfed's choice). With the initialisation of PyG and torch, each layer shrinks differences between nodes to
            3 % of ‖h‖, and z is about 0.05: then nearly all of a step goes into the last layers' biases, which are the same
            for all nodes of a type.
        gnn: layers of the graph neural network: "graphconv" (paper, eq. 2), or the two others that appendix D tried,
            "gated" (`GatedGraphConv`) and "sage" (`GraphConv` with means).
        passing: "synchronous" (paper): a layer updates all nodes at once. "asynchronous" (tried in section 4.3): a layer
            updates nodes in the order of the data flow, and then in the reverse order, each from the current states of the
            others, with the same parameters in both directions (Zhang et al. 2019).
    """

    catalogue: LayerCatalogue
    depth: int = 6
    latent: int = 51
    hidden: int = 16
    head: Head = "mlp"
    rank: int = 16
    normalise: bool = True
    gnn: Gnn = "graphconv"
    passing: Passing = "synchronous"


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
    graph: ArchitectureGraph, catalogue: LayerCatalogue, device: torch.device, passing: Passing = "synchronous"
) -> GraphTensors:
    """Converts a network's graph to tensors; the catalogue must have all its layer types (see
    `ArchitectureGraph.restrict_to_types`)."""
    columns = {kind: column for column, kind in enumerate(catalogue.node_types)}
    types = torch.tensor([columns[node.type] for node in graph.nodes], device=device)
    edges = torch.tensor(graph.edges, dtype=torch.int64, device=device).reshape(-1, 2).T.contiguous()
    sets = {}
    for kind in graph.layer_types:
        members = [weight_set for weight_set in graph.generated_weights if weight_set.type == kind]
        nodes = [(node, row) for row, weight_set in enumerate(members) for node in weight_set.nodes]
        positions, rows = (torch.tensor(column, device=device) for column in zip(*nodes, strict=True))
        sets[kind] = (positions, rows, tuple(weight_set.parameters for weight_set in members))
    order = forward_backward_levels(graph.edges, len(graph.nodes), device) if passing == "asynchronous" else ()
    return GraphTensors(F.one_hot(types, len(columns)).float(), edges, sets, order)


@final
class GHN(nn.Module):
    """Generates a network's weights from the graph of its layers: a graph neural network computes a state for each
    layer, and one head per layer type turns states into weights.

    The GNN is G(·; W_G), and the heads are {H_l(·; W_H^l)}. Layer t of the GNN is eq. 2, a `GraphConv` with ReLU: h_v ←
    σ(A h_v + B Σ_{u→v} h_u + b). Weights are eq. 3, θ^v = H_l(h_v^T). Weights that several nodes share are generated
    from the mean of their h_v^T, so that the order of the nodes does not matter. Where the first layer needs h_v with d
    entries (a GRU, or asynchronous passing), a linear map computes them from X (polyfed's choice; Li et al. append
    zeros, which allows at most d types).

    `forward` takes `GraphTensors` and returns name -> generated parameter, in its shape.
    """

    def __init__(self, config: GHNConfig) -> None:
        super().__init__()
        columns = len(config.catalogue.node_types)
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
        self.heads = nn.ModuleDict({
            kind.key: TypeHead(kind, inputs, config.hidden, rank, config.normalise) for kind in config.catalogue.types
        })  # fmt: skip

    def encode_nodes(self, features: Tensor, edges: Tensor, levels: tuple[Level, ...] = ()) -> Tensor:
        """Returns the final state of each node, shape (V, d), from the node features, shape (V, k), and the edges,
        shape (2, E).

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
        """Returns `{parameter's name: generated weight}` for the network with this graph; a head processes all nodes of
        its type as one batch."""
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
            yield from _name_weights(self.heads[kind.key](states), parameters)  # eq. 3


def _name_weights(
    tensors_by_role: Mapping[ParameterRole, Sequence[Tensor]], parameters: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (parameter's name, weight) for n layers of one type, from the weights that the head generated by role."""
    for role, all_sets in tensors_by_role.items():
        yield from zip((names[role] for names in parameters), all_sets, strict=True)


@lru_cache(maxsize=8)
def hypernetwork_size_in_bytes(config: GHNConfig) -> int:
    """Returns the number of bytes that the tensors of a hypernetwork take in a message, without allocating them.

    >>> hypernetwork_size_in_bytes(GHNConfig(LayerCatalogue((LayerType("linear", 20, 10),)), depth=0, hidden=4))
    4300
    """
    with torch.device("meta"), temporary_rng_seed(0):
        return sum(tensor.nbytes for tensor in GHN(config).state_dict().values())


def use_factored_heads_if_large(config: GHNConfig) -> GHNConfig:
    """Returns the configuration, changed to low-rank ("factored") heads if dense heads would take more than
    `MAX_DENSE_BYTES`."""
    dense = replace(config, head="mlp")
    return (
        replace(config, head="factored")
        if build_after_memory_check(_describe_size(config), lambda: hypernetwork_size_in_bytes(dense)) > MAX_DENSE_BYTES
        else config
    )


def describe_message_size_of_heads(config: GHNConfig) -> str:
    """Returns a text that says how many MB a hypernetwork takes in a message with low-rank heads, and how many with
    dense heads."""
    factored, dense = (hypernetwork_size_in_bytes(replace(config, head=head)) / 2**20 for head in ("factored", "mlp"))
    return f"factored: {factored:.0f} MB each way a round, where the paper's heads (mlp) would send {dense:.0f} MB"


def _build_ghn(config: GHNConfig) -> GHN:
    return build_after_memory_check(_describe_size(config), lambda: GHN(config))


def _describe_size(config: GHNConfig) -> str:
    sizes = f"depth={config.depth}, latent={config.latent} and hidden={config.hidden}"
    return f"a graph hypernetwork of {len(config.catalogue.types)} layer types with {sizes}"


def init_ghn_params(config: GHNConfig, init: Init, seed: int) -> dict[str, Tensor]:
    """Returns `{name: tensor}` with random initial weights of a graph hypernetwork.

    With `normalise` the GNN and the hidden layers have Kaiming's variance, shared between A and B, and zero biases;
    otherwise they start as PyG and torch initialise them. At the start every scale s is 1, generated biases are 0, generated
    norm scales are 1, and `init` determines the variance of the generated weights W:

    - "kaiming": variance 2/fan_in (He et al. 2015), since the last layer's variance is 2/(fan_in·H·E[z²]). E[z²] is measured
      per type on random graphs of the catalogue's types, since the server does not know the clients' graphs;
    - "paper": variance 2/fan_out, He et al.'s other form, as section 4.2 says: all matrices of W_H are Xavier-normal with
      zero bias, the last one times √(2·c_in/H), so that H·E[z²]·2/(P+H)·2·c_in/H = 2/fan_out · P/(P+H) if E[z²] = ½, the
      value for a (leaky) ReLU of pre-activations of variance 1. To have that variance, Xavier's hidden layer needs
      ‖h_v^T‖² = (d+H)/2. The paper does not say how the GNN is initialised; so its last layer is multiplied by the missing
      factor, measured as for "kaiming". With `normalise`, E[z²] is 1 instead, and the last layer's variance is halved. A
      scale s with zero bias would be random with mean 0: its bias of 1 is polyfed's choice;
    - "last_layer": the factor √(2·c_in/H) on the last layer alone, and hidden layers as for "kaiming"; without `normalise`,
      E[z²] is then far below ½ and W is small.

    >>> from polyfed.graphs import LayerType
    >>> tensors = init_ghn_params(GHNConfig(LayerCatalogue((LayerType("linear", 20, 10),))), "kaiming", seed=0)
    >>> tuple(tensors["heads.linear-20-10-k-s-g1-b1-d-none.out.weight"].shape)
    (200, 16)
    """
    with temporary_rng_seed(derive_seed(seed, "graph hypernetwork")):
        ghn = _build_ghn(config)
        if config.normalise:
            _reset_trunk(ghn)
        if init == "paper":
            _reset_hidden(ghn, config, seed)
        energies = _hidden_energies(ghn, config, seed) if init == "kaiming" else {}
        with torch.no_grad():
            for kind in config.catalogue.types:
                head = ghn.heads[kind.key]
                assert isinstance(head, TypeHead)
                if init == "kaiming":
                    variance = 2 / (kind.fan_in * energies[kind])
                else:  # variance of Xavier-normal · √(2·c_in/H) for the (P, H) matrix, which assumes E[z²] = ½
                    variance = (
                        2 / (config.hidden + math.prod(kind.parameter_shapes["weight"])) * 2 * kind.c_in / config.hidden
                    )
                    variance = variance / 2 if init == "paper" and config.normalise else variance
                _reset_head(head, kind, variance)
    return {name: tensor.detach().clone() for name, tensor in ghn.state_dict().items()}


def _reset_trunk(ghn: GHN) -> None:
    """Initialises the GNN and the heads' hidden layers so that activations keep their variance from layer to layer.

    A h and B Σ h each have half of it if a node has one predecessor. The matrices of a GRU keep torch's
    initialisation.
    """
    for name, parameter in ghn.named_parameters():
        if name.endswith("bias") or name.startswith("cell.bias"):
            nn.init.zeros_(parameter)
        elif name == "embed.weight":
            nn.init.normal_(parameter)  # so that each node's h has the variance 1
        elif ".lin_" in name:
            nn.init.kaiming_normal_(parameter)
            parameter.data.mul_(2**-0.5)
        elif name.endswith("hidden.weight"):
            nn.init.kaiming_normal_(parameter)


def _reset_head(head: TypeHead, kind: LayerType, variance: float) -> None:
    """Initialises a head's last layers; entries of the matrix that z is multiplied by get this variance."""
    nn.init.zeros_(head.scale.weight)
    nn.init.ones_(head.scale.bias)
    nn.init.zeros_(head.out.bias)
    for role, name in head.linear_layer_by_role_except_weight.items():
        layer = head.get_submodule(name)
        nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
        nn.init.constant_(layer.bias, 1.0 if role == "scale" else 0.0)  # type: ignore[arg-type]
    if isinstance(head.out, Factored):
        # The product of the three has the variance of a dense layer. Rows and columns are small and the core large, so that
        # a step of the core, which all entries of W share, moves W about as much as a step of the bias.
        rank, hidden = head.out.rows.shape[1], head.out.core.shape[2]
        nn.init.normal_(head.out.rows, std=(rank * hidden) ** -0.25)
        nn.init.normal_(head.out.columns, std=(rank * hidden) ** -0.25)
        nn.init.normal_(head.out.core, std=math.sqrt(hidden * variance))
    elif kind.is_norm:
        nn.init.zeros_(head.out.weight)
        nn.init.ones_(head.out.bias)
    else:
        nn.init.normal_(head.out.weight, std=math.sqrt(variance))


@torch.no_grad()
def _reset_hidden(ghn: GHN, config: GHNConfig, seed: int) -> None:
    """Initialises the heads' hidden layers (Xavier-normal, zero bias: section 4.2), and scales the GNN's last layer.

    The scale gives z mean square ½ before it is normalised. Hidden layers are scaled by the rest: by the deviation of
    single draws, and by all of the factor where the GNN's last layer does not scale h_v^T (a GRU, asynchronous
    passing, no GNN).
    """
    heads = {kind: head for kind in config.catalogue.types if isinstance(head := ghn.heads[kind.key], TypeHead)}
    for head in heads.values():
        nn.init.xavier_normal_(head.hidden.weight)
        nn.init.zeros_(head.hidden.bias)
    lacking = {
        kind: math.sqrt(config.hidden / 2 / energy)
        for kind, energy in _hidden_energies(ghn, config, seed, normalised=False).items()
    }
    growth = 1.0
    if config.depth and config.gnn != "gated" and config.passing == "synchronous":
        growth = fmean(value**-2 for value in lacking.values()) ** -0.5
        for parameter in ghn.gnn[-1].parameters():
            parameter.mul_(growth)
    for kind, head in heads.items():
        head.hidden.weight.mul_(lacking[kind] / growth)


@torch.no_grad()
def _hidden_energies(ghn: GHN, config: GHNConfig, seed: int, normalised: bool = True) -> dict[LayerType, float]:
    """Measures, for each layer type, the mean squared norm of the head's hidden activations on random graphs.

    This is H·E[z²], the mean of ‖z‖² over random circles of nodes, each with every node type once. Normalised z gives H
    up to rounding; `normalised=False` takes z before normalisation. Asynchronous passing needs a beginning and an end,
    so that chains take the place of circles.
    """
    features = len(config.catalogue.node_types)
    totals = dict.fromkeys(config.catalogue.types, 0.0)
    generator = torch_generator(derive_seed(seed, "graph hypernetwork", "chains"))
    for _ in range(_CHAINS):
        order = torch.randperm(features, generator=generator)
        edges = torch.stack([order, order.roll(-1)])
        levels: tuple[Level, ...] = ()
        if config.passing == "asynchronous":
            edges = edges[:, :-1]
            levels = forward_backward_levels([(int(a), int(b)) for a, b in edges.T], features, edges.device)
        h = ghn.encode_nodes(torch.eye(features), edges, levels)
        for column, kind in enumerate(config.catalogue.types, start=len(NODE_MARKS)):
            head = ghn.heads[kind.key]
            assert isinstance(head, TypeHead)
            row = h[column : column + 1]
            z = head.hidden_activations(row) if normalised else F.leaky_relu(head.hidden(row))
            totals[kind] += float(z.square().sum()) / _CHAINS
    # With few latent entries the GNN's ReLUs may set h = 0 for all nodes of a type on all these graphs: then any value
    # works.
    return {kind: total or float(config.hidden) for kind, total in totals.items()}


def catalogue_from_weights(tensors: StateDict) -> LayerCatalogue:
    """Returns the catalogue of layer types, read from the names of a hypernetwork's tensors, so that clients need not
    receive it separately.

    >>> form = GHNConfig(LayerCatalogue((LayerType("linear", 20, 10),)))
    >>> catalogue_from_weights(init_ghn_params(form, "kaiming", seed=0)) == form.catalogue
    True
    """
    keys = {name.split(".")[1] for name in tensors if name.startswith("heads.")}
    return LayerCatalogue(tuple(LayerType.from_key(key) for key in keys))


@lru_cache(maxsize=4)
def cached_ghn(config: GHNConfig, device: torch.device) -> GHN:
    """Returns the hypernetwork of this configuration that the process reuses; callers load weights into it before each
    use."""
    with temporary_rng_seed(0):  # the drawn weights are replaced; the caller's random state stays
        return _build_ghn(config).to(device)
