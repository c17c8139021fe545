"""Implements `polyfed run` and `resume`: runs an experiment with its baselines, and prints its tables."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.measure import Measurement

from polyfed.algorithms import registry_name
from polyfed.cli.commands.compare.answer_lines import print_next_commands
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import ClientError, RoundError, UserError, collect_data_warnings
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.io.atomic_files import create_private_folder_if_missing
from polyfed.core.io.text.number_format import count_with_noun, format_bytes
from polyfed.core.io.text.site_words import client_heading
from polyfed.core.methods.capabilities import describe_evaluated_network
from polyfed.simulation.checks.requirements import check_clients, check_networks_run, warn_of_single_client
from polyfed.simulation.checks.settings.scheduling import supports_asynchronous
from polyfed.simulation.experiment import (
    Experiment,
    Participants,
    build_experiment,
    check_ray_cluster_trusted,
    describe_participants,
    load_participants,
    rebuild_clients,
)
from polyfed.simulation.federate import resume_federation, run_federation
from polyfed.simulation.monitoring.progress import Progress, build_terminal_progress
from polyfed.simulation.monitoring.trackers import build_tracker, list_loggers_of_run, validate_logger_names
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.replies.regional_sums import supports_regions
from polyfed.simulation.rounds.replies.secure_aggregation import supports_secure_sum
from polyfed.simulation.rounds.start.preparation import check_method
from polyfed.simulation.scheduling.asynchronous.rules import parse_asynchronous
from polyfed.simulation.storage.directory import BASELINES, check_can_become_run_directory, read_config
from polyfed.simulation.storage.run_files import RunFiles

_FEW_TEST_EXAMPLES = 10
_ONE_SEED = "One seed: differences of a few points can be chance."


def run_experiment(experiment: Experiment, out: Path, *, quiet: bool = False, logger: Sequence[str] = ()) -> None:
    """Runs an experiment and its baselines, saves the runs in `out`, logs them to `logger`, and prints a table.

    Raises:
        UserError: what `federate` refuses; nothing has been computed.
        RoundError: a baseline could not be finished; all others were, and the table has them.
    """
    for folder in run_folders_by_method(experiment, out).values():  # a baseline's too, before the first run
        check_can_become_run_directory(folder)
    experiment_data = load_checked_participants(experiment)
    runs = {
        registry_name(experiment.algorithm): _run_method(
            experiment, experiment.algorithm, experiment_data, out, _build_progress(out, quiet, logger)
        )
    }
    failed: dict[str, str] = {}
    for name, baseline in experiment.baselines.items():
        folder = create_private_folder_if_missing(out / BASELINES) / name
        try:
            runs[name] = _run_method(
                experiment, baseline, experiment_data, folder, _build_progress(folder, quiet, logger)
            )
        except (ClientError, RoundError) as error:  # the others are worth having
            failed[name] = str(error)
    print_scores_by_client_and_traffic(runs, experiment_data, out, Console())
    _log_networks_to_mlflow(out, logger)
    _raise_if_failed(failed)


def _raise_if_failed(failed: Mapping[str, str]) -> None:
    """Raises if baselines could not be finished."""
    if failed:
        raise RoundError("; ".join(f"{name} could not be finished: {reason}" for name, reason in failed.items()))


def _log_networks_to_mlflow(out: Path, logger: Sequence[str]) -> None:
    """Logs a run's networks to MLflow, if the run is tracked there; an error in MLflow does not stop the run."""
    if "mlflow" not in logger:
        return
    # imported late: most runs do without
    from polyfed.report.export.mlflow_models import log_models_once_to_mlflow

    try:
        logged = log_models_once_to_mlflow(out)
    except Exception as error:  # of whatever kind the package has
        warnings.warn(
            f"the networks are not in MLflow: {error}; polyfed resume {out} tries again", RuntimeWarning, stacklevel=2
        )
    else:
        if logged:
            print_line(Console(), f"MLflow has {logged} networks of this run, as models with a signature")


def _check_methods_and_models(experiment: Experiment, experiment_data: Participants) -> None:
    """Checks clients, networks and all methods of an experiment before the first round, once for all of its runs.

    Raises:
        UserError: the clients do not suit a method, or a network fails or has other outputs than there are classes.
    """
    resolve_metrics(experiment.settings.metrics, experiment_data.pool.task)
    check_clients(experiment_data.clients)
    warn_of_single_client([client.id for client in experiment_data.clients], [experiment.algorithm])
    check_networks_run((*experiment_data.clients, *experiment_data.unseen), experiment_data.pool.num_outputs)
    for method in (experiment.algorithm, *experiment.baselines.values()):
        check_method(experiment_data.clients, method, experiment_data.public)


def resume_experiment(out: Path, *, quiet: bool = False) -> None:
    """Continues a stopped run and its baselines, logs to the same trackers, and prints a table of the results.

    Raises:
        UserError: `out` is not a run directory that can be resumed.
        RoundError: a baseline could not be finished; all others were, and the table has them.
    """
    if not (out / "config.yaml").exists():
        raise UserError(f"{out} is not a run directory: it has no config.yaml")
    config = read_config(out)
    if "data" not in config:
        rebuild_clients(config, out)  # explains that its clients are needed
    experiment = build_experiment(config)
    experiment_data = load_checked_participants(experiment)
    logger = validate_logger_names(list_loggers_of_run(out))
    was_finished = all(map(_is_finished, run_folders_by_method(experiment, out).values()))
    main = _resume_method(experiment_data, out, _build_progress(out, quiet, logger))
    runs = {registry_name(experiment.algorithm): main}
    failed: dict[str, str] = {}
    for name, baseline in experiment.baselines.items():
        folder = create_private_folder_if_missing(out / BASELINES) / name
        progress = _build_progress(folder, quiet, logger)
        try:
            if (folder / "config.yaml").exists():
                runs[name] = _resume_method(experiment_data, folder, progress)
            else:
                runs[name] = _run_method(experiment, baseline, experiment_data, folder, progress)
        except (ClientError, RoundError) as error:
            failed[name] = str(error)
    if was_finished and not quiet:
        more = f"polyfed run {quote(str(out))} --rounds {2 * experiment.settings.rounds}"
        print(
            f"This run was finished, and nothing was left to train. A new run of more rounds: {more}", file=sys.stderr
        )
    print_scores_by_client_and_traffic(runs, experiment_data, out, Console())
    _log_networks_to_mlflow(out, logger)
    _raise_if_failed(failed)


def _is_finished(folder: Path) -> bool:
    """Returns whether a directory holds a run that has ended."""
    with suppress(UserError):
        return RunFiles.read(folder).is_finished
    return False


def run_folders_by_method(experiment: Experiment, out: Path) -> dict[str, Path]:
    """Returns {method's name: run directory}: the main method in `out`, the baselines in `out/baselines`."""
    baseline_folders = {name: out / BASELINES / name for name in experiment.baselines}
    return {registry_name(experiment.algorithm): out, **baseline_folders}


def run_or_resume_method(
    experiment: Experiment, name: str, experiment_data: Participants, folder: Path, progress: Progress
) -> Run:
    """Runs one method of an experiment and returns the run; if `folder` already holds a run of it, continues that run.

    Call `load_checked_participants` before it.
    """
    if not (folder / "config.yaml").exists():
        method = experiment.baselines.get(name, experiment.algorithm)
        return _run_method(
            experiment,
            method,
            experiment_data,
            create_private_folder_if_missing(folder.parent, parents=True) / folder.name,
            progress,
        )
    return _resume_method(experiment_data, folder, progress, experiment.settings.execution_settings)


def _resume_method(
    experiment_data: Participants, folder: Path, progress: Progress, execution: Mapping[str, Any] | None = None
) -> Run:
    return resume_federation(
        folder,
        clients=experiment_data.clients,
        public=experiment_data.public,
        execution=execution,
        progress=progress,
        clients_are_checked=True,
    )


def load_checked_participants(experiment: Experiment) -> Participants:
    """Loads the clients of an experiment.

    Raises:
        UserError: the clients do not suit a method.
    """
    check_ray_cluster_trusted(experiment.settings)
    with collect_data_warnings() as data_warnings:
        experiment_data = load_participants(experiment)
        _check_methods_and_models(experiment, experiment_data)
    return replace(experiment_data, data_warnings=tuple(data_warnings))


def _build_progress(out: Path, quiet: bool, logger: Sequence[str]) -> Progress:
    progress = build_terminal_progress(quiet=quiet)
    return build_tracker(logger, out, progress) if logger else progress


def _run_method(
    experiment: Experiment, method: Algorithm[Any, Any], experiment_data: Participants, out: Path, progress: Progress
) -> Run:
    is_main_method = method is experiment.algorithm
    settings = experiment.settings
    secure = settings.secure and (is_main_method or supports_secure_sum(method))
    rule = parse_asynchronous(settings.asynchronous)
    if rule is not None and not is_main_method and not supports_asynchronous(method, rule):
        settings = replace(settings, asynchronous=None)
    regions = settings.regions if is_main_method or supports_regions(method) else None
    preparation = {"preparation": experiment_data.preparation} if experiment_data.preparation else {}
    return run_federation(
        experiment_data.clients,
        method,
        replace(settings, secure=secure, regions=regions),
        public=experiment_data.public,
        out=out,
        config={k: v for k, v in experiment.config.items() if is_main_method or k != "baselines"},
        facts={**describe_participants(experiment_data), **preparation},
        progress=progress,
        clients_are_checked=True,
    )


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
