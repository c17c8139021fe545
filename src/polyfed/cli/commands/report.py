"""What the command `report` does: the last scores of runs, what their methods have to show beside them, and all of it on a
page."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.measure import Measurement

from polyfed.cli.commands.terminal import Table, say
from polyfed.core.errors import UserError
from polyfed.core.files import make_folder, replace_file
from polyfed.report import norms
from polyfed.report.gathering import Line, Setting, gather
from polyfed.report.html import paragraphs
from polyfed.report.page import render
from polyfed.report.predictions import read_outcomes
from polyfed.report.records import Told
from polyfed.report.sections import Beside
from polyfed.report.words import many
from polyfed.simulation.experiment import Participants, from_config, participants
from polyfed.simulation.runs.directory import read_manifest
from polyfed.simulation.runs.paths import file_name

FOLDER = "report"  # of the run directory, for the pictures
PAGE = "report.html"
MOST = 12  # clients on the terminal, and pictures of one kind; on the page, of all runs together
_COLUMNS = 8  # clients side by side in a table


def show(
    folders: Sequence[Path],
    console: Console | None = None,
    *,
    out: Path | None = None,
    subgroups: Sequence[str] = (),
) -> None:
    """Prints the scores of runs, of their baselines and of comparisons: a row for each method, and the first clients; writes
    each method's pictures into `report/` of its run directory, and a page with everything.

    Args:
        folders: run directories, or those of `polyfed compare`.
        console: where to print; standard output by default.
        out: the page; None for `report.html` in the first folder.
        subgroups: columns of the test examples, such as "sex", by which the page tells scores.

    Raises:
        UserError: a folder is neither, its run has not been evaluated yet, its test examples have no column of
            `subgroups`, or the page cannot be written.
    """
    console = console or Console()
    settings, notes = gather(folders)
    for setting in settings:
        console.print(_methods(setting))
        console.print(_clients(setting, console))
    # The page gets fewer clients and layers of each run where many runs have such pictures.
    shown = sum(line.runs[0].method in _VIEWS for setting in settings for line in setting.lines)
    most = max(1, MOST // max(1, shown))
    beside = [
        _with_predictions(_beside(setting, f"v{k}", most, console), setting, subgroups)
        for k, setting in enumerate(settings)
    ]
    for note in notes:
        say(console, note)
    names = [folder.resolve().name for folder in folders]
    title = f"polyfed: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    page = folders[0] / PAGE if out is None else out
    try:
        replace_file(page, render(settings, beside, notes, title).encode(), private=out is None)
    except OSError as error:
        raise UserError(f"cannot write the page {page} ({error.strerror}); give another --out FILE.html") from error
    say(console, f"Everything on one page: {page}")


def _methods(setting: Setting) -> Table:
    """One row a method: the mean over clients and seeds, who is worst off, and what it took."""
    title = f"{setting.title}: {setting.scale.label} on each client's own test examples"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    several = len(setting.seeds) > 1
    for column in (*(["seeds"] if several else []), "round", "mean", "worst client", "MB a run" if several else "MB"):
        table.add_column(column, justify="right")
    for line in setting.lines:
        known = {name: value for name, value in setting.scores(line).items() if not math.isnan(value)}
        worst = min(known, key=lambda name: known[name], default=None)
        rounds = sorted({run.round for run in line.runs})
        table.add_row(
            line.label,
            *([str(len(line.runs))] if several else []),
            "–".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
            _number(setting.mean(line)),
            "–" if worst is None else f"{known[worst]:.3f} ({worst})",
            f"{fmean(run.spent[0] for run in line.runs):.1f}",
        )
    return table


def _clients(setting: Setting, console: Console) -> Table:
    """One row a client, of the first ones, with as many methods side by side as the terminal has room for; training alone
    is always among them. Where a seed deals the data anew, the clients are those of the first."""
    others = [line for line in setting.lines if line is not setting.local]
    alone = [] if setting.local is None else [setting.local]
    for number in range(min(len(others), _COLUMNS), -1, -1):
        lines = [*others[:number], *alone] or others[:1]
        table = _side_by_side(setting, lines)
        if Measurement.get(console, console.options.update(max_width=10**4), table).maximum <= console.width:
            break
    return table


def _side_by_side(setting: Setting, lines: Sequence[Line]) -> Table:
    dealt = not setting.same_clients and len(setting.seeds) > 1
    columns = [
        next(({**run.final} for run in line.runs if run.seed == setting.seeds[0]), {})
        if dealt
        else setting.scores(line)
        for line in lines
    ]
    names = sorted({name for column in columns for name in column})
    left = len(names) - MOST
    missing = len(setting.lines) - len(lines)
    more = [f"{many(left, 'more client')}"] if left > 0 else []
    more += [many(missing, "more method")] if missing else []
    table = Table(
        title=f"each client{f', of seed {setting.seeds[0]}' if dealt else ''}",
        title_justify="left",
        caption=f"and {' and '.join(more)} on the page" if more else None,
        caption_justify="left",
    )
    table.add_column("client")
    for line in lines:
        table.add_column(line.label, justify="right")
    for name in names[:MOST]:
        table.add_row(name, *(_number(column.get(name)) for column in columns))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


# -- beside the scores ------------------------------------------------------------------------------------------------


def _beside(setting: Setting, key: str, most: int, console: Console) -> Beside:
    """The class distribution and what the methods have to show; of several seeds, that of the first."""
    runs = [line.runs[0] for line in setting.lines if line.runs[0].folder is not None]
    found, why = _participants(runs[0]) if runs else (None, "")
    views: dict[str, dict[str, str]] = {}
    for position, (line, run) in enumerate((line, line.runs[0]) for line in setting.lines):
        if run.folder is None:
            continue
        of = f"{line.label}, seed {run.seed}" if len(line.runs) > 1 else line.label
        _draw(run, run.folder, console)
        if shown := norms.section(run, f"{key}-{position}"):
            views.setdefault(norms.HEADING, {})[of] = shown
        for heading, view in _VIEWS.get(run.method, ()):
            try:
                shown = view(run.folder, found, f"{key}-{position}", most)
            except (UserError, OSError) as error:
                shown = paragraphs([f"Not shown: {error}"])
            if shown:
                views.setdefault(heading, {})[of] = shown
    if setting.results:
        classes = {
            int(seed): {client: told["classes"] for client, told in clients.items() if told["classes"]}
            for seed, clients in setting.results.get("data", {}).items()
            if not setting.same_clients or int(seed) == setting.seeds[0]  # else they are the same for each
        }
        counted = [counts for clients in classes.values() for counts in clients.values()]
        names = list(setting.results.get("class_names") or ())
        names += range(len(names), max(map(len, counted), default=0))  # of clients made in Python
        if any(classes.values()):
            return Beside({seed: one for seed, one in classes.items() if one}, [str(name) for name in names], "", views)
        return Beside(no_classes="The examples of these clients have no classes to count.", views=views)
    if found is None:
        return Beside(no_classes=why, views=views)
    if not found.classes:
        return Beside(no_classes="Examples with several labels are not counted by class.", views=views)
    own = {client.id: found.classes[client.id] for client in found.clients}
    more = "" if len(setting.seeds) == 1 else f"Seed {runs[0].seed}; the others deal the same data in their own draw."
    return Beside({runs[0].seed: own}, found.pool.class_names, more, views)


def _with_predictions(beside: Beside, setting: Setting, subgroups: Sequence[str]) -> Beside:
    found, why = read_outcomes(setting, beside.class_names or None)
    if found is None and subgroups:
        raise UserError(f"--subgroup {subgroups[0]!r}: {why.rstrip('.')}; leave it out")
    # Runs by themselves need not say what only comparisons are looked at for.
    return replace(beside, outcomes=found, no_outcomes=why if setting.results else "", subgroups=tuple(subgroups))


def _participants(run: Told) -> tuple[Participants | None, str]:
    """The clients of a run, made again from its configuration where that needs no network; or why there are none."""
    data = run.config.get("data")
    if not isinstance(data, Mapping):
        return None, "The clients were made in Python, so that the run directory does not know their classes."
    if data.get("name") != "digits" and not data.get("path"):
        return None, (
            f"The data ({data.get('name')}) come from the Hugging Face hub and are not loaded for a page; runs with "
            "--data.path FOLDER show who has which classes."
        )
    try:
        found = participants(from_config(run.config))
    except UserError as error:
        return None, f"The data of the run could not be read again: {error}."
    before = read_manifest(run.folder or "").get("partition_fingerprint")
    if before not in (None, found.partition_fingerprint):
        return None, "The data are no longer divided as in the run, so that the classes of its clients are not known."
    return found, ""


def _weights(folder: Path, found: Participants | None, key: str, most: int) -> str:
    from polyfed.report import views

    return views.weights(folder, key, most)


def _alignments(folder: Path, found: Participants | None, key: str, most: int) -> str:
    from polyfed.report import views

    if found is None:
        raise UserError(
            "the clients and their test examples are not at hand; polyfed.report.alignment takes them in Python"
        )
    return views.alignments(folder, found.clients, key)


def _operations(folder: Path, found: Participants | None, key: str, most: int) -> str:
    from polyfed.report import views

    return views.operations(folder, key, most)


def _agreement(folder: Path, found: Participants | None, key: str, most: int) -> str:
    from polyfed.report import conflicts

    if found is None:
        raise UserError(
            "the clients' training examples are not at hand; polyfed.simulation.conflicts takes a run in Python"
        )
    return conflicts.agreement(folder, found.clients, found.public, key)


def _coverage(folder: Path, found: Participants | None, key: str, most: int) -> str:
    from polyfed.algorithms import FLHAGHN
    from polyfed.graphs.contraction import EXTRACTED
    from polyfed.report import views
    from polyfed.simulation.runs.configuration import method_of, section
    from polyfed.simulation.runs.directory import read_config

    if found is None:
        raise UserError("the clients' networks are not at hand; `polyfed graph MODEL --input SHAPE` shows one of them")
    method = method_of(section(read_config(folder), "algorithm"))
    return views.coverage(found.clients, key, method.contraction if isinstance(method, FLHAGHN) else EXTRACTED)


def _warm_starts(folder: Path, found: Participants | None, key: str, most: int) -> str:
    from polyfed.report import views

    return views.warm_starts(folder, key)


_View = Callable[[Path, Participants | None, str, int], str]
_VIEWS: Mapping[str, tuple[tuple[str, _View], ...]] = {
    **dict.fromkeys(("pfedla", "heur_pfedla"), (("Who aggregates from whom", _weights),)),
    **dict.fromkeys(("fedhenn", "fedhenn_homo"), (("How alike representations are", _alignments),)),
    **dict.fromkeys(("feddsnas", "ca_feddsnas"), (("Operations that were found", _operations),)),
    **dict.fromkeys(
        ("fedpnas", "ca_fedpnas"),
        (("Operations that were found", _operations), ("Whom the federated gradient works against", _agreement)),
    ),
    "flha_ghn": (("What the hypernetwork can generate", _coverage), ("Unseen clients' warm starts", _warm_starts)),
}


# -- on the terminal, and as pictures ---------------------------------------------------------------------------------


def _draw(run: Told, folder: Path, console: Console) -> None:
    view = _PICTURES.get(run.method)
    if view is None:
        return
    with warnings.catch_warnings():
        # A name in letters that matplotlib's font lacks is drawn as boxes; the page and the table have it right.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        try:
            shown = ", ".join(str(path) for path in view(folder, run.config, console))
        except UserError as error:
            shown = str(error)
        except OSError as error:
            shown = f"no pictures: {error}"
    say(console, f"{run.method}: {shown}")


def _place(folder: Path) -> Path:
    place = folder / FOLDER
    try:
        make_folder(place)
    except OSError as error:
        raise UserError(
            f"no pictures, since the folder {place} cannot be made ({error.strerror}); the page has what they show"
        ) from error
    return place


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
    for client in found.clients[:MOST]:
        path = place / f"cells-{file_name(client)}.png"
        draw_cell(found, client, path)
        yield path


def _aggregation(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """Who aggregates from whom: pFedLA's weights, layer by layer."""
    from polyfed.report import aggregation

    weights = aggregation.read(folder)
    place = _place(folder)
    for layer in weights.layers[:MOST]:
        path = place / f"weights-{file_name(layer)}.png"
        aggregation.save(aggregation.heat_map(weights, layer), path)
        yield path


def _alignment(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """How alike the clients' representations are, before and after."""
    from polyfed.data.plot import save_figure
    from polyfed.report.alignment import draw_alignment, read_alignment
    from polyfed.simulation.experiment import rebuild

    clients, _ = rebuild(config, folder)
    found = read_alignment(folder, clients=clients)
    say(console, f"mean CKA between two clients: {found.mean_before:.2f} before, {found.mean_after:.2f} after")
    path = _place(folder) / "alignment.png"
    save_figure(draw_alignment(found), path)
    yield path


_PICTURES: Mapping[str, Callable[[Path, Mapping[str, Any], Console], Iterator[Path]]] = {
    **dict.fromkeys(("fedpnas", "ca_fedpnas", "feddsnas", "ca_feddsnas"), _search),
    **dict.fromkeys(("pfedla", "heur_pfedla"), _aggregation),
    **dict.fromkeys(("fedhenn", "fedhenn_homo"), _alignment),
}
