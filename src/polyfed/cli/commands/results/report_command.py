"""Implements `polyfed report`: prints the last scores of runs, and writes an HTML page about the runs."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.measure import Measurement

from polyfed.cli.commands.compare.answer_lines import print_answers
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.io.text.number_format import count_with_noun, format_number
from polyfed.core.io.text.site_words import client_heading
from polyfed.report.data.run_groups import MethodRuns, RunGroup, read_run_groups
from polyfed.report.data.run_records import RunRecord
from polyfed.report.figures.alignment import RepresentationAlignment
from polyfed.report.page.panels.method_panels import MethodResult
from polyfed.report.page_file import write_page

MAX_CLIENTS = 12  # clients on the terminal
_CLIENTS_ACROSS = 8  # clients side by side in a table of operations
_COLUMNS = 8  # methods side by side in a table


def show_report(
    folders: Sequence[Path],
    console: Console | None = None,
    *,
    out: Path | None = None,
    subgroups: Sequence[str] = (),
    show_images: bool = False,
    quiet: bool = False,
) -> Path:
    """Prints scores of runs, baselines and comparisons, writes a page, and returns its path.

    Args:
        folders: run directories, or those of `polyfed compare`.
        console: where to print; standard output by default.
        out: the page to write; None for `report.html` in the first folder.
        subgroups: columns of the test examples, such as "sex"; the page has scores by their values.
        show_images: puts test images of segmentations on the page, which are the clients' data.
        quiet: prints the path of the page alone.

    Returns:
        The path of the page.

    Raises:
        UserError: a folder is neither, its run has not been evaluated yet, its test examples have no column of
            `subgroups`, or the page cannot be written.
    """
    console = console or Console()
    groups, notes = read_run_groups(folders)
    shown_console = Console(quiet=True) if quiet else console
    for run_group in groups:
        shown_console.print(_methods_table(run_group))
        shown_console.print(_clients_table(run_group, console))
    for note in notes:
        print_line(shown_console, note)
    for run_group in groups:
        if run_group.comparison_results:
            print_answers(run_group.comparison_results, None, shown_console)
    page = write_page(
        folders,
        groups,
        notes,
        out,
        subgroups=subgroups,
        show_images=show_images,
        on_result=partial(_print_result, shown_console),
    )
    print_line(console, f"Everything on one page: {page}", style="cyan")
    return page


def _format_megabytes(megabytes: float) -> str:
    return f"{megabytes:.1f}" if megabytes >= 0.1 else f"{megabytes:.2g}"


def _methods_table(run_group: RunGroup) -> PlainTable:
    """Builds the table with one row per method: its mean over clients and seeds, its worst client, and its traffic."""
    word = client_heading(run_group.clients)
    title = f"{run_group.title}: {run_group.score_format.label} on each {word}'s own test examples"
    table = PlainTable(title=title, title_justify="left")
    table.add_column("method")
    several_seeds, unit = len(run_group.seeds) > 1, run_group.score_format.unit
    for column in (
        *([f"{run_group.repeat}s"] if several_seeds else []),
        "round",
        "mean",
        f"worst {word}",
        "MB a run" if several_seeds else "MB",
    ):
        table.add_column(column, justify="right")
    for method in run_group.methods:
        defined_scores = {
            name: value for name, value in run_group.mean_score_by_participant(method).items() if not math.isnan(value)
        }
        choose = min if run_group.score_format.higher_is_better else max
        worst = choose(defined_scores, key=lambda name: defined_scores[name], default=None)
        rounds = sorted({run.scored_round for run in method.runs})
        table.add_row(
            method.label,
            *([str(len(method.runs))] if several_seeds else []),
            "–".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
            format_number(run_group.mean_score(method), unit),
            "–" if worst is None else f"{format_number(defined_scores[worst], unit)} ({worst})",
            _format_megabytes(fmean(run.cost_until_scored_round[0] for run in method.runs)),
        )
    return table


def _clients_table(run_group: RunGroup, console: Console) -> PlainTable:
    """Builds the table of the first clients, with as many methods side by side as the terminal has room for.

    Training alone is always among them. Where each seed divides the data in another way, they are the first seed's clients.
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
    word = client_heading(run_group.clients)
    more = [f"{count_with_noun(hidden_clients, f'more {word}')}"] if hidden_clients > 0 else []
    more += [count_with_noun(hidden_methods, "more method")] if hidden_methods else []
    table = PlainTable(
        title=f"each {word}{f', of seed {run_group.seeds[0]}' if data_by_seed else ''}",
        title_justify="left",
        caption=f"and {' and '.join(more)} on the page" if more else None,
        caption_justify="left",
    )
    table.add_column(word)
    for method in methods:
        table.add_column(method.label, justify="right")
    for name in names[:MAX_CLIENTS]:
        table.add_row(name, *(format_number(column.get(name), run_group.score_format.unit) for column in columns))
    return table


def _print_result(console: Console, run: RunRecord, result: MethodResult) -> None:
    """Prints what a panel of the page shows: the mean similarity of representations, or the operations that were found."""
    if isinstance(result, RepresentationAlignment):
        print_line(
            console,
            f"{run.method}: mean CKA between two clients: {result.mean_cka_of_initial_networks:.2f} before, "
            f"{result.mean_cka_of_trained_networks:.2f} after",
        )
        return
    clients = result.clients[:_CLIENTS_ACROSS]
    title = f"most probable operation of each edge, and its probability ({run.folder})"
    table = PlainTable(title=title, title_justify="left")
    for column in ("cell", "edge", *clients):
        table.add_column(column)
    for k, cell_title in enumerate(result.cell_titles):
        cells = [result.cells_of(client)[k] for client in clients]
        for e, edge in enumerate(cells[0].edges):
            operations = [f"{cell.chosen_operations[e]} {cell.probabilities[e].max():.2f}" for cell in cells]
            table.add_row(cell_title if e == 0 else "", cells[0].edge_label(edge), *operations)
    console.print(table)
