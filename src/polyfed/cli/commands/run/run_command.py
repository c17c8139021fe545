"""Implements `polyfed run` and `resume`: runs an experiment with its baselines, and prints its tables or JSON."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from polyfed.algorithms import registry_name
from polyfed.cli.commands.results.show_command import describe_directory
from polyfed.cli.commands.run.run_tables import print_end_of_run
from polyfed.cli.commands.terminal import print_json, print_line
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import ClientError, RoundError, UserError, collect_data_warnings
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.io.atomic_files import create_private_folder_if_missing
from polyfed.simulation.checks.requirements import check_clients, check_networks_run, warn_of_single_client
from polyfed.simulation.checks.settings.longer_run import check_equals_longer_run
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


def run_experiment(
    experiment: Experiment, out: Path, *, quiet: bool = False, logger: Sequence[str] = (), as_json: bool = False
) -> None:
    """Runs an experiment and its baselines, saves the runs in `out`, logs them to `logger`, and prints a table or JSON.

    Raises:
        UserError: what `federate` refuses; nothing has been computed.
        RoundError: a baseline could not be finished; all others were, and the table has them.
    """
    for folder in run_folders_by_method(experiment, out).values():  # a baseline's too, before the first run
        check_can_become_run_directory(folder)
    experiment_data = load_checked_participants(experiment)
    _run_method(experiment, experiment.algorithm, experiment_data, out, _build_progress(out, quiet, logger))
    failed: dict[str, str] = {}
    for name, baseline in experiment.baselines.items():
        folder = create_private_folder_if_missing(out / BASELINES) / name
        try:
            _run_method(experiment, baseline, experiment_data, folder, _build_progress(folder, quiet, logger))
        except (ClientError, RoundError) as error:  # the others are worth having
            failed[name] = str(error)
    _log_networks_to_mlflow(out, logger)
    if as_json:
        print_json(describe_directory(out))
    else:
        print_end_of_run(out, Console())
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
            print_line(Console(stderr=True), f"MLflow has {logged} networks of this run, as models with a signature")


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


def resume_experiment(out: Path, *, rounds: int | None = None, quiet: bool = False, as_json: bool = False) -> None:
    """Continues a stopped run and its baselines, logs to the same trackers, and prints a table or JSON of the results.

    Args:
        out: the run directory.
        rounds: more rounds for the run and its baselines; None for no more.
        quiet: whether to print no progress.
        as_json: whether to print JSON instead of the table, as `polyfed show --json` does.

    Raises:
        UserError: `out` is not a run directory that can be resumed, or one of the methods depends on the number of rounds.
        RoundError: a baseline could not be finished; all others were, and the table has them.
    """
    if not (out / "config.yaml").exists():
        raise UserError(f"{out} is not a run directory: it has no config.yaml")
    config = read_config(out)
    if "data" not in config:
        rebuild_clients(config, out)  # explains that its clients are needed
    experiment = build_experiment(config)
    folders = run_folders_by_method(experiment, out)
    if rounds is not None:
        for name, folder in folders.items():  # before the first of them gets more
            check_equals_longer_run(
                folder, experiment.baselines.get(name, experiment.algorithm), experiment.settings, rounds
            )
        experiment = build_experiment({**config, "rounds": rounds})
    experiment_data = load_checked_participants(experiment)
    logger = validate_logger_names(list_loggers_of_run(out))
    was_finished = rounds is None and all(map(_is_finished, folders.values()))
    _resume_method(experiment_data, out, _build_progress(out, quiet, logger), rounds=rounds)
    failed: dict[str, str] = {}
    for name, baseline in experiment.baselines.items():
        folder = create_private_folder_if_missing(out / BASELINES) / name
        progress = _build_progress(folder, quiet, logger)
        try:
            if (folder / "config.yaml").exists():
                _resume_method(experiment_data, folder, progress, rounds=rounds)
            else:
                _run_method(experiment, baseline, experiment_data, folder, progress)
        except (ClientError, RoundError) as error:
            failed[name] = str(error)
    if was_finished and not quiet:
        more = f"polyfed resume {quote(str(out))} --rounds {2 * experiment.settings.rounds}"
        print(f"This run was finished, and nothing was left to train. More rounds: {more}", file=sys.stderr)
    _log_networks_to_mlflow(out, logger)
    if as_json:
        print_json(describe_directory(out))
    else:
        print_end_of_run(out, Console())
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
    experiment_data: Participants, folder: Path, progress: Progress, execution: Mapping[str, Any] | None = None,
    rounds: int | None = None,
) -> Run:  # fmt: skip
    return resume_federation(
        folder,
        clients=experiment_data.clients,
        public=experiment_data.public,
        execution=execution,
        progress=progress,
        clients_are_checked=True,
        rounds=rounds,
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
        facts={**describe_participants(experiment_data), **preparation, **_describe_for_tables(experiment_data)},
        progress=progress,
        clients_are_checked=True,
    )


def _describe_for_tables(experiment_data: Participants) -> dict[str, Any]:
    """Returns facts for `manifest.json` that the tables show: unseen clients, and numbers of classes."""
    facts: dict[str, Any] = {}
    if experiment_data.unseen:
        facts["unseen"] = [client.id for client in experiment_data.unseen]
    if experiment_data.classes:
        task = experiment_data.clients[0].task
        one_class = task.one_class_per_example
        counts = {client.id: experiment_data.classes[client.id] for client in experiment_data.clients}
        facts["counted"] = {
            "name": "classes" if one_class else task.count_names(experiment_data.pool.class_names)[-1],
            "clients": {
                i: sum(n > 0 for n in numbers) if one_class else int(numbers[-1]) for i, numbers in counts.items()
            },
        }
        if one_class:
            tests = {client.id: client.test.labels.flatten().cpu() for client in experiment_data.clients}
            facts["counted"]["most_frequent"] = {i: int(y.bincount().max()) / len(y) for i, y in tests.items()}
    return facts
