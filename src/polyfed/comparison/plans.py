"""What a comparison runs: who takes part, which methods and seeds, and the runs themselves, several at once."""

import base64
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from polyfed.comparison.directory import DESCRIPTION, RESULTS, finished
from polyfed.comparison.reading import Budget, Reading
from polyfed.comparison.several import at_once, can_be_forked, side_by_side
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.examples import Examples
from polyfed.core.metrics import Metric
from polyfed.core.tree import decode, encode
from polyfed.simulation.federation import federate, resume
from polyfed.simulation.runs import predictions
from polyfed.simulation.runs.configuration import described
from polyfed.simulation.runs.progress import Progress, Silent, for_terminal
from polyfed.simulation.runs.results import Run
from polyfed.simulation.secure import can_be_secure
from polyfed.simulation.settings import Keep, Settings

Method = Algorithm[Any, Any]
EQUAL = ("local_epochs", "local_steps", "batch_size")
"""Fields that are the same in every method for an equal number of local steps."""
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
        searched_at: the budget by whose rounds a search compares what it tried. A directory keeps it, however its results
            are read later.
        out: the directory; None keeps all in memory.
        parallel: runs at once, or "auto".
        experiment: what describes the casts in a file, for a comparison that can be rebuilt from its directory.
        search: fields that are searched on validation examples before, see module `tuning`: field -> values or range; or
            None.
        trials: how many runs a method has in the search by Optuna; None tries every combination of values.
        quiet: says nothing.
        metrics: that are computed, as `polyfed.core.metrics.metrics_of` takes them; the first decides.
        resplit: how many times training and test examples were dealt again, one seed each; None for never.
        references: whether scores of simple models and of all data pooled are put next to the methods.

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
    metrics: tuple[Any, ...] = ()
    resplit: int | None = None
    references: bool = False
    searched_at: Budget = field(default_factory=Budget)

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
    """One run: the method, the seed, the run directory or None, the fingerprint of the clients, the round whose models are
    kept, whether its predictions are compared, and whether it goes on without a client that fails. It is itself alone:
    fields of methods may be mappings, which have no hash."""

    label: str
    method: Method
    seed: int
    folder: Path | None
    data: str
    keep: Keep = "last"
    compared: bool = True
    skips: bool = False


History = list[Mapping[str, Any]]
Failure = ClientError | RoundError


@final
@dataclass(frozen=True, eq=False)
class Played:
    """A run that has run: its `history`, and its predictions, in its `folder` or as `packed` text."""

    history: History
    folder: Path | None = None
    packed: str | None = None

    @cached_property
    def _held(self) -> Mapping[str, Any]:
        return {} if self.packed is None else decode(base64.b64decode(self.packed))

    def outputs(self, client: str, round_number: int) -> Tensor | None:
        """Of the client's network after that round on its test examples, shape (n, outputs); None if they were not kept."""
        if self.folder is None:
            found: Tensor | None = self._held.get(str(round_number), {}).get(client.encode().hex())
            return found
        try:
            return predictions.read(self.folder, client, round=round_number).outputs
        except UserError:
            return None


def play(plan: Plan, jobs: Sequence[Job]) -> tuple[dict[Job, Played], dict[Job, Failure]]:
    """Runs, and why the others could not be completed: a method that diverges does not keep the others from being compared.
    Runs that are finished are read, those that were stopped are resumed."""
    clients = [c.id for c in plan.cast(jobs[0].seed).clients]
    found: dict[Job, Played] = {}
    failed: dict[Job, Failure] = {}
    for job in jobs:
        past = None
        if job.folder is not None:
            method = described(job.method, plan.settings)["algorithm"]
            past = finished(job.folder, plan.settings.rounds, clients, job.seed, method, job.data)
        if past is not None:
            found[job] = Played(list(past), job.folder)
    missing = [job for job in jobs if job not in found]
    processes = min(_at_once(plan, len(clients)), max(1, len(missing)))
    alone = processes == 1
    settings = plan.settings if alone else dataclasses.replace(plan.settings, engine="inprocess", workers=0)

    def tasks() -> Iterator[tuple[Job, Callable[[], Any]]]:
        for job in missing:
            progress = _progress(plan.quiet) if alone else Silent()
            yield job, partial(_run, job, plan.cast(job.seed), settings, plan.metrics, progress)

    for job, result in side_by_side(tasks(), processes):
        if isinstance(result, Failure):
            failed[job] = result
        else:
            found[job] = Played(result["history"], job.folder, result["packed"])
        if not plan.quiet:
            how = "failed" if job in failed else "done"
            progress = f"{len(found) + len(failed)} of {len(jobs)} runs"
            print(f"{job.label}, seed {job.seed}: {how} ({progress})", file=sys.stderr, flush=True)
    return found, failed


def _progress(quiet: bool) -> Progress:
    return for_terminal(quiet=quiet, lines=False)


def _at_once(plan: Plan, clients: int) -> int:
    if plan.parallel == "auto":
        return at_once(plan.settings, clients)
    if plan.parallel > 1 and not can_be_forked(plan.settings):
        raise UserError(f"parallel={plan.parallel} needs runs on the CPU of a Linux machine; leave it out")
    return plan.parallel


def _run(job: Job, cast: Cast, settings: Settings, metrics: tuple[Metric, ...], progress: Progress) -> dict[str, Any]:
    """Its history and, without a folder, its predictions. What goes wrong is reported with the method and the seed."""
    whose = f"method {job.label}, seed {job.seed}"
    try:
        run = _carried_out(job, cast, settings, metrics, progress)
        return {"history": list(run.history), "packed": _packed(run) if job.folder is None and job.compared else None}
    except ClientError as error:
        reason = f"{error.reason} ({whose})"
        raise ClientError(error.round, error.client, error.phase, reason, error.trace) from error
    except RoundError as error:
        raise RoundError(f"{error} ({whose})") from error
    except UserError as error:
        raise UserError(f"{error} ({whose})") from error


def _carried_out(job: Job, cast: Cast, settings: Settings, metrics: tuple[Metric, ...], progress: Progress) -> Run:
    where = {f: getattr(settings, f) for f in ("engine", "workers", "ray_address", "gpus_per_worker", "device")}
    if job.folder is not None and (job.folder / "config.yaml").exists():
        return resume(
            job.folder, clients=cast.clients, algorithm=job.method, public=cast.public, progress=progress,
            metrics=metrics, **where,
        )  # fmt: skip
    secure = settings.secure and can_be_secure(job.method)  # the others that are here send nothing
    asked = {**dataclasses.asdict(settings), "seed": job.seed, "keep": job.keep, "metrics": metrics, "secure": secure}
    asked |= {"on_error": "skip"} if job.skips else {}
    return federate(
        cast.clients, job.method, public=cast.public, out=job.folder, config=cast.config, facts=cast.facts,
        progress=progress, **asked,
    )  # fmt: skip


def _packed(run: Run) -> str:
    """The outputs of each kept round on the test examples, as text that another process can read."""
    held: dict[str, dict[str, Tensor]] = {}
    for record in run.history:
        for client in run.federation.roster.ids if record["summary"] else ():
            try:
                outputs = run.predictions(client, round=record["round"]).outputs
            except UserError:  # not kept
                continue
            held.setdefault(str(record["round"]), {})[client.encode().hex()] = outputs
    return base64.b64encode(encode(held)).decode()
