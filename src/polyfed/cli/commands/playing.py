"""The runs that a paper's table needs: those of its methods, one after another or side by side."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, final

from polyfed.simulation.runs.directory import read_config, read_metrics

if TYPE_CHECKING:
    from polyfed.simulation.experiment import Experiment, Participants

# Of the cores, while a round waits for the last of its clients: benchmarks/results/papers/minutes_one_by_one.json,
# processor seconds over seconds of two cores.
_BUSY = 0.85


@final
@dataclass(frozen=True)
class Job:
    """An experiment that the table needs, with its baselines, and the folder that it gets."""

    title: str
    experiment: "Experiment"
    folder: Path


@final
@dataclass(frozen=True)
class _Part:
    """The run of one method of a job."""

    job: Job
    method: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.job.title}, {self.method}"


def has_all_rounds(folder: Path) -> bool:
    """Whether there is a run, and complete."""
    if not (folder / "config.yaml").exists():
        return False
    return len(read_metrics(folder / "metrics.jsonl")) == int(read_config(folder)["rounds"])


def complete(job: Job) -> bool:
    """Whether a job's run and its baselines have all of their rounds."""
    return not _missing(job)


def play(jobs: Sequence[Job], *, quiet: bool) -> list[str]:
    """Runs what is missing of the jobs, and goes on with what was stopped. A method that cannot finish its run does not keep
    the others from theirs; returned is why, a sentence each.

    Raises:
        UserError: clients whom a method does not suit, or data that cannot be read.
    """
    from polyfed.comparison.several import side_by_side  # imported late, here and below: torch takes a second

    missing = [part for job in jobs for part in _missing(job)]
    if not missing:
        return []
    processes = min(_processes(part.job, len(missing)) for part in missing)
    if not quiet and processes > 1:
        print(f"{len(missing)} runs, {processes} at once", file=sys.stderr, flush=True)
    failed, results = [], side_by_side(_tasks(missing, quiet, alone=processes == 1), processes)
    for done, (part, result) in enumerate(results, 1):
        if isinstance(result, Exception):
            failed.append(f"{part} could not be finished: {result}")
        if not quiet:
            how = "failed" if isinstance(result, Exception) else "done"
            print(f"[{done}/{len(missing)}] {part}: {how}", file=sys.stderr, flush=True)
    return failed


def _missing(job: Job) -> list[_Part]:
    from polyfed.cli.commands.running import parts

    every = [_Part(job, method, folder) for method, folder in parts(job.experiment, job.folder).items()]
    return [part for part in every if not has_all_rounds(part.folder)]


def _processes(job: Job, runs: int) -> int:
    """How many of `runs` go at once. Some end sooner than others, so that few are sooner done one after another, each on all
    cores."""
    from polyfed.comparison.several import at_once

    settings, clients = job.experiment.settings, job.experiment.split.clients
    if clients is None:  # as many as the data have
        return 1
    processes = at_once(settings, clients)
    one_by_one = runs / (_BUSY * min(processes, settings.cohort_size(clients)))  # in runs on one core, alike in length
    at_worst = (runs - 1) / processes + 1  # the last run goes alone, when all others have ended
    return processes if at_worst < one_by_one else 1


def _tasks(missing: Sequence[_Part], quiet: bool, *, alone: bool) -> Iterator[tuple[_Part, Callable[[], None]]]:
    from polyfed.cli.commands.running import checked

    for job, parts in groupby(missing, key=lambda part: part.job):
        found, experiment = checked(job.experiment), job.experiment
        if not alone:
            here = dataclasses.replace(experiment.settings, engine="inprocess", workers=0)
            experiment = dataclasses.replace(experiment, settings=here)
        for part in parts:
            yield part, partial(_carry_out, part, experiment, found, quiet or not alone)


def _carry_out(part: _Part, experiment: "Experiment", found: "Participants", quiet: bool) -> None:
    from polyfed.cli.commands import running
    from polyfed.simulation.runs.progress import for_terminal

    if not quiet:
        print(part, file=sys.stderr, flush=True)
    running.part(experiment, part.method, found, part.folder, for_terminal(quiet=quiet))
