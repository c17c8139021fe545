"""Implements `polyfed report`: prints the last scores of runs, and writes an HTML page about the runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.measure import Measurement

from polyfed.cli.commands.compare.answer_lines import print_answers
from polyfed.cli.commands.results.method_panels import (
    PanelInputs,
    build_image_panel,
    build_method_panels_and_print_results,
    load_participants_offline,
    method_adds_panels,
)
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, read_description
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import write_file_atomically
from polyfed.core.io.number_format import count_with_noun, format_number, join_first_and_count_rest
from polyfed.core.task import DEFAULT_TASK, get_task
from polyfed.data.look.look import look_at_sites
from polyfed.report.data.predictions import read_group_predictions
from polyfed.report.data.run_groups import MethodRuns, RunGroup, read_run_groups
from polyfed.report.data.run_records import RunRecord
from polyfed.report.page import update_directions, update_norms
from polyfed.report.page.cross_site import CROSS_SITE_HEADING, html_cross_site
from polyfed.report.page.look import LOOK_HEADING, html_look
from polyfed.report.page.page import render_page
from polyfed.report.page.sections import PageExtras
from polyfed.simulation.experiment import Participants
from polyfed.simulation.results.cross_site_scores import average_cross_site, read_cross_site
from polyfed.simulation.storage.directory import read_manifest

PAGE = "report.html"
MAX_CLIENTS = 12  # clients on the terminal; on the page, panels of one kind of all runs together
_COLUMNS = 8  # methods side by side in a table


def show_report(
    folders: Sequence[Path],
    console: Console | None = None,
    *,
    out: Path | None = None,
    subgroups: Sequence[str] = (),
    show_images: bool = False,
) -> Path:
    """Prints the scores of runs, of their baselines and of comparisons, writes an HTML page with details, and returns
    the page's path.

    Args:
        folders: run directories, or those of `polyfed compare`.
        console: where to print; standard output by default.
        out: the page to write; None for `report.html` in the first folder.
        subgroups: columns of the test examples, such as "sex"; the page has scores by their values.
        show_images: puts test images of segmentations on the page, which are the clients' data.

    Returns:
        The path of the page.

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
    view_count = sum(method_adds_panels(method.runs[0].method) for run_group in groups for method in run_group.methods)
    max_panels = max(1, MAX_CLIENTS // max(1, view_count))
    extras = [
        _add_predictions(_page_extras(run_group, f"v{k}", max_panels, console, show_images), run_group, subgroups)
        for k, run_group in enumerate(groups)
    ]
    for note in notes:
        print_line(console, note)
    for run_group in groups:
        if run_group.comparison_results:
            print_answers(run_group.comparison_results, None, console)
    names = [folder.resolve().name for folder in folders]
    title = f"polyfed: {join_first_and_count_rest(names, 3)}"
    page = folders[0] / PAGE if out is None else out
    try:
        write_file_atomically(page, render_page(groups, extras, notes, title).encode(), private=out is None)
    except OSError as error:
        raise UserError(f"cannot write the page {page} ({error.strerror}); give another --out FILE.html") from error
    print_line(console, f"Everything on one page: {page}", style="cyan")
    return page


def write_report_quietly(folder: Path, out: Path | None) -> Path:
    """Writes the HTML page of one run or comparison without printing anything, and returns the page's path."""
    return show_report([folder], Console(quiet=True), out=out)


def _methods_table(run_group: RunGroup) -> PlainTable:
    """Builds the table with one row per method: its mean over clients and seeds, its worst client, and its traffic."""
    title = f"{run_group.title}: {run_group.score_format.label} on each client's own test examples"
    table = PlainTable(title=title, title_justify="left")
    table.add_column("method")
    several_seeds, unit = len(run_group.seeds) > 1, run_group.score_format.unit
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
            name: value for name, value in run_group.mean_score_by_participant(method).items() if not math.isnan(value)
        }
        worst = min(defined_scores, key=lambda name: defined_scores[name], default=None)
        rounds = sorted({run.scored_round for run in method.runs})
        table.add_row(
            method.label,
            *([str(len(method.runs))] if several_seeds else []),
            "–".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
            format_number(run_group.mean_score(method), unit),
            "–" if worst is None else f"{format_number(defined_scores[worst], unit)} ({worst})",
            f"{fmean(run.cost_until_scored_round[0] for run in method.runs):.1f}",
        )
    return table


def _clients_table(run_group: RunGroup, console: Console) -> PlainTable:
    """Builds the table of the first clients, with as many methods side by side as the terminal has room for.

    Training alone is always among them. Where each seed deals other data, the clients are those of the first seed.
    """
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
        else run_group.mean_score_by_participant(method)
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
        table.add_row(name, *(format_number(column.get(name), run_group.score_format.unit) for column in columns))
    return table


# -- beside the scores ------------------------------------------------------------------------------------------------


def _page_extras(run_group: RunGroup, key: str, max_panels: int, console: Console, show_images: bool) -> PageExtras:
    """Collects the class counts and what the methods add to the page, each of a method's first seed."""
    runs = [method.runs[0] for method in run_group.methods if method.runs[0].folder is not None]
    participants, reason = load_participants_offline(runs[0]) if runs else (None, "")
    method_views: dict[str, dict[str, Markup]] = {}
    for position, method in enumerate(run_group.methods):
        run = method.runs[0]
        if run.folder is None:
            continue
        panel_name = f"{method.label}, seed {run.seed}" if len(method.runs) > 1 else method.label
        panel_key = f"{key}-{position}"
        panels = {
            update_norms.NORMS_HEADING: update_norms.html_update_norms(run, panel_key),
            update_directions.DIRECTIONS_HEADING: update_directions.html_update_directions(run, panel_key),
        }
        inputs = PanelInputs(run, participants, panel_key, max_panels, console)
        panels |= build_method_panels_and_print_results(inputs)
        panels |= build_image_panel(inputs, reason) if show_images else {}
        for heading, html in panels.items():
            if html:
                method_views.setdefault(heading, {})[panel_name] = html
    shown_participants = _participants_of_comparison(runs[0]) if participants is None and runs else participants
    extra_panels = _site_panels(run_group, shown_participants, key)
    if run_group.comparison_results:
        return replace(_comparison_class_counts(run_group, method_views), panels=extra_panels)
    if participants is None:
        names = (
            () if not runs else [str(name) for name in read_manifest(runs[0].folder or Path()).get("class_names") or ()]
        )
        return PageExtras(class_names=names, class_note=reason, method_views=method_views, panels=extra_panels)
    if not participants.classes:
        note = "Examples with several labels are not counted by class."
        return PageExtras(class_note=note, method_views=method_views, panels=extra_panels)
    class_counts = {client.id: participants.classes[client.id] for client in participants.clients}
    more = "" if len(run_group.seeds) == 1 else f"Seed {runs[0].seed}; the others deal the same data in their own draw."
    return PageExtras(
        {runs[0].seed: class_counts},
        participants.pool.task.count_names(participants.pool.class_names),
        more,
        method_views,
        panels=extra_panels,
    )


def _participants_of_comparison(run: RunRecord) -> Participants | None:
    """Returns the clients of the comparison that a run belongs to, as its first seed deals them before they are split again;
    None if it is of none, or was made in Python."""
    for folder in list((run.folder or Path()).parents)[:3]:
        if (folder / DESCRIPTION).is_file():
            description = read_description(folder)
            if (experiment := description.get("experiment")) is not None and description.get("seeds"):
                config = {**experiment["config"], "seed": description["seeds"][0]}
                return load_participants_offline(replace(run, config=config, folder=None))[0]
    return None


def _site_panels(run_group: RunGroup, participants: Participants | None, key: str) -> dict[str, Markup]:
    """Renders the look at the sites' data, where the configuration says which data they have, and the scores of every
    site's model at every site, where they were computed."""
    panels = {}
    matrices = {}
    for method in run_group.methods:
        parts = [read_cross_site(run.folder) for run in method.runs if run.folder is not None]
        if scores := [part for part in parts if part is not None]:
            matrices[method.label] = average_cross_site(scores)
    if matrices:
        panels[CROSS_SITE_HEADING] = html_cross_site(matrices, f"{key}-cross")
    if participants is not None:
        seen = look_at_sites(participants.clients, tuple(map(str, participants.pool.class_names)))
        panels[LOOK_HEADING] = html_look(seen, f"{key}-look")
    return panels


def _comparison_class_counts(run_group: RunGroup, method_views: Mapping[str, Mapping[str, Markup]]) -> PageExtras:
    """Collects the class counts that a finished comparison holds, by seed where seeds differ in their data."""
    results = run_group.comparison_results
    counts_by_seed = {}
    for seed, clients in results.get("data", {}).items():
        if run_group.same_clients and int(seed) != run_group.seeds[0]:  # the same counts for each seed
            continue
        if counts := {client: entry["classes"] for client, entry in clients.items() if entry["classes"]}:
            counts_by_seed[int(seed)] = counts
    if not counts_by_seed:
        note = "The examples of these clients have no classes to count."
        return PageExtras(class_note=note, method_views=method_views)
    names = _count_names(results)
    class_count = max(len(counts) for by_client in counts_by_seed.values() for counts in by_client.values())
    names += map(str, range(len(names), class_count))  # clients made in Python have no names of classes
    return PageExtras(counts_by_seed, names, "", method_views)


def _count_names(results: Mapping[str, Any]) -> list[str]:
    """Returns the names of what a comparison's task counts; those of classes if this process does not trust the task."""
    names = [str(name) for name in results.get("class_names") or ()]
    try:
        return list(get_task(results.get("task", DEFAULT_TASK)).count_names(names))
    except UserError:
        return names


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
