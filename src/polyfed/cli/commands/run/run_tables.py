"""Prints the end of a run from its directory, without importing torch: scores by client, gains, traffic, what to do next."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, final

from rich.console import Console
from rich.measure import Measurement

from polyfed.cli.commands.compare.answer_lines import print_next_commands
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import count_with_noun, format_bytes
from polyfed.core.io.text.site_words import client_heading, name_sites
from polyfed.simulation.results.across_sites.cross_site_scores import read_cross_site
from polyfed.simulation.storage.directory import BASELINES
from polyfed.simulation.storage.run_files import RunFiles

_FEW_TEST_EXAMPLES = 10
_FREQUENT = 0.8  # share of a class from which on its accuracy says little
_ONE_SEED = "One seed: differences of a few points can be chance."
ScoreTable = Mapping[str, Mapping[str, Any]]  # client's id, or "mean" -> row of `RunFiles.table`


@final
@dataclass(frozen=True)
class DecidingScore:
    """Describes the score that decides, as `manifest.json` does: in words, with "%" for shares, and what is better."""

    name: str
    label: str
    unit: str = ""
    higher_is_better: bool = True

    @classmethod
    def of_run(cls, run: RunFiles) -> "DecidingScore":
        """Returns the score by which a run's rounds are compared; without a manifest its name alone is known."""
        entry = run.manifest.get("score") or {}
        name = str(entry.get("name") or (run.metric_names or ["loss"])[0])
        label, unit = str(entry.get("label") or name), str(entry.get("unit") or "")
        return cls(name, label, unit, entry.get("higher_is_better") is not False)


def read_run_and_baselines(folder: Path) -> dict[str, RunFiles]:
    """Returns the run in a directory and its baselines that have as many rounds, by method; the run itself first.

    Raises:
        UserError: the folder holds no run.
    """
    main = RunFiles.read(folder)
    baseline_files = sorted((folder / BASELINES).glob("*/config.yaml"), key=lambda file: file.parent.name)
    order = {str(_name_of(entry)): place for place, entry in enumerate(main.config.get("baselines") or ())}
    names = sorted((file.parent.name for file in baseline_files), key=lambda name: order.get(name, len(order)))
    baselines = {name: RunFiles.read(folder / BASELINES / name) for name in names}
    return {main.method: main} | {name: run for name, run in baselines.items() if _is_comparable(run, main)}


def _name_of(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else entry


def _is_comparable(run: RunFiles, main: RunFiles) -> bool:
    return len(run.history) == len(main.history) and any(record["summary"] for record in run.history)


def print_end_of_run(folder: Path, console: Console) -> None:
    """Prints clients' scores in a run and its baselines, the gain over the first, traffic, and how to go on.

    It has a row per client, or only overall scores where the terminal is too narrow for all methods.

    Args:
        folder: of a run with a round that was evaluated.
        console: where to print.
    """
    runs = read_run_and_baselines(folder)
    main, *baseline_names = runs
    run, score = runs[main], DecidingScore.of_run(runs[main])
    tables, at_round = _read_tables(runs)
    criterion = "lowest validation loss" if run.config.get("keep") == "loss" else "best validation score"
    last_round = [record for record in run.history if record["summary"]][-1]["round"]
    when = f"after round {last_round}" if at_round == "last" else f"after the round with the {criterion}"
    means = tables[main]["mean"]
    some = f"; {means['evaluated']} of {means['of']} clients evaluated" if "evaluated" in means else ""
    word = client_heading(client for client in tables[main] if client != "mean")
    title = f"{score.label} on each {word}'s own test examples, {when}{some}"
    test_counts = _count_few_test_examples(run, list(tables[main]))
    counted = run.manifest.get("counted") or {}
    table = _table_by_client(tables, [*baseline_names, main], score, test_counts, counted, title)
    if (
        baseline_names
        and Measurement.get(console, console.options.update(max_width=10**4), table).maximum > console.width
    ):
        table = _table_by_method(tables, main, score, when)
    console.print(table)
    if num_few := sum(count < _FEW_TEST_EXAMPLES for count in test_counts.values()):
        places = f"{count_with_noun(num_few, word)} with fewer than {_FEW_TEST_EXAMPLES} test examples"
        print_line(console, f"* {places}: such a score says little, and counts in the mean as any other")
    for sentence in _describe_frequent_classes(tables, score, counted):
        print_line(console, sentence)
    if baseline_names:
        print_line(console, f"gain: of {main} over {baseline_names[0]}. {_ONE_SEED}")
    _print_traffic(runs, console)
    if (cross_site := read_cross_site(folder)) is not None:
        for line in str(cross_site).splitlines():
            print_line(console, line)
    if unseen := run.manifest.get("unseen"):
        unseen_text = f"{', '.join(map(str, unseen))} took no part"
        if "flha_ghn" in runs:
            network_folder = folder if main == "flha_ghn" else folder / BASELINES / "flha_ghn"
            unseen_text += f"; `polyfed warmstart {network_folder}` gives unseen clients their networks"
        print_line(console, unseen_text)
    print_line(console, f"Everything about this run is in {folder}")
    decide = {"Decide": ["compare", str(folder)]} if "data" in run.config else {}
    print_next_commands(console, Page=["report", str(folder)], **decide)


def _read_tables(runs: Mapping[str, RunFiles]) -> tuple[dict[str, ScoreTable], Literal["last", "best"]]:
    """Returns each method's table by client, of the best round if all methods have one, else of the last."""
    at_round: Literal["last", "best"] = "best"
    rows: dict[str, list[dict[str, Any]]] = {}
    if all(run.config.get("keep") in ("best", "loss") for run in runs.values()):
        with suppress(UserError):  # without validation examples
            rows = {name: run.table("best") for name, run in runs.items()}
    if not rows:
        at_round, rows = "last", {name: run.table() for name, run in runs.items()}
    return {name: {row["client"]: row for row in table} for name, table in rows.items()}, at_round


def _table_by_client(
    tables: Mapping[str, ScoreTable], methods: Sequence[str], score: DecidingScore, test_counts: Mapping[str, int],
    counted: Mapping[str, Any], title: str,
) -> PlainTable:  # fmt: skip
    """Returns a row for each client and one for their mean; the last of `methods` is the run's, the others baselines."""
    table = PlainTable(title=title, title_justify="left")
    table.add_column(client_heading(client for client in tables[methods[-1]] if client != "mean"))
    counts = dict(counted.get("clients") or {})
    columns = ["trained on", *(["tested on"] if test_counts else []), *([str(counted["name"])] if counts else [])]
    for column in (*columns, *methods, *(["gain"] if len(methods) > 1 else [])):
        table.add_column(column, justify="right")
    for client, row in tables[methods[-1]].items():
        is_mean = client == "mean"
        if is_mean:
            table.add_section()
        cells = ["–" if row["num_examples"] is None else f"{row['num_examples']:.0f}"]
        if test_counts:
            count = test_counts.get(client)
            cells.append("" if count is None else f"{count} *" if count < _FEW_TEST_EXAMPLES else f"{count}  ")
        if counts:
            cells.append("" if is_mean else str(counts.get(client, "–")))
        scores = [tables[name].get(client, {}).get(score.name) for name in methods]
        cells += [_format_score(value, score) for value in scores]
        if len(methods) > 1:
            cells.append(_format_gain(scores[-1], scores[0], score))
        table.add_row(client, *cells)
    return table


def _describe_frequent_classes(
    tables: Mapping[str, ScoreTable], score: DecidingScore, counted: Mapping[str, Any]
) -> list[str]:
    """Returns sentences on methods whose accuracy is that of always predicting the most frequent class.

    >>> table, counted = {"north": {"accuracy": 0.9}}, {"clients": {"north": 2}, "most_frequent": {"north": 0.9}}
    >>> for sentence in _describe_frequent_classes({"fedavg": table}, DecidingScore("accuracy", "accuracy"), counted):
    ...     print(sentence)
    fedavg scores as if it always predicted the most frequent class at north.
    Accuracy says little where most test examples are of one class (90 % at north): --metrics auc
    """
    shares = {client: share for client, share in (counted.get("most_frequent") or {}).items() if share < 1}
    if score.name != "accuracy" or not shares:
        return []
    sentences = []
    for method, rows in tables.items():
        values = {client: rows.get(client, {}).get("accuracy") for client in shares}
        if sites := [
            client for client, value in values.items() if value is not None and abs(value - shares[client]) < 1e-6
        ]:
            sentences.append(
                f"{method} scores as if it always predicted the most frequent class at {name_sites(sites, 5)}."
            )
    client, share = max(shares.items(), key=lambda item: item[1])
    if share >= _FREQUENT:
        metric = "auc" if max(counted["clients"].values()) <= 2 else "balanced_accuracy"
        place = f"{100 * share:.0f} % at {name_sites([client])}"
        sentences.append(
            f"Accuracy says little where most test examples are of one class ({place}): --metrics {metric}"
        )
    return sentences


def _count_few_test_examples(run: RunFiles, names: Sequence[str]) -> dict[str, int]:
    """Returns the number of test examples of each client, if some of those named have few; else nothing."""
    counts = {client: count for client, count in run.num_test_examples.items() if client in names}
    return counts if min(counts.values(), default=_FEW_TEST_EXAMPLES) < _FEW_TEST_EXAMPLES else {}


def _print_traffic(runs: Mapping[str, RunFiles], console: Console) -> None:
    for name, run in runs.items():
        record = run.history[-1]
        sent, received = (format_bytes(record.get(f"bytes_{way}_total") or 0) for way in ("down", "up"))
        traffic_text = f"{name}: {sent} down, {received} up in {len(run.history)} rounds"
        print_line(console, f"{traffic_text}{_seconds_text(run)}")
        if network_text := (run.manifest.get("score") or {}).get("network"):
            print_line(console, f"{name}: scores are of {network_text}")
    if cost := next(iter(runs.values())).manifest.get("preparation"):
        traffic_text = f"{format_bytes(cost['bytes_up'])} up, {format_bytes(cost['bytes_down'])} down"
        print_line(console, f"preprocessing from sums over all clients: {traffic_text} in {cost['rounds']} rounds")


def _format_score(value: float | None, score: DecidingScore) -> str:
    """Formats a score for display: shares in per cent, others as a number.

    >>> _format_score(0.871, DecidingScore("accuracy", "accuracy", "%")), _format_score(0.871, DecidingScore("auc", "AUC"))
    ('87.1 %', '0.871')
    """
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if score.unit == "%" else f"{value:.3f}"


def _format_gain(value: float | None, base: float | None, score: DecidingScore) -> str:
    """Formats by how much a score is better than another; in percentage points for shares."""
    if value is None or base is None:
        return "–"
    gain = value - base if score.higher_is_better else base - value
    return f"{100 * gain:+.1f}" if score.unit == "%" else f"{gain:+.3f}"


def _table_by_method(tables: Mapping[str, ScoreTable], main: str, score: DecidingScore, when: str) -> PlainTable:
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


def _seconds_text(run: RunFiles) -> str:
    """Formats the mean seconds of a round; empty for a run that did not record them."""
    if not all("seconds_clients" in record and "seconds_server" in record for record in run.history):
        return ""
    clients, server = (fmean(record[f"seconds_{side}"] for record in run.history) for side in ("clients", "server"))
    return f"; a round took {clients:.2f} s on clients, {server:.2f} s on the server"
