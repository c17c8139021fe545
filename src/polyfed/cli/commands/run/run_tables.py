"""Prints the tables of a run and its baselines: scores by client, gains, traffic."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.measure import Measurement

from polyfed.cli.commands.compare.answer_lines import print_next_commands
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.text.number_format import count_with_noun, format_bytes
from polyfed.core.io.text.site_words import client_heading
from polyfed.core.methods.capabilities import describe_evaluated_network
from polyfed.simulation.experiment import (
    Participants,
)
from polyfed.simulation.results.run import Run
from polyfed.simulation.storage.directory import BASELINES

_FEW_TEST_EXAMPLES = 10
_ONE_SEED = "One seed: differences of a few points can be chance."


def print_scores_by_client_and_traffic(
    runs: Mapping[str, Run], experiment_data: Participants, out: Path, console: Console
) -> None:
    """Prints clients' scores in a run and its baselines, the gain over the first, and megabytes.

    It has a row per client, or only overall scores where the terminal is too narrow for all methods.
    """
    main, *baseline_names = runs
    score = runs[main].federation.metrics[0]
    at_round: Literal["last", "best"] = (
        "best"
        if all(run.best is not None and run.federation.settings.keep in ("best", "loss") for run in runs.values())
        else "last"
    )
    tables = {name: {row["client"]: row for row in run.table(at_round)} for name, run in runs.items()}
    criterion = "lowest validation loss" if runs[main].federation.settings.keep == "loss" else "best validation score"
    when = f"after round {runs[main].last.round}" if at_round == "last" else f"after the round with the {criterion}"
    sample = runs[main].table(at_round)[-1]
    some = f"; {sample['evaluated']} of {sample['of']} clients evaluated" if "evaluated" in sample else ""
    word = client_heading(client for client in tables[main] if client != "mean")
    title = f"{score.label} on each {word}'s own test examples, {when}{some}"
    table = _table_by_client(tables, [*baseline_names, main], score, experiment_data, title)
    if (
        baseline_names
        and Measurement.get(console, console.options.update(max_width=10**4), table).maximum > console.width
    ):
        table = _table_by_method(tables, main, score, when)
    console.print(table)
    test_counts = _count_few_test_examples(experiment_data, list(tables[main]))
    if num_few := sum(count < _FEW_TEST_EXAMPLES for count in test_counts.values()):
        places = f"{count_with_noun(num_few, word)} with fewer than {_FEW_TEST_EXAMPLES} test examples"
        print_line(console, f"* {places}: such a score says little, and counts in the mean as any other")
    if baseline_names:
        print_line(console, f"gain: of {main} over {baseline_names[0]}. {_ONE_SEED}")
    _print_traffic(runs, experiment_data, console)
    if (cross_site := runs[main].cross_site_scores) is not None:
        for line in str(cross_site).splitlines():
            print_line(console, line)
    if experiment_data.unseen:
        unseen_text = f"{', '.join(c.id for c in experiment_data.unseen)} took no part"
        if "flha_ghn" in runs:
            folder = out if main == "flha_ghn" else out / BASELINES / "flha_ghn"
            unseen_text += f"; `polyfed warmstart {folder}` gives unseen clients their networks"
        print_line(console, unseen_text)
    print_line(console, f"Everything about this run is in {out}")
    print_next_commands(console, Page=["report", str(out)], Decide=["compare", str(out)])


def _table_by_client(
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]], methods: Sequence[str], score: Metric,
    experiment_data: Participants, title: str,
) -> PlainTable:  # fmt: skip
    """Returns a row for each client and one for their mean; the last of `methods` is the run's, the others baselines."""
    table = PlainTable(title=title, title_justify="left")
    table.add_column(client_heading(client for client in tables[methods[-1]] if client != "mean"))
    task, classes = experiment_data.clients[0].task, experiment_data.classes
    counted = []
    if classes:
        counted = ["classes" if task.one_class_per_example else task.count_names(experiment_data.pool.class_names)[-1]]
    test_counts = _count_few_test_examples(experiment_data, list(tables[methods[-1]]))
    tested = ["tested on"] if test_counts else []
    for column in ("trained on", *tested, *counted, *methods, *(["gain"] if len(methods) > 1 else [])):
        table.add_column(column, justify="right")
    for client, row in tables[methods[-1]].items():
        is_mean = client == "mean"
        if is_mean:
            table.add_section()
        cells = [f"{row['num_examples']:.0f}"]
        if test_counts:
            count = test_counts.get(client)
            cells.append("" if count is None else f"{count} *" if count < _FEW_TEST_EXAMPLES else f"{count}  ")
        if classes:
            counts = [
                sum(n > 0 for n in class_counts) if task.one_class_per_example else class_counts[-1]
                for class_counts in (
                    classes[c] for c in ([c.id for c in experiment_data.clients] if is_mean else [client])
                )
            ]
            cells.append(f"{sum(counts) / len(counts):.1f}" if is_mean else str(counts[0]))
        scores = [tables[name][client][score.name] for name in methods]
        cells += [_format_score(value, score) for value in scores]
        if len(methods) > 1:
            cells.append(_format_gain(scores[-1], scores[0], score))
        table.add_row(client, *cells)
    return table


def _count_few_test_examples(experiment_data: Participants, names: Sequence[str]) -> dict[str, int]:
    """Returns the number of test examples of each client, if some of those named have few; else nothing."""
    counts = {client.id: len(client.test) for client in experiment_data.clients if client.id in names}
    return counts if min(counts.values(), default=_FEW_TEST_EXAMPLES) < _FEW_TEST_EXAMPLES else {}


def _print_traffic(runs: Mapping[str, Run], experiment_data: Participants, console: Console) -> None:
    for name, run in runs.items():
        record = run.history[-1]
        sent, received = (format_bytes(record[f"bytes_{way}_total"]) for way in ("down", "up"))
        traffic_text = f"{name}: {sent} down, {received} up in {len(run.history)} rounds"
        print_line(console, f"{traffic_text}{_seconds_text(run)}")
        if network_text := describe_evaluated_network(run.federation.algorithm):
            print_line(console, f"{name}: scores are of {network_text}")
    if cost := experiment_data.preparation:
        traffic_text = f"{format_bytes(cost['bytes_up'])} up, {format_bytes(cost['bytes_down'])} down"
        print_line(console, f"preprocessing from sums over all clients: {traffic_text} in {cost['rounds']} rounds")


def _format_score(value: float | None, metric: Metric) -> str:
    """Formats a score for display: shares in per cent, others as a number.

    >>> from polyfed.core.evaluation.metrics import resolve_metrics
    >>> (_format_score(0.871, resolve_metrics("accuracy", "classification")[0]),
    ...  _format_score(0.871, resolve_metrics("auc", "classification")[0]))
    ('87.1 %', '0.871')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric.unit == "%" else f"{value:.3f}"


def _format_gain(value: float | None, base: float | None, metric: Metric) -> str:
    """Formats by how much a score is better than another; in percentage points for shares."""
    if value is None or base is None:
        return "–"
    gain = value - base if metric.higher_is_better else base - value
    return f"{100 * gain:+.1f}" if metric.unit == "%" else f"{gain:+.3f}"


def _table_by_method(
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]], main: str, score: Metric, when: str
) -> PlainTable:
    """Builds a table with one row per method, for a terminal that is too narrow for one column per method."""
    baseline_names = [name for name in tables if name != main]
    table = PlainTable(title=f"{score.label} on each client's own test examples, {when}; metrics.jsonl has each client's",
                  title_justify="left")  # fmt: skip
    table.add_column("method")
    for column in ("mean", "worst client", "best client", f"gain over {baseline_names[0]}"):
        table.add_column(column, justify="right")
    means = {name: rows["mean"][score.name] for name, rows in tables.items()}
    base = means[baseline_names[0]]
    for name in (*baseline_names, main):
        values = [row[score.name] for client, row in tables[name].items() if client != "mean"]
        defined_scores = sorted((v for v in values if v is not None), reverse=not score.higher_is_better)
        cells = [means[name], *((defined_scores[0], defined_scores[-1]) if defined_scores else (None, None))]
        table.add_row(name, *(_format_score(value, score) for value in cells), _format_gain(means[name], base, score))
    return table


def _seconds_text(run: Run) -> str:
    """Formats the mean seconds of a round; empty for a run that did not record them."""
    if not all("seconds_clients" in record and "seconds_server" in record for record in run.history):
        return ""
    clients, server = (fmean(record[f"seconds_{side}"] for record in run.history) for side in ("clients", "server"))
    return f"; a round took {clients:.2f} s on clients, {server:.2f} s on the server"
