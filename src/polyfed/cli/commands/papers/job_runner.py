"""Executes the runs that a paper's table needs, one after another or several in parallel."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, final

from polyfed.cli.commands.options.recipes import Recipe
from polyfed.simulation.storage.directory import read_config, read_metrics

if TYPE_CHECKING:
    from polyfed.simulation.experiment import Experiment, Participants

# The share of the cores that is busy, since a round waits for the last of its clients: processor seconds over the seconds
# of two cores in benchmarks/results/papers/minutes_one_by_one.json.
_BUSY = 0.85


@final
@dataclass(frozen=True)
class PaperJob:
    """Holds one experiment that must be run for a paper's table, and the folder of its run."""

    title: str
    experiment: "Experiment"
    folder: Path


@final
@dataclass(frozen=True)
class _MethodRun:
    """Describes the run of one method of a job."""

    job: PaperJob
    method: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.job.title}, {self.method}"


def first_variant_with_same_configuration(recipe: Recipe, scale: str, variant: str | None) -> str | None:
    """Returns the first variant with the configuration of `variant`, to share its run.

    At scale smoke many variants are the same.
    """
    config = recipe.configuration(scale, variant)
    return next((v for v in recipe.variants if recipe.configuration(scale, v) == config), variant)


def job_folder(out: Path, recipe: str, variant: str | None, seed: int) -> Path:
    """Returns the path, below `out`, of the run directory for a recipe's variant and a seed."""
    return out / "-".join([recipe, *([variant] if variant else []), f"seed{seed}"])


def is_complete_run(folder: Path) -> bool:
    """Returns True if the folder holds a run that has finished all of its rounds."""
    if not (folder / "config.yaml").exists():
        return False
    return len(read_metrics(folder / "metrics.jsonl")) == int(read_config(folder)["rounds"])


def is_complete_job(job: PaperJob) -> bool:
    """Returns True if the job's run and the runs of its baselines have finished all of their rounds."""
    return not _unfinished_runs(job)


def run_paper_jobs_and_list_failures(jobs: Sequence[PaperJob], *, quiet: bool) -> list[str]:
    """Executes missing runs and continues stopped ones; returns a sentence per failed method.

    A method that cannot finish does not keep the others from running. Returns one sentence for each such method.

    Raises:
        UserError: clients whom a method does not suit, or data that cannot be read.
    """
    from polyfed.comparison.execution.process_pool import (
        run_in_processes,  # imported late, here and below: torch takes a second
    )

    unfinished = [method_run for job in jobs for method_run in _unfinished_runs(job)]
    if not unfinished:
        return []
    processes = min(_process_count(method_run.job, len(unfinished)) for method_run in unfinished)
    if not quiet and processes > 1:
        print(f"{len(unfinished)} runs, {processes} at once", file=sys.stderr, flush=True)
    failed, results = [], run_in_processes(_build_tasks(unfinished, quiet, single_process=processes == 1), processes)
    for finished_count, (method_run, result) in enumerate(results, 1):
        if isinstance(result, Exception):
            failed.append(f"{method_run} could not be finished: {result}")
        if not quiet:
            outcome = "failed" if isinstance(result, Exception) else "done"
            print(f"[{finished_count}/{len(unfinished)}] {method_run}: {outcome}", file=sys.stderr, flush=True)
    return failed


def _unfinished_runs(job: PaperJob) -> list[_MethodRun]:
    from polyfed.cli.commands.run.run_command import run_folders_by_method

    every = [
        _MethodRun(job, method, folder) for method, folder in run_folders_by_method(job.experiment, job.folder).items()
    ]
    return [part for part in every if not is_complete_run(part.folder)]


def _process_count(job: PaperJob, runs: int) -> int:
    """Returns the number of processes in which to execute `runs`.

    A few runs finish sooner one after another, each on all cores.
    """
    from polyfed.comparison.execution.process_pool import default_parallel_runs

    settings, clients = job.experiment.settings, job.experiment.split.clients
    if clients is None:  # as many as the data have
        return 1
    processes = default_parallel_runs(settings, clients)
    one_by_one = runs / (_BUSY * min(processes, settings.count_round_clients(clients)))  # in runs on one core
    at_worst = (runs - 1) / processes + 1  # the last run goes alone, when all others have ended
    return processes if at_worst < one_by_one else 1


def _build_tasks(
    missing: Sequence[_MethodRun], quiet: bool, *, single_process: bool
) -> Iterator[tuple[_MethodRun, Callable[[], None]]]:
    from polyfed.cli.commands.run.run_command import load_checked_participants

    for job, parts in groupby(missing, key=lambda part: part.job):
        experiment_data, experiment = load_checked_participants(job.experiment), job.experiment
        if not single_process:
            local_settings = dataclasses.replace(experiment.settings, engine="inprocess", workers=0)
            experiment = dataclasses.replace(experiment, settings=local_settings)
        for part in parts:
            yield part, partial(_run_one_method, part, experiment, experiment_data, quiet or not single_process)


def _run_one_method(part: _MethodRun, experiment: "Experiment", experiment_data: "Participants", quiet: bool) -> None:
    from polyfed.cli.commands.run import run_command
    from polyfed.simulation.monitoring.progress import build_terminal_progress

    if not quiet:
        print(part, file=sys.stderr, flush=True)
    run_command.run_or_resume_method(
        experiment, part.method, experiment_data, part.folder, build_terminal_progress(quiet=quiet)
    )
