"""Reduces graphs of networks to fewer nodes: merges norm layers into the layers before them, and removes sums and
concatenations.

FLHA-GHN's section 4.2 has a node for each convolution and linear layer and does not mention norm layers; appendix B says
that the edges alone are enough where networks have residual sums.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

from polyfed.graphs.architecture import ArchitectureGraph, LayerType, Node
from polyfed.graphs.tables import keep_tables_local
from polyfed.graphs.tracing.layer_flow import Kinds

NormTreatment = Literal["nodes", "layers", "local"]
_LOCAL = "norm layers stay with the client (norms=local); norms=generate generates them"


@final
@dataclass(frozen=True)
class ContractionOptions:
    """Configures which operations of a network are nodes of its graph: norm layers, sums and concatenations, tables.

    Args:
        norms: "nodes": each norm layer is a node, as `extract` returns it; "layers": it is part of the layer before it, see
            `fold_norms_into_previous_layers`; "local": no norm layer is a node, and all stay with the client, see
            `drop_norms`.
        joins: whether sums and concatenations are nodes.
        kinds: the kinds of layers with which a graph is extracted, see `extract`.
        tables: "local": tables of which the data choose rows stay with the client, see `keep_tables_local`.

    >>> import torch
    >>> from torch import nn
    >>> from polyfed.graphs import extract
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    >>> graph = ContractionOptions("layers").apply(extract(net, torch.zeros(2, 1, 8, 8)))
    >>> [node.type.key for node in graph.nodes]
    ['conv2d-1-4-k3x3-s1x1-g1-b0-d1x1-relu-batch_norm-b1']
    """

    norms: NormTreatment = "nodes"
    joins: bool = True
    kinds: Kinds = "all"
    tables: Literal["generated", "local"] = "generated"

    def apply(self, graph: ArchitectureGraph) -> ArchitectureGraph:
        """Returns a graph from `extract` with its nodes reduced as configured."""
        if self.tables == "local":
            graph = keep_tables_local(graph)
        if self.norms == "layers":
            graph = fold_norms_into_previous_layers(graph)
        elif self.norms == "local":
            graph = drop_norms(graph)
        return graph if self.joins else bypass_joins(graph)


NO_CONTRACTION = ContractionOptions()
"""Leaves graphs as `extract` returns them."""


def fold_norms_into_previous_layers(graph: ArchitectureGraph) -> ArchitectureGraph:
    """Returns a graph in which each norm layer is part of the node of the convolution or linear layer before it.

    A norm is folded if its only predecessor is the layer, no other norm reads the layer's output, it has one scale for each
    of the layer's outputs, and layer and norm share weights with the same other uses, if any. Every other norm stays a node:
    one after a sum or a concatenation, at the beginning, the second of two in a row, or one of two different norms after a
    shared layer.
    """
    before, after = _neighbours_of_nodes(graph)
    norm_after: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        readers = [reader for reader in after[position] if _is_norm(graph.nodes[reader])]
        if _has_weight_matrix(node) and len(readers) == 1 and before[readers[0]] == {position}:
            norm_after[position] = readers[0]
    sets_by_nodes = {weight_set.nodes: weight_set for weight_set in graph.generated_weights}
    nodes, moved = list(graph.nodes), dict[int, int]()
    for layers, weight_set in sets_by_nodes.items():
        norms = tuple(sorted(norm_after[layer] for layer in layers if layer in norm_after))
        if (
            len(norms) < len(layers)
            or norms not in sets_by_nodes
            or sets_by_nodes[norms].type.c_out != weight_set.type.c_out
        ):
            continue
        norm = sets_by_nodes[norms]
        kind = replace(weight_set.type, norm=norm.type.kind, norm_bias=norm.type.bias)
        roles = {"scale" if role == "weight" else "shift": name for role, name in norm.parameters.items()}
        for layer in layers:
            nodes[layer] = replace(nodes[layer], type=kind, parameters={**weight_set.parameters, **roles})
            moved[norm_after[layer]] = layer
    edges = [(moved.get(start, start), moved.get(end, end)) for start, end in graph.edges]
    folded = replace(graph, nodes=tuple(nodes), edges=tuple(edges), stored_head=graph.head_parameter_names)
    return _renumber_nodes(folded, moved)


def drop_norms(graph: ArchitectureGraph) -> ArchitectureGraph:
    """Returns a graph without norm layers, whose scales and shifts the client keeps."""
    norms = [position for position, node in enumerate(graph.nodes) if _is_norm(node)]
    reasons = {name: _LOCAL for position in norms for name in graph.nodes[position].parameters.values()}
    reasons = {**graph.local_reasons, **reasons}
    local = {name: reasons[name] for name in graph.parameter_sizes if name in reasons}
    return _remove_nodes(replace(graph, local_reasons=local), norms)


def bypass_joins(graph: ArchitectureGraph) -> ArchitectureGraph:
    """Returns a graph without sums and concatenations: layers before them lead to those after.

    >>> a, b, c = (Node(name, "other", {name: name}) for name in "abc")
    >>> graph = ArchitectureGraph((a, b, Node("a + b", "add", {}), c), ((0, 1), (0, 2), (1, 2), (2, 3)), {}, {})
    >>> bypass_joins(graph).edges
    ((0, 1), (0, 2), (1, 2))
    """
    return _remove_nodes(
        graph, [position for position, node in enumerate(graph.nodes) if node.type in ("add", "concat")]
    )


def _is_norm(node: Node) -> bool:
    return isinstance(node.type, LayerType) and node.type.is_norm


def _has_weight_matrix(node: Node) -> bool:
    return isinstance(node.type, LayerType) and node.type.is_matrix


def _neighbours_of_nodes(graph: ArchitectureGraph) -> tuple[list[set[int]], list[set[int]]]:
    """Returns the predecessors of each node, and the successors of each node."""
    before: list[set[int]] = [set() for _ in graph.nodes]
    after: list[set[int]] = [set() for _ in graph.nodes]
    for start, end in graph.edges:
        before[end].add(start)
        after[start].add(end)
    return before, after


def _remove_nodes(graph: ArchitectureGraph, positions: Iterable[int]) -> ArchitectureGraph:
    """Returns a graph without these nodes, with their predecessors joined to their successors."""
    dropped = set(positions)
    before, after = _neighbours_of_nodes(graph)
    for position in dropped:
        for start in before[position]:
            after[start] = after[start] - {position} | after[position]
        for end in after[position]:
            before[end] = before[end] - {position} | before[position]
    edges = tuple((start, end) for start, ends in enumerate(after) if start not in dropped for end in ends)
    return _renumber_nodes(replace(graph, edges=edges, stored_head=graph.head_parameter_names), dropped)


def _renumber_nodes(graph: ArchitectureGraph, dropped: Collection[int]) -> ArchitectureGraph:
    """Returns a graph without dropped nodes, which no edge uses, renumbered, with sorted edges."""
    positions = [position for position in range(len(graph.nodes)) if position not in dropped]
    number: Mapping[int, int] = {position: k for k, position in enumerate(positions)}
    edges = {(number[start], number[end]) for start, end in graph.edges if start != end}
    return replace(graph, nodes=tuple(graph.nodes[position] for position in positions), edges=tuple(sorted(edges)))
