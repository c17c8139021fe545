"""What a comparison runs: who takes part, which methods and seeds, and the runs themselves, several at once."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from polyfed import engines
from polyfed.algorithm import Algorithm, Client
from polyfed.data.examples import Examples
from polyfed.errors import ClientError, RoundError, UserError
from polyfed.federation import federate, resume
from polyfed.runs.comparison import DESCRIPTION, RESULTS, finished
from polyfed.runs.configuration import described
from polyfed.runs.progress import Progress, Silent, for_terminal
from polyfed.runs.several import side_by_side
from polyfed.runs.summary import Reading
from polyfed.settings import Settings

Method = Algorithm[Any, Any]
EQUAL = ("local_epochs", "local_steps", "batch_size")
"""Fields that are the same in every method for an equal number of local steps."""
_FEW = 10  # clients of a round and core, up to which runs side by side leave no core idle
TUNING = "tuning"  # folder of the runs of a search
_TAKEN = (DESCRIPTION, RESULTS, TUNING)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,80}")


@final
@dataclass(frozen=True)
class Cast:
    """Who takes part at one seed.

    Attributes: `clients`; `public` examples; `class_names`; `config` and `facts`, for `config.yaml` and `manifest.json` of
    the runs.
    """

    clients: tuple[Client, ...]
    public: Examples | None = None
    class_names: tuple[str, ...] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Plan:
    """What is to be compared.

    Args:
        title: for headings.
        methods: by label; those that the clients do not suit are left out.
        seeds: of the runs; cohorts, weights and batches derive from them, the same for every method.
        settings: of every run, but for the seed.
        cast: who takes part at a seed.
        reading: budget and target.
        out: the directory; None keeps all in memory.
        parallel: runs at once, or "auto".
        experiment: what describes the casts in a file, for a comparison that can be rebuilt from its directory.
        search: fields that are searched on validation examples before, see `polyfed.tuning`: field -> values or range; or
            None.
        trials: how many runs a method has in the search by Optuna; None tries every combination of values.
        quiet: tells nothing.

    Raises:
        UserError: seeds that are none or repeated, a label that is no folder's name.
    """

    title: str
    methods: Mapping[str, Method]
    seeds: tuple[int, ...]
    settings: Settings
    cast: Callable[[int], Cast]
    reading: Reading = field(default_factory=Reading)
    out: Path | None = None
    parallel: int | Literal["auto"] = "auto"
    experiment: Mapping[str, Any] | None = None
    search: Mapping[str, Sequence[Any] | str] | None = None
    trials: int | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds must be different whole numbers, at least one, got {list(self.seeds)}")
        for seed in self.seeds:
            dataclasses.replace(self.settings, seed=seed)  # which checks it
        for label in self.methods:
            if not isinstance(label, str) or not _LABEL.fullmatch(label):
                raise UserError(f"a method's label must be a word of letters, digits, '_', '.' and '-', got {label!r}")
            if label in _TAKEN:
                raise UserError(f"{label!r} is a name in the directory, and cannot be a method's label; choose another")
        counted = isinstance(self.parallel, int) and not isinstance(self.parallel, bool) and self.parallel >= 1
        if self.parallel != "auto" and not counted:
            raise UserError(f"parallel must be 'auto' or a number of runs from 1, got {self.parallel!r}")


@final
@dataclass(frozen=True, eq=False)
class Job:
    """One run: the method, the seed, the run directory or None, and the fingerprint of the clients. It is itself alone:
    fields of methods may be mappings, which have no hash."""

    label: str
    method: Method
    seed: int
    folder: Path | None
    data: str


History = list[Mapping[str, Any]]
Failure = ClientError | RoundError


def play(plan: Plan, jobs: Sequence[Job]) -> tuple[dict[Job, History], dict[Job, Failure]]:
    """The histories of runs, and why the others could not be completed: a method that diverges does not keep the others
    from being compared. Runs that are finished are read, those that were stopped are resumed."""
    clients = [c.id for c in plan.cast(jobs[0].seed).clients]
    found: dict[Job, History] = {}
    failed: dict[Job, Failure] = {}
    for job in jobs:
        past = None
        if job.folder is not None:
            method = described(job.method, plan.settings)["algorithm"]
            past = finished(job.folder, plan.settings.rounds, clients, job.seed, method, job.data)
        if past is not None:
            found[job] = list(past)
    missing = [job for job in jobs if job not in found]
    processes = min(_at_once(plan, len(clients)), max(1, len(missing)))
    alone = processes == 1
    settings = plan.settings if alone else dataclasses.replace(plan.settings, engine="inprocess", workers=0)

    def tasks() -> Iterator[tuple[Job, Callable[[], Any]]]:
        for job in missing:
            yield job, partial(_run, job, plan.cast(job.seed), settings, _progress(plan.quiet) if alone else Silent())

    for job, result in side_by_side(tasks(), processes):
        if isinstance(result, Failure):
            failed[job] = result
        else:
            found[job] = result
        if not plan.quiet:
            how = "failed" if job in failed else "done"
            progress = f"{len(found) + len(failed)} of {len(jobs)} runs"
            print(f"{job.label}, seed {job.seed}: {how} ({progress})", file=sys.stderr, flush=True)
    return found, failed


def _progress(quiet: bool) -> Progress:
    return for_terminal(quiet=quiet, lines=False)


def _at_once(plan: Plan, clients: int) -> int:
    """Runs at once. Few clients cannot keep all cores busy to the end of each round; runs can."""
    settings = plan.settings
    forked = settings.engine != "ray" and engines.can_fork(engines.device_of_clients(settings))
    if plan.parallel != "auto":
        if plan.parallel > 1 and not forked:
            raise UserError(f"parallel={plan.parallel} needs runs on the CPU of a Linux machine; leave it out")
        return plan.parallel
    free = settings.engine == "auto" and settings.workers == "auto"
    cores = engines.usable_cores()
    return cores if free and forked and settings.cohort_size(clients) <= _FEW * cores else 1


def _run(job: Job, cast: Cast, settings: Settings, progress: Progress) -> History:
    """Its history. What goes wrong is told with the method and the seed."""
    whose = f"method {job.label}, seed {job.seed}"
    try:
        return _history(job, cast, settings, progress)
    except ClientError as error:
        reason = f"{error.reason} ({whose})"
        raise ClientError(error.round, error.client, error.phase, reason, error.trace) from error
    except RoundError as error:
        raise RoundError(f"{error} ({whose})") from error
    except UserError as error:
        raise UserError(f"{error} ({whose})") from error


def _history(job: Job, cast: Cast, settings: Settings, progress: Progress) -> History:
    where = {f: getattr(settings, f) for f in ("engine", "workers", "ray_address", "gpus_per_worker", "device")}
    if job.folder is not None and (job.folder / "config.yaml").exists():
        run = resume(
            job.folder, clients=cast.clients, algorithm=job.method, public=cast.public, progress=progress, **where
        )
    else:
        run = federate(
            cast.clients, job.method, public=cast.public, out=job.folder, config=cast.config, facts=cast.facts,
            progress=progress, **{**dataclasses.asdict(settings), "seed": job.seed},
        )  # fmt: skip
    return list(run.history)
