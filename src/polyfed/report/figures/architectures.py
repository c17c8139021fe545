"""Reads the cells (small graphs of operations) that the architecture search of FedPNAS, CA-FedPNAS, FedDSNAS or
CA-FedDSNAS selected for each client, and draws them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.text.number_format import shorten_name
from polyfed.core.io.values.validation import parse_json
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.data.plot import resolve_picture_path, save_figure
from polyfed.nas.derived import FORMAT, check_cell_descriptions
from polyfed.simulation.results.run import Run
from polyfed.simulation.storage.directory import read_config, read_metrics
from polyfed.simulation.storage.model_signature import SIGNATURE_SUFFIX as SIGNATURE
from polyfed.simulation.storage.paths import safe_file_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_METHODS = "fedpnas, ca_fedpnas, feddsnas or ca_feddsnas"
_STEP = 2.6  # from one node of a graph to the next; a node has radius `_RADIUS`, and two labels are `_LANE` apart
_LANE = 0.5
_RADIUS = 0.32
_INCH = 0.62  # of a unit of a graph


@final
@dataclass(frozen=True, eq=False)
class SearchedCell:
    """Describes a cell of a searched network: its E edges, and K operations' probabilities at each.

    Attributes:
        stack: "base" or "personal".
        input_count: number of inputs, 1 or 2.
        edges: the E edges as (from, to). Inputs come first: 0 is the last cell's output, 1 the output of the cell before.
        candidates: the K operations' names.
        probabilities: float64, (E, K); each row sums to 1, with 0 where an operation is not a candidate of the edge. For
            context-aware samplers they are means over the client's training examples.
        chosen_operations: the most probable operation of each edge.

    >>> cell = SearchedCell("base", 2, ((0, 2), (1, 2)), ("skip", "max_pool_3"), np.eye(2), ("skip", "max_pool_3"))
    >>> [cell.edge_label(edge) for edge in cell.edges]
    ['c(k-1) → 0', 'c(k-2) → 0']
    """

    stack: str
    input_count: int
    edges: tuple[tuple[int, int], ...]
    candidates: tuple[str, ...]
    probabilities: NDArray[np.float64]
    chosen_operations: tuple[str, ...]

    def node_name(self, index: int) -> str:
        """Returns the name of a cell's node in the drawing: c(k-1) and c(k-2) for the two inputs, then 0, 1 and so on."""
        return f"c(k-{index + 1})" if index < self.input_count else str(index - self.input_count)

    def edge_label(self, edge: tuple[int, int]) -> str:
        """Returns the names of the two nodes that an edge of a cell connects, such as "c(k-1) → 0"."""
        return f"{self.node_name(edge[0])} → {self.node_name(edge[1])}"


@final
@dataclass(frozen=True, eq=False)
class ArchitectureSearchResult:
    """Holds for each client the cells (graphs of operations) selected for its network.

    Attributes:
        clients: the clients' ids, ascending.
        cells: the cells of each client, base cells first; all clients have the same edges and candidates.
    """

    clients: tuple[str, ...]
    cells: tuple[tuple[SearchedCell, ...], ...]

    def cells_of(self, client: str) -> tuple[SearchedCell, ...]:
        """Returns the cells of the client with the given id, first those whose weights all clients share (base cells).

        Raises:
            UserError: the run has no client of this id.
        """
        if client not in self.clients:
            raise UserError(f"the run has no client {client!r}; {did_you_mean(client, self.clients)}")
        return self.cells[self.clients.index(client)]

    @property
    def cell_titles(self) -> tuple[str, ...]:
        """Returns the titles of a client's cells: "base cell 1", ..., "personal cell 1", ..."""
        stacks = [cell.stack for cell in self.cells[0]]
        return tuple(f"{stack} cell {stacks[: k + 1].count(stack)}" for k, stack in enumerate(stacks))


def read_search_result(run: Run | str | Path) -> ArchitectureSearchResult:
    """Reads the cells selected for each client from a run of fedpnas, feddsnas or their ca_ variants.

    Args:
        run: a run, or its directory, of which only models/ID.json are read.

    Raises:
        UserError: there is no run, it is of another method, or a file is missing, damaged or of another run.

    >>> import torch
    >>> from polyfed import Client, federate
    >>> from polyfed.algorithms import FedPNAS
    >>> train, test = ((torch.full((4, 1, 8, 8), value), torch.tensor([0, 1, 0, 1])) for value in (0.0, 1.0))
    >>> method = FedPNAS(channels=4, base_cells=1, base_nodes=1, personal_nodes=1, operations=("skip", "avg_pool_3"))
    >>> search_result = read_search_result(federate([Client("north", None, train, test)], method, rounds=1, workers=0))
    >>> cell = search_result.cells_of("north")[0]
    >>> search_result.cell_titles, cell.candidates, cell.probabilities.shape
    (('base cell 1', 'personal cell 1'), ('skip', 'avg_pool_3'), (2, 2))
    """
    if isinstance(run, Run):
        with exclusive_single_torch_thread_with_grad():
            descriptions = {i: _description_of(run, i) for i in sorted(run.federation.clients)}
        places = {i: f"client {i!r}" for i in descriptions}
    else:
        descriptions, places = _read_descriptions(expand_user_path(run, "the run directory"))
    cells = {client: _parse_cells(descriptions[client], places[client]) for client in sorted(descriptions)}
    first = min(cells)
    for client, client_cells in cells.items():
        if [_cell_layout(cell) for cell in client_cells] != [_cell_layout(cell) for cell in cells[first]]:
            raise UserError(f"{places[client]} has other cells than {places[first]}: the files are of different runs")
    return ArchitectureSearchResult(tuple(cells), tuple(cells.values()))


def draw_client_cells(result: ArchitectureSearchResult, client: str, path: str | Path) -> "Figure":
    """Draws each cell of a client's searched network as a graph from left to right, and writes the picture to a file.

    Each edge is labelled with its most probable operation and that probability.

    Args:
        result: the cells of all clients.
        client: the client's id.
        path: the picture to write; its ending, .png or .svg, is the format.

    Returns:
        The figure that was written.

    Raises:
        UserError: there is no client of this id, the ending is another, or the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = resolve_picture_path(path)
    cells = result.cells_of(client)
    lanes = [_label_heights(cell) for cell in cells]
    spans = [_height_range(cell, cell_lanes) for cell, cell_lanes in zip(cells, lanes, strict=True)]
    heights = [top - bottom for bottom, top in spans]
    width = 2 * _RADIUS + 0.4 + _STEP * max(_computed_node_count(cell) for cell in cells)
    size = (max(_INCH * width + 0.3, 3.6), sum(_INCH * height + 0.35 for height in heights) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(cells), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, cell, title, cell_lanes, span in zip(panels, cells, result.cell_titles, lanes, spans, strict=True):
        axes.set(xlim=(-_RADIUS - 0.2, width - _RADIUS - 0.2), ylim=span, aspect="equal")
        axes.set_axis_off()
        axes.set_title(title, fontsize=9)
        _draw_graph(axes, cell, cell_lanes)
    figure.suptitle(f"{shorten_name(client)}: most probable operations", fontsize=10, parse_math=False)
    save_figure(figure, path)
    return figure


# -- reading ----------------------------------------------------------------------------------------------------------


def _description_of(run: Run, client: str) -> Any:
    algorithm = run.federation.algorithm
    if not isinstance(algorithm, BringsNetwork):
        raise UserError(f"{type(algorithm).__name__} searches for no architecture; give a run of {_METHODS}")
    return algorithm.describe_personal_network(run.model(client), run.federation.clients[client])


def _read_descriptions(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads each client's network description from models/ID.json; returns contents and paths by client."""
    if not (folder / "config.yaml").exists():
        raise UserError(f"{folder} is not a run directory: it has no config.yaml")
    config = read_config(folder)
    files = [file for file in (folder / "models").glob("*") if not file.name.startswith(".partial-")]
    model_files = {file for file in files if not file.name.endswith(SIGNATURE)}
    if not any(file.suffix == ".json" for file in model_files):
        method = config.get("algorithm")
        name = method.get("name") if isinstance(method, Mapping) else method
        raise UserError(
            f"{folder} has no descriptions of networks that were found (models/*.json); its method is {name!r}. Give a "
            f"finished run of {_METHODS}"
        )
    # Names of files do not always tell ids; the metrics do.
    records = read_metrics(folder / "metrics.jsonl")
    ids = {safe_file_name(client): client for record in records for client in record.get("clients", {})}
    names = {file.stem for file in model_files if file.suffix in (".json", ".safetensors")}
    if config.get("on_error") != "skip":  # with "skip" a client whose model cannot be made has no files
        names |= set(ids)
    descriptions, places = {}, {}
    for name in sorted(names):
        file = folder / "models" / f"{name}.json"
        client = ids.get(name, name)
        try:
            descriptions[client], places[client] = parse_json(read_file(file)), str(file)
        except FileNotFoundError as error:
            raise UserError(
                f"{folder} has no models/{file.name}, the cells of client {client!r}; restore it, or run again"
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is damaged ({error}); restore it, or run again") from error
    return descriptions, places


def _parse_cells(description: Any, place: str) -> tuple[SearchedCell, ...]:
    if not isinstance(description, Mapping) or description.get("format") != FORMAT:
        format_name = description.get("format") if isinstance(description, Mapping) else type(description).__name__
        raise UserError(f"{place} has the format {format_name!r}, expected {FORMAT!r}; give a run of {_METHODS}")
    try:
        check_cell_descriptions(description)
        cells = tuple(_parse_cell(cell) for cell in description["cells"])
        if not cells:
            raise ValueError("no cells")
    except ValueError as error:
        raise UserError(f"{place} does not describe cells ({error}); restore it, or run again") from error
    return cells


def _parse_cell(content: Mapping[str, Any]) -> SearchedCell:
    inputs, edges = int(content["inputs"]), tuple((int(e["from"]), int(e["to"])) for e in content["edges"])
    if inputs not in (1, 2) or not edges or any(not 0 <= i < j or j < inputs for i, j in edges):
        raise ValueError(f"a cell of {inputs} inputs with the edges {edges}")
    rows = [_edge_probabilities(edge) for edge in content["edges"]]
    candidates = tuple(dict.fromkeys(name for row in rows for name in row))
    table = np.array([[row.get(name, 0.0) for name in candidates] for row in rows])
    chosen_operations = []
    for edge, row in zip(content["edges"], rows, strict=True):
        operations = edge["operations"]  # one, where the network was fixed: of equally probable ones that which it has
        chosen_operations.append(operations[0] if len(operations) == 1 else max(row, key=row.__getitem__))
    if missing := sorted(set(chosen_operations) - set(candidates)):
        raise ValueError(f"the operation {missing[0]!r} is none of the candidates {candidates}")
    return SearchedCell(str(content["stack"]), inputs, edges, candidates, table, tuple(chosen_operations))


def _edge_probabilities(edge: Mapping[str, Any]) -> dict[str, float]:
    """Returns the probability of each operation at an edge; 1 for the operation of an edge that has only one."""
    names = [str(name) for name in edge.get("candidates", edge["operations"])]
    shares = [float(share) for share in edge.get("probabilities", [1.0])]
    if len(names) != len(shares) or len(set(names)) < len(names):
        raise ValueError(f"{len(shares)} probabilities of the operations {names}")
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        raise ValueError(f"probabilities {shares}, whose sum is not 1")
    return dict(zip(names, shares, strict=True))


def _cell_layout(cell: SearchedCell) -> tuple[object, ...]:
    return cell.stack, cell.input_count, cell.edges, cell.candidates


# -- drawing ----------------------------------------------------------------------------------------------------------


def _draw_graph(axes: "Axes", cell: SearchedCell, lanes: Sequence[float]) -> None:
    """Draws the nodes of a cell from left to right, and each edge as an arc that is labelled at its middle."""
    from matplotlib.patches import Circle, FancyArrowPatch

    nodes = []
    for index in range(cell.input_count + _computed_node_count(cell)):
        colour = "#cfe3f3" if index < cell.input_count else "#f6dfb8"
        nodes.append(
            axes.add_patch(Circle(_node_centre(cell, index), _RADIUS, facecolor=colour, edgecolor="black", zorder=3))
        )
        axes.text(*_node_centre(cell, index), cell.node_name(index), ha="center", va="center", fontsize=7, zorder=4)
    for (i, j), name, row, lane in zip(cell.edges, cell.chosen_operations, cell.probabilities, lanes, strict=True):
        (x1, y1), (x2, y2) = _node_centre(cell, i), _node_centre(cell, j)
        bend = (y1 + y2 - 2 * lane) / (x2 - x1)  # the middle of `arc3` is (bend / 2)·(y2 − y1, x1 − x2) off the line's
        axes.add_patch(
            FancyArrowPatch(
                (x1, y1), (x2, y2), connectionstyle=f"arc3,rad={bend}", patchA=nodes[i], patchB=nodes[j], shrinkA=0,
                shrinkB=0, arrowstyle="-|>", mutation_scale=9, color="#444444", zorder=1,
            )
        )  # fmt: skip
        probability = row[cell.candidates.index(name)]
        axes.text(
            (x1 + x2 + bend * (y2 - y1)) / 2, lane, f"{name} {probability:.2f}", ha="center", va="center", fontsize=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}, zorder=2,
        )  # fmt: skip


def _label_heights(cell: SearchedCell) -> list[float]:
    """Returns the height at which each edge's label stands, chosen so that no two labels overlap.

    Edges between neighbouring nodes are straight lines at 0. Others pass above or below in turns, by the node that they
    start at, longer ones farther out.
    """
    heights = [0.0] * len(cell.edges)
    for side, sign in ((0, 1), (1, -1)):
        passing = [
            (_node_centre(cell, j)[0] - _node_centre(cell, i)[0], k)
            for k, (i, j) in enumerate(cell.edges)
            if i % 2 == side and (j - i > 1 or i < cell.input_count == 2)
        ]
        for rank, (_, k) in enumerate(sorted(passing), start=1):
            heights[k] = sign * rank * _LANE
    return heights


def _node_centre(cell: SearchedCell, index: int) -> tuple[float, float]:
    """Returns the coordinates of a node's centre in the drawing; two inputs stand one above the other."""
    if index < cell.input_count:
        return 0.0, (0.0 if cell.input_count == 1 else 2 * _LANE * (1 - 2 * index))
    return _STEP * (index - cell.input_count + 1), 0.0


def _computed_node_count(cell: SearchedCell) -> int:
    """Returns the number of the cell's nodes that are not inputs."""
    return max(j for _, j in cell.edges) + 1 - cell.input_count


def _height_range(cell: SearchedCell, lanes: Sequence[float]) -> tuple[float, float]:
    """Returns the lowest and the highest coordinate that the drawing of a cell reaches."""
    heights = [*lanes, *(_node_centre(cell, index)[1] for index in range(cell.input_count))]
    return min(heights) - _LANE, max(heights) + _LANE
