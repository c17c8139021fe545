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

from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder, write_file_atomically
from polyfed.report.data.predictions import read_group_predictions
from polyfed.report.data.run_groups import MethodRuns, RunGroup, read_run_groups
from polyfed.report.data.run_records import RunRecord
from polyfed.report.page import update_norms
from polyfed.report.page.elements import html_list
from polyfed.report.page.page import render_page
from polyfed.report.page.sections import PageExtras
from polyfed.report.page.sentences import count_with_noun
from polyfed.simulation.experiment import Participants, build_experiment, load_participants
from polyfed.simulation.storage.directory import read_manifest
from polyfed.simulation.storage.paths import safe_file_name

PICTURE_FOLDER = "report"  # of the run directory, for the pictures
PAGE = "report.html"
MAX_CLIENTS = 12  # clients on the terminal, and pictures of one kind; on the page, of all runs together
_COLUMNS = 8  # clients side by side in a table


def show_report(
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
    groups, notes = read_run_groups(folders)
    for run_group in groups:
        console.print(_methods_table(run_group))
        console.print(_clients_table(run_group, console))
    # The page gets fewer clients and layers of each run where many runs have such pictures.
    view_count = sum(method.runs[0].method in _VIEWS for run_group in groups for method in run_group.methods)
    max_panels = max(1, MAX_CLIENTS // max(1, view_count))
    extras = [
        _add_predictions(_page_extras(run_group, f"v{k}", max_panels, console), run_group, subgroups)
        for k, run_group in enumerate(groups)
    ]
    for note in notes:
        print_line(console, note)
    names = [folder.resolve().name for folder in folders]
    title = f"polyfed: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    page = folders[0] / PAGE if out is None else out
    try:
        write_file_atomically(page, render_page(groups, extras, notes, title).encode(), private=out is None)
    except OSError as error:
        raise UserError(f"cannot write the page {page} ({error.strerror}); give another --out FILE.html") from error
    print_line(console, f"Everything on one page: {page}")


def _methods_table(run_group: RunGroup) -> PlainTable:
    """One row a method: the mean over clients and seeds, who is worst off, and what it took."""
    title = f"{run_group.title}: {run_group.score_format.label} on each client's own test examples"
    table = PlainTable(title=title, title_justify="left")
    table.add_column("method")
    several_seeds = len(run_group.seeds) > 1
    for column in (
        *(["seeds"] if several_seeds else []),
        "round",
        "mean",
        "worst client",
        "MB a run" if several_seeds else "MB",
    ):
        table.add_column(column, justify="right")
    for method in run_group.methods:
        defined_scores = {
            name: value for name, value in run_group.score_by_participant(method).items() if not math.isnan(value)
        }
        worst = min(defined_scores, key=lambda name: defined_scores[name], default=None)
        rounds = sorted({run.scored_round for run in method.runs})
        table.add_row(
            method.label,
            *([str(len(method.runs))] if several_seeds else []),
            "–".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
            _format_number(run_group.mean_score(method)),
            "–" if worst is None else f"{defined_scores[worst]:.3f} ({worst})",
            f"{fmean(run.megabytes_and_seconds[0] for run in method.runs):.1f}",
        )
    return table


def _clients_table(run_group: RunGroup, console: Console) -> PlainTable:
    """One row a client, of the first ones, with as many methods side by side as the terminal has room for; training alone
    is always among them. Where a seed deals the data anew, the clients are those of the first."""
    other_methods = [method for method in run_group.methods if method is not run_group.local_method]
    local_method = [] if run_group.local_method is None else [run_group.local_method]
    for number in range(min(len(other_methods), _COLUMNS), -1, -1):
        methods = [*other_methods[:number], *local_method] or other_methods[:1]
        table = _clients_table_of(run_group, methods)
        if Measurement.get(console, console.options.update(max_width=10**4), table).maximum <= console.width:
            break
    return table


def _clients_table_of(run_group: RunGroup, methods: Sequence[MethodRuns]) -> PlainTable:
    data_by_seed = not run_group.same_clients and len(run_group.seeds) > 1
    columns = [
        next(({**run.score_by_client} for run in method.runs if run.seed == run_group.seeds[0]), {})
        if data_by_seed
        else run_group.score_by_participant(method)
        for method in methods
    ]
    names = sorted({name for column in columns for name in column})
    hidden_clients = len(names) - MAX_CLIENTS
    hidden_methods = len(run_group.methods) - len(methods)
    more = [f"{count_with_noun(hidden_clients, 'more client')}"] if hidden_clients > 0 else []
    more += [count_with_noun(hidden_methods, "more method")] if hidden_methods else []
    table = PlainTable(
        title=f"each client{f', of seed {run_group.seeds[0]}' if data_by_seed else ''}",
        title_justify="left",
        caption=f"and {' and '.join(more)} on the page" if more else None,
        caption_justify="left",
    )
    table.add_column("client")
    for method in methods:
        table.add_column(method.label, justify="right")
    for name in names[:MAX_CLIENTS]:
        table.add_row(name, *(_format_number(column.get(name)) for column in columns))
    return table


def _format_number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


# -- beside the scores ------------------------------------------------------------------------------------------------


def _page_extras(run_group: RunGroup, key: str, max_panels: int, console: Console) -> PageExtras:
    """The class distribution and what the methods have to show; of several seeds, that of the first."""
    runs = [method.runs[0] for method in run_group.methods if method.runs[0].folder is not None]
    experiment_data, reason = _load_participants(runs[0]) if runs else (None, "")
    method_views: dict[str, dict[str, str]] = {}
    for position, (method, run) in enumerate((method, method.runs[0]) for method in run_group.methods):
        if run.folder is None:
            continue
        panel_name = f"{method.label}, seed {run.seed}" if len(method.runs) > 1 else method.label
        _draw_pictures(run, run.folder, console)
        if shown := update_norms.html_update_norms(run, f"{key}-{position}"):
            method_views.setdefault(update_norms.NORMS_HEADING, {})[panel_name] = shown
        for heading, view in _VIEWS.get(run.method, ()):
            try:
                shown = view(run.folder, experiment_data, f"{key}-{position}", max_panels)
            except (UserError, OSError) as error:
                shown = html_list([f"Not shown: {error}"])
            if shown:
                method_views.setdefault(heading, {})[panel_name] = shown
    if run_group.comparison_results:
        classes = {
            int(seed): {
                client: client_data["classes"] for client, client_data in clients.items() if client_data["classes"]
            }
            for seed, clients in run_group.comparison_results.get("data", {}).items()
            if not run_group.same_clients or int(seed) == run_group.seeds[0]  # else they are the same for each
        }
        all_counts = [counts for clients in classes.values() for counts in clients.values()]
        names = list(run_group.comparison_results.get("class_names") or ())
        names += range(len(names), max(map(len, all_counts), default=0))  # of clients made in Python
        if any(classes.values()):
            return PageExtras(
                {seed: counts_by_client for seed, counts_by_client in classes.items() if counts_by_client},
                [str(name) for name in names],
                "",
                method_views,
            )
        return PageExtras(
            class_note="The examples of these clients have no classes to count.", method_views=method_views
        )
    if experiment_data is None:
        return PageExtras(class_note=reason, method_views=method_views)
    if not experiment_data.classes:
        return PageExtras(
            class_note="Examples with several labels are not counted by class.", method_views=method_views
        )
    class_counts = {client.id: experiment_data.classes[client.id] for client in experiment_data.clients}
    more = "" if len(run_group.seeds) == 1 else f"Seed {runs[0].seed}; the others deal the same data in their own draw."
    return PageExtras({runs[0].seed: class_counts}, experiment_data.pool.class_names, more, method_views)


def _add_predictions(extras: PageExtras, run_group: RunGroup, subgroups: Sequence[str]) -> PageExtras:
    predictions, reason = read_group_predictions(run_group, extras.class_names or None)
    if predictions is None and subgroups:
        raise UserError(f"--subgroup {subgroups[0]!r}: {reason.rstrip('.')}; leave it out")
    # Runs by themselves need not say what only comparisons are looked at for.
    return replace(
        extras,
        predictions=predictions,
        predictions_note=reason if run_group.comparison_results else "",
        subgroup_columns=tuple(subgroups),
    )


def _load_participants(run: RunRecord) -> tuple[Participants | None, str]:
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
        experiment_data = load_participants(build_experiment(run.config))
    except UserError as error:
        return None, f"The data of the run could not be read again: {error}."
    before = read_manifest(run.folder or "").get("partition_fingerprint")
    if before not in (None, experiment_data.partition_fingerprint):
        return None, "The data are no longer divided as in the run, so that the classes of its clients are not known."
    return experiment_data, ""


def _aggregation_weights_view(folder: Path, experiment_data: Participants | None, key: str, max_panels: int) -> str:
    from polyfed.report.page import method_views

    return method_views.html_aggregation_weights(folder, key, max_panels)


def _alignment_view(folder: Path, experiment_data: Participants | None, key: str, max_panels: int) -> str:
    from polyfed.report.page import method_views

    if experiment_data is None:
        raise UserError(
            "the clients and their test examples are not at hand; polyfed.report.figures.alignment takes them in Python"
        )
    return method_views.html_alignment(folder, experiment_data.clients, key)


def _architectures_view(folder: Path, experiment_data: Participants | None, key: str, max_panels: int) -> str:
    from polyfed.report.page import method_views

    return method_views.html_architectures(folder, key, max_panels)


def _gradient_agreement_view(folder: Path, experiment_data: Participants | None, key: str, max_panels: int) -> str:
    from polyfed.report.page import conflicts

    if experiment_data is None:
        raise UserError(
            "the clients' training examples are not at hand; polyfed.simulation.results.gradient_conflicts takes a run in Python"
        )
    return conflicts.html_gradient_agreement(folder, experiment_data.clients, experiment_data.public, key)


def _coverage_view(folder: Path, experiment_data: Participants | None, key: str, max_panels: int) -> str:
    from polyfed.algorithms import FLHAGHN
    from polyfed.graphs.contraction import NO_CONTRACTION
    from polyfed.report.page import method_views
    from polyfed.simulation.storage.configuration import build_method, read_section
    from polyfed.simulation.storage.directory import read_config

    if experiment_data is None:
        raise UserError("the clients' networks are not at hand; `polyfed graph MODEL --input SHAPE` shows one of them")
    method = build_method(read_section(read_config(folder), "algorithm"))
    return method_views.html_coverage(
        experiment_data.clients, key, method.contraction if isinstance(method, FLHAGHN) else NO_CONTRACTION
    )


def _warm_starts_view(folder: Path, experiment_data: Participants | None, key: str, max_panels: int) -> str:
    from polyfed.report.page import method_views

    return method_views.html_warm_starts(folder, key)


_View = Callable[[Path, Participants | None, str, int], str]
_VIEWS: Mapping[str, tuple[tuple[str, _View], ...]] = {
    **dict.fromkeys(("pfedla", "heur_pfedla"), (("Who aggregates from whom", _aggregation_weights_view),)),
    **dict.fromkeys(("fedhenn", "fedhenn_homo"), (("How alike representations are", _alignment_view),)),
    **dict.fromkeys(("feddsnas", "ca_feddsnas"), (("Operations that were found", _architectures_view),)),
    **dict.fromkeys(
        ("fedpnas", "ca_fedpnas"),
        (
            ("Operations that were found", _architectures_view),
            ("Whom the federated gradient works against", _gradient_agreement_view),
        ),
    ),
    "flha_ghn": (
        ("What the hypernetwork can generate", _coverage_view),
        ("Unseen clients' warm starts", _warm_starts_view),
    ),
}


# -- on the terminal, and as pictures ---------------------------------------------------------------------------------


def _draw_pictures(run: RunRecord, folder: Path, console: Console) -> None:
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
    print_line(console, f"{run.method}: {shown}")


def _make_picture_folder(folder: Path) -> Path:
    place = folder / PICTURE_FOLDER
    try:
        create_private_folder(place)
    except OSError as error:
        raise UserError(
            f"no pictures, since the folder {place} cannot be made ({error.strerror}); the page has what they show"
        ) from error
    return place


def _draw_search_pictures(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """Probabilities of operations, and the cells of each client."""
    from polyfed.report.figures.architectures import draw_client_cells, draw_operation_probabilities, read_search_result

    result = read_search_result(folder)
    shown = result.clients[:_COLUMNS]
    table = PlainTable(
        title=f"most probable operation of each edge, and its probability ({folder})", title_justify="left"
    )
    for column in ("cell", "edge", *shown):
        table.add_column(column)
    for k, title in enumerate(result.cell_titles):
        for e, edge in enumerate(result.cells[0][k].edges):
            cells = [result.cells_of(client)[k] for client in shown]
            row = [f"{cell.chosen_operations[e]} {cell.probabilities[e].max():.2f}" for cell in cells]
            table.add_row(title if e == 0 else "", cells[0].edge_label(edge), *row)
    console.print(table)
    picture_folder = _make_picture_folder(folder)
    draw_operation_probabilities(result, picture_folder / "probabilities.png")
    yield picture_folder / "probabilities.png"
    for client in result.clients[:MAX_CLIENTS]:
        path = picture_folder / f"cells-{safe_file_name(client)}.png"
        draw_client_cells(result, client, path)
        yield path


def _draw_aggregation_pictures(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """Who aggregates from whom: pFedLA's weights, layer by layer."""
    from polyfed.report.figures import aggregation

    weights = aggregation.read_aggregation_weights(folder)
    picture_folder = _make_picture_folder(folder)
    for layer in weights.layers[:MAX_CLIENTS]:
        path = picture_folder / f"weights-{safe_file_name(layer)}.png"
        aggregation.save_aggregation_figure(aggregation.draw_layer_heat_map(weights, layer), path)
        yield path


def _draw_alignment_picture(folder: Path, config: Mapping[str, Any], console: Console) -> Iterator[Path]:
    """How alike the clients' representations are, before and after."""
    from polyfed.data.plot import save_figure
    from polyfed.report.figures.alignment import draw_alignment, measure_alignment
    from polyfed.simulation.experiment import rebuild_clients

    clients, _ = rebuild_clients(config, folder)
    alignment = measure_alignment(folder, clients=clients)
    print_line(
        console,
        f"mean CKA between two clients: {alignment.mean_cka_before:.2f} before, {alignment.mean_cka_after:.2f} after",
    )
    path = _make_picture_folder(folder) / "alignment.png"
    save_figure(draw_alignment(alignment), path)
    yield path


_PICTURES: Mapping[str, Callable[[Path, Mapping[str, Any], Console], Iterator[Path]]] = {
    **dict.fromkeys(("fedpnas", "ca_fedpnas", "feddsnas", "ca_feddsnas"), _draw_search_pictures),
    **dict.fromkeys(("pfedla", "heur_pfedla"), _draw_aggregation_pictures),
    **dict.fromkeys(("fedhenn", "fedhenn_homo"), _draw_alignment_picture),
}
