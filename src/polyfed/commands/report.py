"""What the command `report` does: the last scores of finished runs, and for each method what it has to show beside them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polyfed.commands.running import BASELINES
from polyfed.errors import UserError
from polyfed.evaluation import SCORE
from polyfed.runs.checkpoint import file_name
from polyfed.runs.directory import read_config, read_metrics

FOLDER = "report"  # of the run directory, for the pictures
_MOST = 12  # pictures of one kind
_COLUMNS = 8  # clients side by side in a table


def show(folders: list[Path], console: Console | None = None) -> None:
    """Prints a table of the runs and of their baselines, and writes each method's pictures into `report/` of its run
    directory.

    Raises:
        UserError: a folder is no run directory, or its run has not been evaluated yet.
    """
    console = console or Console()
    runs = [run for folder in folders for run in _with_baselines(folder)]
    told = [(folder, *_read(folder)) for folder in runs]
    console.print(_scores(told))
    for folder, config, _ in told:
        name = config["algorithm"]["name"]
        view = _VIEWS.get(name)
        if view is None:
            continue
        written = list(view(folder, config, console))
        shown = ", ".join(str(path) for path in written)
        console.print(f"{name}: {shown}", highlight=False, soft_wrap=True)


def _with_baselines(folder: Path) -> Iterator[Path]:
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run directory: it has no config.yaml")
    yield folder
    if (folder / BASELINES).is_dir():
        yield from sorted(path for path in (folder / BASELINES).iterdir() if (path / "config.yaml").is_file())


def _read(folder: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The configuration of a run and the record of its last evaluated round."""
    scored = [record for record in read_metrics(folder / "metrics.jsonl") if record.get("summary")]
    if not scored:
        raise UserError(f"{folder} has no evaluated round yet; go on with it: polyfed resume {folder}")
    return read_config(folder), scored[-1]


def _scores(told: list[tuple[Path, Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    table = Table(title="scores on each client's own test examples", title_justify="left")
    table.add_column("run")
    table.add_column("method")
    for column in ("round", "score", "mean", "worst client", "best client", "MB"):
        table.add_column(column, justify="right")
    for folder, config, record in told:
        score = next(name for name in SCORE.values() if name in record["summary"])
        values = [row[score] for row in record["clients"].values() if row.get(score) is not None]
        moved = (record["bytes_down_total"] + record["bytes_up_total"]) / 2**20
        numbers = [f"{value:.3f}" for value in (record["summary"][score]["mean"], min(values), max(values))]
        table.add_row(str(folder), config["algorithm"]["name"], str(record["round"]), score, *numbers, f"{moved:.1f}")
    return table


def _place(folder: Path) -> Path:
    (folder / FOLDER).mkdir(exist_ok=True)
    return folder / FOLDER


def _search(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """Probabilities of operations, and the cells of each client."""
    from polyfed.report.search import draw_cell, draw_probabilities, read_search

    found = read_search(folder)
    shown = found.clients[:_COLUMNS]
    table = Table(title=f"most probable operation of each edge, and its probability ({folder})", title_justify="left")
    for column in ("cell", "edge", *shown):
        table.add_column(column)
    for k, title in enumerate(found.titles):
        for e, edge in enumerate(found.cells[0][k].edges):
            cells = [found.of(client)[k] for client in shown]
            row = [f"{cell.chosen[e]} {cell.probabilities[e].max():.2f}" for cell in cells]
            table.add_row(title if e == 0 else "", cells[0].label(edge), *row)
    console.print(table)
    place = _place(folder)
    draw_probabilities(found, place / "probabilities.png")
    yield place / "probabilities.png"
    for client in found.clients[:_MOST]:
        path = place / f"cells-{file_name(client)}.png"
        draw_cell(found, client, path)
        yield path


def _aggregation(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """Who aggregates from whom: pFedLA's weights, layer by layer."""
    from polyfed.report import aggregation

    weights = aggregation.read(folder)
    place = _place(folder)
    for layer in weights.layers[:_MOST]:
        path = place / f"weights-{file_name(layer)}.png"
        aggregation.save(aggregation.heat_map(weights, layer), path)
        yield path


def _alignment(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """How alike the clients' representations are, before and after."""
    from polyfed.commands.experiment import rebuild
    from polyfed.data.plot import save_figure
    from polyfed.report.alignment import draw_alignment, read_alignment

    clients, _ = rebuild(config, folder)
    found = read_alignment(folder, clients=clients)
    console.print(f"mean CKA between two clients: {found.mean_before:.2f} before, {found.mean_after:.2f} after")
    path = _place(folder) / "alignment.png"
    save_figure(draw_alignment(found), path)
    yield path


_VIEWS: Mapping[str, Callable[[Path, Mapping[str, Any], Console], Iterator[Path]]] = {
    **dict.fromkeys(("fedpnas", "ca_fedpnas", "feddsnas", "ca_feddsnas"), _search),
    **dict.fromkeys(("pfedla", "heur_pfedla"), _aggregation),
    **dict.fromkeys(("fedhenn", "fedhenn_homo"), _alignment),
}
