"""Draws an architecture graph as a picture."""

import math
import textwrap
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from polyfed.data.plot import save_figure
from polyfed.graphs.architecture import NONE, RECURRENT_KINDS, ArchitectureGraph, LayerType, Node

_COLOURS = {
    "conv": "#cfe2f3", "linear": "#d9ead3", "norm": "#eeeeee", "join": "#fce5cd", "other": "#ffffff",
    "recurrent": "#d9d2e9", "lookup": "#fff2cc", "table": "#f4cccc",
}  # fmt: skip
_Point = tuple[float, float]


def draw_graph(graph: ArchitectureGraph, path: str | Path, title: str = "") -> None:
    """Draws a graph into an image file, with a dashed border for nodes that stay at the client.

    Args:
        graph: the graph to draw.
        path: the picture file to write; its suffix, .png or .svg, determines the format.
        title: text above the picture.

    Raises:
        UserError: the suffix is another one, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places, lines = layout_nodes_and_edges(graph)
    rows = 1 + max((y for _, y in places), default=0)
    columns = 1 + max((x for line in [places, *lines] for x, _ in line), default=0)
    # A row is as high as two lines of text; the limit keeps the picture small enough for viewers to open.
    figure = Figure(figsize=(1 + 2.2 * columns, 1 + min(0.42 * rows, 250)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_title(textwrap.fill(title, 45), fontsize=8)
    axes.set_xlim(-0.55, columns - 0.45)
    axes.set_ylim(rows - 0.4, -0.6)
    for line in lines:
        axes.plot(*zip(*line, strict=True), color="#666666", linewidth=0.8, zorder=1)
    for position, (node, place) in enumerate(zip(graph.nodes, places, strict=True)):
        box = {
            "boxstyle": "round,pad=0.25",
            "facecolor": _COLOURS[_node_family(node)],
            "edgecolor": "#333333",
            "linewidth": 0.7,
        }
        if node.type == "other":
            box["linestyle"] = "dashed"
        axes.text(*place, f"{position}  {node_label(node)}", bbox=box, fontsize=6, ha="center", va="center", zorder=2)
    save_figure(figure, path)


class GraphLayout(NamedTuple):
    """Holds the position of each node in a drawing of a graph, and the corners of the line for each edge."""

    node_points: list[_Point]
    edge_lines: list[list[_Point]]


def layout_nodes_and_edges(graph: ArchitectureGraph) -> GraphLayout:
    """Computes each node's (column, row), row 0 on top, and the corners of each edge's line.

    A node is in the row after its last predecessor; one without predecessors is in the row before its first successor. An
    edge that skips rows passes each of them to the right of the nodes, so that no line crosses a node.

    >>> nodes = [Node(name, "other", {name: name}) for name in "abc"]
    >>> places, lines = layout_nodes_and_edges(ArchitectureGraph(tuple(nodes), ((0, 1), (0, 2), (1, 2)), {}, {}))
    >>> places, lines[1]
    ([(0.0, 0.0), (0.0, 1.0), (0.0, 2.0)], [(0.0, 0.0), (0.6, 1.0), (0.0, 2.0)])
    """
    before: list[list[int]] = [[] for _ in graph.nodes]
    after: list[list[int]] = [[] for _ in graph.nodes]
    for start, end in graph.edges:
        before[end].append(start)
        after[start].append(end)
    rows = [0] * len(graph.nodes)
    for node in range(len(rows)):
        rows[node] = max((rows[earlier] + 1 for earlier in before[node]), default=0)
    for node in range(len(rows)):
        if not before[node]:
            rows[node] = min((rows[later] - 1 for later in after[node]), default=rows[node])
    columns = [0.0] * len(rows)
    passing: dict[tuple[int, int], list[_Point]] = {edge: [] for edge in graph.edges}

    def last_column(edge: tuple[int, int]) -> float:
        return passing[edge][-1][0] if passing[edge] else columns[edge[0]]

    for row in range(max(rows, default=-1) + 1):
        row_nodes = [node for node, r in enumerate(rows) if r == row]
        row_nodes.sort(
            key=lambda node: mean(last_column((e, node)) for e in before[node]) if before[node] else math.inf
        )
        for column, node in enumerate(row_nodes):
            columns[node] = float(column)
        crossing = sorted((edge for edge in graph.edges if rows[edge[0]] < row < rows[edge[1]]), key=last_column)
        for lane, edge in enumerate(crossing):
            passing[edge].append((len(row_nodes) - 0.4 + 0.1 * lane, float(row)))
    places = [(column, float(row)) for column, row in zip(columns, rows, strict=True)]
    lines = [[places[start], *passing[start, end], places[end]] for start, end in graph.edges]
    return GraphLayout(places, lines)


def node_label(node: Node) -> str:
    """Returns the text for a node's box: its name and its type, on two lines.

    >>> node_label(Node("stem", LayerType("conv2d", 3, 64, (7, 7), (2, 2), bias=False), {})).split("\\n")
    ['stem', 'conv2d 3→64, 7×7 /2']
    """
    name = node.name if len(node.name) <= 34 else f"…{node.name[-33:]}"
    if not isinstance(node.type, LayerType):
        role = "stays with the client" if node.type == "other" else node.type
        return name if node.name.endswith(node.type) else f"{name}\n{role}"
    t = node.type
    text = f"{t.kind} {t.c_in}" if t.is_norm else f"{t.kind} {t.c_in}→{t.c_out}"
    if t.is_table or t.is_lookup:
        text = f"{t.kind} {'×'.join(map(str, t.parameter_shapes['weight']))}".strip()
    if t.is_conv:
        text += f", {'×'.join(map(str, t.kernel))}"
    if set(t.stride) - {1}:
        text += f" /{t.stride[0] if len(set(t.stride)) == 1 else '×'.join(map(str, t.stride))}"
    if set(t.dilation) - {1}:
        text += f", dilated {t.dilation[0] if len(set(t.dilation)) == 1 else '×'.join(map(str, t.dilation))}"
    if t.groups > 1:
        text += f", {t.groups} groups"
    if t.activation != NONE:
        text += f", {t.activation}"
    if t.norm != NONE:
        text += f", {t.norm}"
    return f"{name}\n{text}"


def _node_family(node: Node) -> str:
    if not isinstance(node.type, LayerType):
        return "other" if node.type == "other" else "join"
    if node.type.kind in RECURRENT_KINDS:
        return "recurrent"
    if node.type.is_table or node.type.is_lookup:
        return "table" if node.type.is_table else "lookup"
    return "conv" if node.type.is_conv else "norm" if node.type.is_norm else "linear"
