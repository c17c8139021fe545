"""Prints the graph of a network's layers as tables, draws it, and writes a file (the catalogue) with the network's
types of layers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.errors import UserError
from polyfed.core.nn.module_cache import build_module
from polyfed.core.seeds import torch_generator
from polyfed.graphs import ArchitectureGraph, LayerCatalogue, LayerType
from polyfed.graphs.catalogue import read_graph_variant_of_catalogue
from polyfed.graphs.contraction import ContractionOptions
from polyfed.graphs.draw import draw_graph
from polyfed.graphs.graph_cache import extract_with_disk_cache
from polyfed.models import ModelSpec


def print_and_draw_layer_graph(
    spec: ModelSpec,
    contraction: ContractionOptions,
    *,
    has_integer_inputs: bool,
    plot: Path | None = None,
    catalogue: Path | None = None,
) -> None:
    """Prints a network's layer graph, draws it and adds its types to a catalogue if asked.

    Args:
        spec: the network.
        contraction: which operations are nodes.
        has_integer_inputs: whether its inputs are whole numbers (tokens).
        plot: the picture to write, .png or .svg; None writes none.
        catalogue: the file to write, or to add to if it is there; None writes none.

    Raises:
        UserError: the network cannot be built or followed, or a file cannot be read or written.
    """
    graph = contraction.apply(
        extract_with_disk_cache(
            build_module(spec, seed=0), _random_example(spec.input_shape, has_integer_inputs), contraction.kinds
        )
    )
    lines = []
    if plot is not None:
        draw_graph(graph, plot, title=f"{spec.name} {'×'.join(map(str, spec.input_shape))}: {_coverage_text(graph)}")
        lines.append(f"drawn in {plot}")
    if catalogue is not None:
        lines.append(_extend_catalogue(graph, catalogue, contraction))
    console = Console()
    for table in (_nodes_table(graph), _types_table(graph), _local_parameters_table(graph)):
        if table.row_count:
            console.print(table)
    for line in (f"{_coverage_text(graph)}; the network was followed by {graph.tracer}", *lines):
        print_line(console, line)


def _random_example(shape: Sequence[int], has_integer_inputs: bool) -> Tensor:
    generator = torch_generator(0)
    if has_integer_inputs:
        return torch.randint(0, 2, (2, *shape), generator=generator)  # 0 and 1 are tokens of any vocabulary
    return torch.randn(2, *shape, generator=generator)


def _extend_catalogue(graph: ArchitectureGraph, path: Path, contraction: ContractionOptions) -> str:
    """Writes the union of the file's catalogue and the graph's types; returns a line that says so."""
    before = LayerCatalogue.read_yaml(path) if path.exists() else LayerCatalogue(())
    nodes = "layers_and_norms" if contraction.norms == "nodes" else "layers"
    if before.types and (stated_graph := read_graph_variant_of_catalogue(path)) != nodes:
        part = "part of the layer before it" if stated_graph == "layers" else "a layer type of its own"
        raise UserError(
            f"in the layer catalogue {path} a norm is {part}; add to it with --graph {stated_graph}, or write another file"
        )
    largest = max(before.largest_network, graph.num_generated)
    union = LayerCatalogue((*before.types, *graph.layer_types), largest)
    if not union.types:
        raise UserError(f"the network has no layer that can be generated, so there is nothing to write to {path}")
    try:
        union.write_yaml(path, nodes)
    except OSError as error:
        raise UserError(f"cannot write the layer catalogue {str(path)!r} ({error.strerror})") from error
    return f"{len(union.types)} layer types in {path}, {len(union.types) - len(before.types)} of them new"


def _coverage_text(graph: ArchitectureGraph) -> str:
    share_text = f"{graph.coverage:.1%} of {sum(graph.parameter_sizes.values()):,} parameters are generated"
    return f"{share_text}, as {len(graph.generated_weights)} layers of {len(graph.layer_types)} types"


def _build_table(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> PlainTable:
    """Builds a table with named columns, each with its alignment."""
    table = PlainTable(title=title, title_justify="left")
    for name, justify in columns.items():
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _nodes_table(graph: ArchitectureGraph) -> PlainTable:
    rows = []
    for position, node in enumerate(graph.nodes):
        size = sum(graph.parameter_sizes[name] for name in node.parameters.values())
        kind = node.type.key if isinstance(node.type, LayerType) else node.type
        fate = "generated" if isinstance(node.type, LayerType) else "local" if node.type == "other" else ""
        before = " ".join(str(a) for a, b in graph.edges if b == position)
        rows.append((position, before, node.name, kind, f"{size:,}" if size else "", fate))
    columns = {
        "node": "right",
        "after": "left",
        "name": "left",
        "type": "left",
        "parameters": "right",
        "weights": "left",
    }
    return _build_table(f"{len(graph.nodes)} nodes and {len(graph.edges)} edges", columns, rows)


def _types_table(graph: ArchitectureGraph) -> PlainTable:
    rows = []
    for kind in graph.layer_types:
        nodes = [node for node in graph.generated_weights if node.type == kind]
        size = sum(graph.parameter_sizes[name] for node in nodes for name in node.parameters.values())
        rows.append((kind.key, len(nodes), f"{size:,}"))
    return _build_table("layer types", {"type": "left", "layers": "right", "parameters": "right"}, rows)


def _local_parameters_table(graph: ArchitectureGraph) -> PlainTable:
    rows = [(name, f"{graph.parameter_sizes[name]:,}", reason) for name, reason in graph.local_reasons.items()]
    return _build_table("parameters that stay with the client", {"name": "left", "size": "right", "why": "left"}, rows)
