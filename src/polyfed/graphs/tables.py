"""Gives nodes to parameters that belong to no layer alone, and tells each layer type how large its weights are in a newly
built network.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.graphs.architecture import TRANSPOSED, ArchitectureGraph, LayerType, Node
from polyfed.graphs.recognition.layer_plans import type_by_shape

_PRIVATE_TABLE = (
    "tables of which the data choose rows stay with the client (tables=local), since rows that come back unchanged would "
    "tell which words it has; tables=generated generates them"
)
_DIGITS = 3  # of a mean or standard deviation


def set_starts_of_layer_types(nodes: Sequence[Node], parameters: Mapping[str, Tensor]) -> tuple[Node, ...]:
    """Returns the nodes with the mean and standard deviation of their weights in their layer types (`start`).

    A mean that chance explains is 0. Nodes that share a weight share a type.
    """
    types: dict[str, LayerType] = {}
    updated = []
    for node in nodes:
        if isinstance(node.type, LayerType):
            name = node.parameters.get("weight") or node.parameters[TRANSPOSED]
            if name not in types:
                types[name] = replace(node.type, start=_measure_start(parameters[name]))
            node = replace(node, type=types[name])
        updated.append(node)
    return tuple(updated)


@torch.no_grad()
def _measure_start(weight: Tensor) -> tuple[float, float] | None:
    spread, mean = (float(value) for value in torch.std_mean(weight.detach().float(), correction=0))
    if not (math.isfinite(spread) and math.isfinite(mean)):
        return None
    if abs(mean) <= 4 * spread / math.sqrt(weight.numel()):
        mean = 0.0
    return float(f"{mean:.{_DIGITS}g}"), float(f"{spread:.{_DIGITS}g}")


def split_into_tables(
    nodes: Sequence[Node], edges: Sequence[tuple[int, int]], clash: Set[str], parameters: Mapping[str, Tensor]
) -> tuple[list[Node], tuple[tuple[int, int], ...]]:
    """Replaces nodes that use a parameter of `clash` by chains of nodes of one parameter each.

    They are typed by shape alone, so that layers that use one parameter in different ways share it.

    A table from which words choose rows remains one, since its rows tell which words occur.
    """
    lookups = {
        name
        for node in nodes
        if isinstance(node.type, LayerType) and node.type.kind == "embedding"
        for name in node.parameters.values()
    }
    split: list[Node] = []
    first: list[int] = []
    last: list[int] = []
    chains: list[tuple[int, int]] = []
    for node in nodes:
        first.append(len(split))
        if clash & set(node.parameters.values()):
            for name in node.parameters.values():
                tensor = parameters[name]
                by_shape = type_by_shape(tensor)
                assert by_shape is not None  # empty parameters have no type to clash with
                if name in lookups:
                    by_shape = LayerType("embedding", tensor.shape[0], tensor.shape[1], bias=False)
                if len(split) > first[-1]:
                    chains.append((len(split) - 1, len(split)))
                split.append(Node(name, by_shape, {"weight": name}))
        else:
            split.append(node)
        last.append(len(split) - 1)
    moved = [(last[start], first[end]) for start, end in edges]
    return split, tuple(sorted({*moved, *chains}))


def keep_tables_local(graph: ArchitectureGraph) -> ArchitectureGraph:
    """Returns a graph in which lookup tables, such as embeddings of words or categories, stay with the client."""
    words = {node.type for node in graph.nodes if isinstance(node.type, LayerType) and node.type.kind == "embedding"}
    restricted = graph.restrict_to_types([kind for kind in graph.layer_types if kind not in words])
    new = restricted.local_reasons.keys() - graph.local_reasons.keys()
    reasons = {name: _PRIVATE_TABLE if name in new else reason for name, reason in restricted.local_reasons.items()}
    return replace(restricted, local_reasons=reasons)
