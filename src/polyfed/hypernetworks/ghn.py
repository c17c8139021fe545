"""The graph hypernetwork (FLHA-GHN, section 4.2): a graph neural network and one MLP per layer type, which together turn
the graph of an architecture into weights for it.

Dimensions: V nodes, E edges, k node types (the catalogue and three marks), d latent entries of a node, H hidden entries
of a head, n sets of weights of one layer type, P numbers of a weight.
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

from polyfed.core.room import within_memory
from polyfed.core.seeds import derive, local_rng, torch_generator
from polyfed.core.tree import Tree
from polyfed.graphs.architecture import MARKS, ArchitectureGraph, LayerType, Role
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.hypernetworks.ghn_layers import GatedGraphConv, GraphConv, Level, gathered, sweeps
from polyfed.hypernetworks.heads import Factored, TypeHead

Gnn = Literal["graphconv", "gated", "sage"]
Head = Literal["mlp", "factored"]
Passing = Literal["synchronous", "asynchronous"]
Init = Literal["kaiming", "paper", "last_layer"]
LARGEST = 50 * 2**20
"""Bytes of a hypernetwork above which its heads are factored, unless the method says which they are."""
_CHAINS = 16  # random graphs on which the heads' activations are measured at initialisation


@final
@dataclass(frozen=True)
class Form:
    """What two graph hypernetworks must have in common so that one can take the other's weights.

    Args:
        catalogue: the layer types.
        depth: T, layers of the graph neural network; with 0 the heads see the node's type alone.
        latent: d.
        hidden: H.
        head: "mlp" (paper) or "factored" (polyfed's choice), see `Factored`.
        rank: of the factored heads.
        normalise: whether the GNN keeps the variance of its input and heads bring their hidden activations z to mean square
            1 (polyfed's choice). As PyG and torch initialise, differences between nodes shrink in each layer to 3 %
            of ‖h‖, and z is
            about 0.05: nearly all of a step then goes into the last layers' biases, the same for all nodes of a type.
        gnn: layers of the graph neural network: "graphconv" (paper, eq. 2), or the two others that appendix D tried,
            "gated" (`GatedGraphConv`) and "sage" (`GraphConv` with means).
        passing: "synchronous" (paper): in a layer all nodes are updated at once. "asynchronous" (tried in section 4.3): in
            a layer nodes are updated in the order of the data flow, and then against it, each from what the others have by
            then, with the same parameters in both directions (Zhang et al. 2019).
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
    """A graph as the hypernetwork reads it.

    Attributes: `features` X, one-hot, (V, k); `edges`, int64 (2, E), from and to; `sets`, by layer type, the nodes that use
    weights of this type (m,), to which of the n sets each belongs (m,), and of each set role -> parameter's name; `sweeps`,
    the levels of asynchronous passing, empty for synchronous.
    """

    features: Tensor
    edges: Tensor
    sets: Mapping[LayerType, tuple[Tensor, Tensor, tuple[Mapping[str, str], ...]]]
    sweeps: tuple[Level, ...] = ()


def tensors_of_graph(
    graph: ArchitectureGraph, catalogue: LayerCatalogue, device: torch.device, passing: Passing = "synchronous"
) -> GraphTensors:
    """The tensors of a graph whose layer types are all in the catalogue (see `ArchitectureGraph.restricted`)."""
    columns = {kind: column for column, kind in enumerate(catalogue.features)}
    types = torch.tensor([columns[node.type] for node in graph.nodes], device=device)
    edges = torch.tensor(graph.edges, dtype=torch.int64, device=device).reshape(-1, 2).T.contiguous()
    sets = {}
    for kind in graph.types:
        members = [made for made in graph.generated if made.type == kind]
        nodes = [(node, row) for row, made in enumerate(members) for node in made.nodes]
        positions, rows = (torch.tensor(column, device=device) for column in zip(*nodes, strict=True))
        sets[kind] = (positions, rows, tuple(made.parameters for made in members))
    order = sweeps(graph.edges, len(graph.nodes), device) if passing == "asynchronous" else ()
    return GraphTensors(F.one_hot(types, len(columns)).float(), edges, sets, order)


@final
class GHN(nn.Module):
    """GNN G(·; W_G) and heads {H_l(·; W_H^l)}.

    Layer t of the GNN is eq. 2, a `GraphConv` with ReLU: h_v ← σ(A h_v + B Σ_{u→v} h_u + b). Weights are eq. 3,
    θ^v = H_l(h_v^T); those that several nodes share are made of the mean of their h_v^T, so that no order of the nodes
    matters. Where a layer needs h_v of d entries before it (a GRU, or passing in an order), a linear map makes them of X
    (polyfed's choice; Li et al. append zeros, which takes fewer types than entries).

    `forward` takes `GraphTensors` and returns name -> generated parameter, in its shape.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        columns = len(form.catalogue.features)
        self.form, gated = form, form.gnn == "gated"
        embedded = form.depth > 0 and (gated or form.passing == "asynchronous")
        self.gnn = nn.ModuleList(
            GatedGraphConv(form.latent)
            if gated
            else GraphConv(form.latent if t or embedded else columns, form.latent, mean=form.gnn == "sage")
            for t in range(form.depth)
        )
        if embedded:
            self.embed = nn.Linear(columns, form.latent, bias=False)
        if gated and form.depth:
            self.cell = nn.GRUCell(form.latent, form.latent)
        inputs, rank = form.latent if form.depth else columns, form.rank if form.head == "factored" else None
        self.heads = nn.ModuleDict({
            kind.key: TypeHead(kind, inputs, form.hidden, rank, form.normalise) for kind in form.catalogue.types
        })  # fmt: skip

    def latent(self, features: Tensor, edges: Tensor, order: tuple[Level, ...] = ()) -> Tensor:
        """h^T of every node, (V, d), from X (V, k) and edges (2, E); asynchronous passing needs the levels of the graph."""
        h = self.embed(features) if hasattr(self, "embed") else features
        sources, targets = edges
        mean = self.form.gnn == "sage"
        for layer in self.gnn:
            if self.form.passing == "synchronous":
                h = self._updated(layer, h, gathered(h, sources, targets, len(h), mean))
                continue
            for nodes, those, places in order:
                incoming = gathered(h, those, places, len(nodes), mean)
                h = h.index_copy(0, nodes, self._updated(layer, h[nodes], incoming))
        return h

    def _updated(self, layer: Any, own: Tensor, incoming: Tensor) -> Tensor:
        if self.form.gnn == "gated":
            gated: Tensor = layer.update(own, incoming, self.cell)
            return gated
        new: Tensor = layer.update(own, incoming).relu()  # eq. 2
        return new

    def forward(self, graph: GraphTensors) -> dict[str, Tensor]:
        """All weights of the graph; the nodes of one type go through their head as one batch."""
        return dict(self.stream(graph))

    def stream(self, graph: GraphTensors) -> Iterator[tuple[str, Tensor]]:
        """The names and weights of `forward` one after the other: who turns each into another form at once never has both
        forms of more than one head's."""
        h = self.latent(graph.features, graph.edges, graph.sweeps)
        for kind, (nodes, rows, parameters) in graph.sets.items():
            own = h[nodes]
            if len(nodes) > len(parameters):
                sums = own.new_zeros(len(parameters), own.shape[1]).index_add(0, rows, own)
                own = sums / rows.bincount(minlength=len(parameters))[:, None]
            yield from _named_sets(self.heads[kind.key](own), parameters)  # eq. 3


def _named_sets(
    made: Mapping[Role, Sequence[Tensor]], parameters: Sequence[Mapping[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of n sets by the names of their parameters, from those by role."""
    for role, all_sets in made.items():
        yield from zip((names[role] for names in parameters), all_sets, strict=True)


@lru_cache(maxsize=8)
def num_bytes(form: Form) -> int:
    """Bytes of the tensors (W_G, W_H) of this form, which are the message in either direction; nothing is allocated.

    >>> num_bytes(Form(LayerCatalogue((LayerType("linear", 20, 10),)), depth=0, hidden=4))
    4300
    """
    with torch.device("meta"), local_rng(0):
        return sum(tensor.nbytes for tensor in GHN(form).state_dict().values())


def light(form: Form) -> Form:
    """The form, with factored heads where it would be more than `LARGEST` bytes with the paper's."""
    dense = replace(form, head="mlp")
    return replace(form, head="factored") if within_memory(_named(form), lambda: num_bytes(dense)) > LARGEST else form


def told_of_heads(form: Form) -> str:
    """How much the factored heads of a form send, in a few words."""
    light, dense = (num_bytes(replace(form, head=head)) / 2**20 for head in ("factored", "mlp"))
    return f"factored: {light:.0f} MB each way a round, where the paper's heads (mlp) would send {dense:.0f} MB"


def _within_memory(form: Form) -> GHN:
    return within_memory(_named(form), lambda: GHN(form))


def _named(form: Form) -> str:
    told = f"depth={form.depth}, latent={form.latent} and hidden={form.hidden}"
    return f"a graph hypernetwork of {len(form.catalogue.types)} layer types with {told}"


def create(form: Form, init: Init, seed: int) -> dict[str, Tensor]:
    """The initial tensors (W_G, W_H), by name.

    With `normalise` the GNN and the hidden layers have Kaiming's variance, shared between A and B, and zero biases; else
    they start as PyG and torch initialise them. At the start every scale s is 1, generated biases are 0, generated norm
    scales are 1, and the weights W have, by `init`,

    - "kaiming": variance 2/fan_in (He et al. 2015), since the last layer's is 2/(fan_in·H·E[z²]). E[z²] is measured per type
      on random graphs of the catalogue's types, for the server knows no client's graph;
    - "paper": variance 2/fan_out, He et al.'s other form, by section 4.2's sentence: all matrices of W_H are Xavier-normal
      with zero bias, the last times √(2·c_in/H), so that H·E[z²]·2/(P+H)·2·c_in/H = 2/fan_out · P/(P+H) where E[z²] = ½:
      that of a (leaky) ReLU of pre-activations of variance 1. For these Xavier's hidden layer needs ‖h_v^T‖² = (d+H)/2. So
      the GNN's last layer, of which the sentence says nothing, is multiplied by what is lacking, measured as for "kaiming".
      With `normalise` E[z²] is 1 instead, and the last layer's variance half of it. A scale s of zero bias would be random,
      with a mean of 0: its bias of 1 is polyfed's choice;
    - "last_layer": that factor on the last layer alone, and hidden layers as the others, so that E[z²] is far below ½ and W
      small without `normalise`.

    >>> from polyfed.graphs import LayerType
    >>> tensors = create(Form(LayerCatalogue((LayerType("linear", 20, 10),))), "kaiming", seed=0)
    >>> tuple(tensors["heads.linear-20-10-k-s-g1-b1-d-none.out.weight"].shape)
    (200, 16)
    """
    with local_rng(derive(seed, "graph hypernetwork")):
        ghn = _within_memory(form)
        if form.normalise:
            _reset_trunk(ghn)
        if init == "paper":
            _reset_hidden(ghn, form, seed)
        energies = _energies(ghn, form, seed) if init == "kaiming" else {}
        with torch.no_grad():
            for kind in form.catalogue.types:
                head = ghn.heads[kind.key]
                assert isinstance(head, TypeHead)
                if init == "kaiming":
                    variance = 2 / (kind.fan_in * energies[kind])
                else:  # of Xavier-normal · √(2·c_in/H) on the (P, H) matrix, which supposes E[z²] = ½
                    variance = 2 / (form.hidden + math.prod(kind.shapes["weight"])) * 2 * kind.c_in / form.hidden
                    variance = variance / 2 if init == "paper" and form.normalise else variance
                _reset(head, kind, variance)
    return {name: tensor.detach().clone() for name, tensor in ghn.state_dict().items()}


def _reset_trunk(ghn: GHN) -> None:
    """Activations keep their variance from layer to layer: after one other node, A h and B Σ h have half of it each. A GRU's
    matrices stay as they are drawn."""
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


def _reset(head: TypeHead, kind: LayerType, variance: float) -> None:
    """Initial weights of a head's last layers; `variance` is that of the entries by which z is multiplied."""
    nn.init.zeros_(head.scale.weight)
    nn.init.ones_(head.scale.bias)
    nn.init.zeros_(head.out.bias)
    for role, name in head.vectors.items():
        layer = head.get_submodule(name)
        nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
        nn.init.constant_(layer.bias, 1.0 if role == "scale" else 0.0)  # type: ignore[arg-type]
    if isinstance(head.out, Factored):
        # The product of the three has the variance of a dense layer. Rows and columns are small and the core large, so that
        # a step through the core, which all entries of W share, moves W about as much as one of the base.
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
def _reset_hidden(ghn: GHN, form: Form, seed: int) -> None:
    """Hidden layers of the heads as section 4.2 has them, Xavier-normal with zero bias; and the GNN's last layer of the
    size at which z has the mean square ½ before it is normalised. What single draws lack, and all of it where the GNN's
    last layer does not scale h_v^T (a GRU, passing in an order, no GNN), hidden layers get."""
    heads = {kind: head for kind in form.catalogue.types if isinstance(head := ghn.heads[kind.key], TypeHead)}
    for head in heads.values():
        nn.init.xavier_normal_(head.hidden.weight)
        nn.init.zeros_(head.hidden.bias)
    lacking = {
        kind: math.sqrt(form.hidden / 2 / energy)
        for kind, energy in _energies(ghn, form, seed, normalised=False).items()
    }
    growth = 1.0
    if form.depth and form.gnn != "gated" and form.passing == "synchronous":
        growth = fmean(value**-2 for value in lacking.values()) ** -0.5
        for parameter in ghn.gnn[-1].parameters():
            parameter.mul_(growth)
    for kind, head in heads.items():
        head.hidden.weight.mul_(lacking[kind] / growth)


@torch.no_grad()
def _energies(ghn: GHN, form: Form, seed: int, normalised: bool = True) -> dict[LayerType, float]:
    """H·E[z²] of each type: the mean of ‖z‖² over random circles, each of which has every node type once. With normalised z
    it is H up to rounding; `normalised=False` takes z before that. Asynchronous passing has a beginning and an end, and so
    chains instead of circles."""
    features = len(form.catalogue.features)
    totals = dict.fromkeys(form.catalogue.types, 0.0)
    generator = torch_generator(derive(seed, "graph hypernetwork", "chains"))
    for _ in range(_CHAINS):
        order = torch.randperm(features, generator=generator)
        edges = torch.stack([order, order.roll(-1)])
        levels: tuple[Level, ...] = ()
        if form.passing == "asynchronous":
            edges = edges[:, :-1]
            levels = sweeps([(int(a), int(b)) for a, b in edges.T], features, edges.device)
        h = ghn.latent(torch.eye(features), edges, levels)
        for column, kind in enumerate(form.catalogue.types, start=len(MARKS)):
            head = ghn.heads[kind.key]
            assert isinstance(head, TypeHead)
            row = h[column : column + 1]
            z = head.activations(row) if normalised else F.leaky_relu(head.hidden(row))
            totals[kind] += float(z.square().sum()) / _CHAINS
    # With few latent entries the GNN's ReLUs may leave a type's nodes h = 0 on all these graphs: then any size does.
    return {kind: total or float(form.hidden) for kind, total in totals.items()}


def catalogue_of(tensors: Tree) -> LayerCatalogue:
    """The catalogue that a hypernetwork was made for, read from the names of its tensors: with the weights a client gets the
    public catalogue.

    >>> form = Form(LayerCatalogue((LayerType("linear", 20, 10),)))
    >>> catalogue_of(create(form, "kaiming", seed=0)) == form.catalogue
    True
    """
    keys = {name.split(".")[1] for name in tensors if name.startswith("heads.")}
    return LayerCatalogue(tuple(LayerType.from_key(key) for key in keys))


@lru_cache(maxsize=4)
def scratch_ghn(form: Form, device: torch.device) -> GHN:
    """One hypernetwork of this form a process, to be filled before each use."""
    return _within_memory(form).to(device)
