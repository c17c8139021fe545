"""Describes a comparison (clients, methods, seeds), and executes its training runs, several in parallel."""

import base64
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from torch import Tensor

from polyfed.algorithms import Local
from polyfed.comparison.execution.process_pool import default_parallel_runs, run_in_processes, supports_forked_runs
from polyfed.comparison.execution.runs_display import RoundCounter, RunsDisplay, SilentRunsDisplay
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.planning.client_set import ClientSet
from polyfed.comparison.planning.evaluation_panel import EvaluationPanel
from polyfed.comparison.statistics.estimate import ALPHA
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, RESULTS, load_history_if_finished
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.number_checks import is_whole_number
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.training.config import LocalTraining
from polyfed.data.partitioning.folds import Folds
from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.federate import resume_federation, run_federation
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.replies.regional_sums import supports_regions
from polyfed.simulation.settings import Keep, Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.predictions import prediction_store as predictions

_LOG = logging.getLogger("polyfed.comparison")
Method = Algorithm[Any, Any]
EQUAL_FIELDS = ("local_epochs", "local_steps", "batch_size")
"""Fields that are the same in every method for an equal number of local steps."""
TUNING_FOLDER = "tuning"  # folder of the runs of a search
_RESERVED_NAMES = (DESCRIPTION, RESULTS, TUNING_FOLDER)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,80}")


@final
@dataclass(frozen=True)
class ComparisonPlan:
    """Describes a comparison before it runs: its clients, methods, seeds and settings, and the search for
    hyper-parameters.

    Args:
        title: for headings.
        methods: label -> method; methods that the clients do not suit are left out.
        unasked: labels of default methods that nobody asked for: no sentence says that they are left out where the clients
            have several architectures.
        seeds: of the runs; cohorts, weights and batches derive from them, the same for every method.
        settings: of every run, except for the seed.
        build_client_set: returns the clients, and what belongs to them, for a seed.
        criteria: budget and target.
        search_budget: the budget by whose rounds a search compares what it tried. A directory keeps it, however its results
            are read later.
        out: the directory; None keeps all in memory.
        parallel_runs: runs at once, or "auto".
        experiment: the configuration from which the clients can be built again; None for clients made in Python.
        search_space: field -> values or range to search on validation examples, see module `tuning`; None for no search.
        num_trials: how many runs a method has in the search by Optuna; None tries every combination of values.
        quiet: whether no progress is shown.
        progress: the display that the user gave, or a notebook's; None shows progress on standard error.
        metrics: as `polyfed.core.evaluation.metrics.resolve_metrics` takes them; the first decides.
        num_resplits: number of times that training and test examples are split again, one seed each; None for none.
        folds: the cross-validation of which each run is a fold; None for none.
        stop_when_decided: whether the folds are dealt again only until the mean's answer is decided.
        most_repeats: how often at most, which module `sequential_looks` sets; None without such looks.
        alpha: the error rate of intervals.
        forecast_only: whether only a pilot is run.
        with_references: whether simple models and a network on all data pooled are compared with the methods.
        callbacks: the user's callbacks, called in each run that is compared, not in the runs of a search.
        display: shows how far the runs are.
        panel: the clients that all runs evaluate.

    Raises:
        UserError: no seeds or repeated ones, or a label that cannot be a folder's name.
    """

    title: str
    methods: Mapping[str, Method]
    seeds: tuple[int, ...]
    settings: Settings
    build_client_set: Callable[[int], ClientSet]
    criteria: ResultCriteria = field(default_factory=ResultCriteria)
    out: Path | None = None
    parallel_runs: int | Literal["auto"] = "auto"
    experiment: Mapping[str, Any] | None = None
    search_space: Mapping[str, Sequence[Any] | str] | None = None
    num_trials: int | None = None
    quiet: bool = False
    progress: Progress | None = None
    metrics: tuple[Any, ...] = ()
    num_resplits: int | None = None
    folds: Folds | None = None
    stop_when_decided: bool = False
    most_repeats: int | None = None
    alpha: float = ALPHA
    forecast_only: bool = False
    with_references: bool = False
    search_budget: Budget = field(default_factory=Budget)
    callbacks: tuple[Callback, ...] = ()
    unasked: frozenset[str] = frozenset()
    display: RunsDisplay = field(default_factory=SilentRunsDisplay)
    panel: EvaluationPanel = field(default_factory=EvaluationPanel)

    def describe_search(self) -> dict[str, Any] | None:
        """Returns the search space as it is written to a file; None without a search."""
        if self.search_space is None:
            return None
        return {k: v if isinstance(v, str) else list(v) for k, v in self.search_space.items()}

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds must be different whole numbers, at least one, got {list(self.seeds)}")
        for seed in self.seeds:
            dataclasses.replace(self.settings, seed=seed)  # which checks it
        for label in self.methods:
            if not isinstance(label, str) or not _LABEL.fullmatch(label):
                raise UserError(f"a method's label must be a word of letters, digits, '_', '.' and '-', got {label!r}")
            if label in _RESERVED_NAMES:
                raise UserError(f"{label!r} is a name in the directory, and cannot be a method's label; choose another")
        if self.settings.cross_site and self.out is None:
            raise UserError("cross_site=True keeps its matrices in the run directories; give out=...")
        if self.stop_when_decided and (self.folds is None or self.folds.repeats < 2):
            raise UserError(
                "stop_when_decided deals folds again until the mean's answer is decided; give folds, and at least 2 "
                "fold_repeats (--folds 5 --fold-repeats 4)"
            )
        if self.parallel_runs != "auto" and not is_whole_number(self.parallel_runs, 1):
            raise UserError(f"parallel must be 'auto' or a number of runs from 1, got {self.parallel_runs!r}")

    def describe_seed(self, seed: int) -> str:
        """Returns what a seed stands for: "seed 3", "split 4 of 5", or "fold 4 of 5" with the repeat."""
        position = self.seeds.index(seed) if seed in self.seeds else None
        if position is None or (self.folds is None and self.num_resplits is None):
            return f"seed {seed}"
        if self.folds is None:
            return f"split {position + 1} of {len(self.seeds)}"
        repeat, fold = divmod(position, self.folds.number)
        repeat_text = f", repeat {repeat + 1}" if self.folds.repeats > 1 else ""
        return f"fold {fold + 1} of {self.folds.number}{repeat_text}"


@final
@dataclass(frozen=True, eq=False)
class RunSpec:
    """Describes one training run of a comparison: one method with one seed, and the directory that it writes.

    Attributes: the method and its label, the seed, the run directory or None, the fingerprint of the clients, the round
    whose models are kept, whether its predictions are compared, and whether it goes on without a client that fails. A
    specification equals only itself: fields of methods may be mappings, which have no hash.
    """

    label: str
    method: Method
    seed: int
    folder: Path | None
    data_fingerprint: str
    keep: Keep = "last"
    keep_predictions: bool = True
    skip_failed_clients: bool = False


History = list[Mapping[str, Any]]
Failure = ClientError | RoundError


@final
@dataclass(frozen=True, eq=False)
class FinishedRun:
    """Holds a finished training run: its `history`, with one record per round, and its predictions, either in the
    directory `folder` or as the text `packed_outputs`."""

    history: History
    folder: Path | None = None
    packed_outputs: str | None = None

    @cached_property
    def _unpacked_outputs(self) -> Mapping[str, Any]:
        return {} if self.packed_outputs is None else deserialize_state(base64.b64decode(self.packed_outputs))

    def test_outputs(self, client: str, round_number: int) -> Tensor | None:
        """Returns the outputs of a client's network after a round for the client's test examples, as a tensor of shape
        (n, outputs); None if they were not kept."""
        if self.folder is None:
            stored: Tensor | None = self._unpacked_outputs.get(str(round_number), {}).get(client.encode().hex())
            return stored
        try:
            return predictions.read_predictions(self.folder, client, round=round_number).outputs
        except UserError:
            return None


def log_warnings(sentences: Sequence[str]) -> None:
    """Logs the warnings of a comparison that has ended."""
    for sentence in sentences:
        _LOG.warning("%s", sentence)


@final
class ExecutedRuns(NamedTuple):
    """Holds the training runs of a comparison that have finished, and the errors of those that failed."""

    finished: dict[RunSpec, FinishedRun]
    failed: dict[RunSpec, Failure]


def execute_or_load_runs(
    plan: ComparisonPlan, run_specs: Sequence[RunSpec], callbacks: Sequence[Callback] = ()
) -> ExecutedRuns:
    """Loads the training runs that are finished already, executes the others, several in parallel, and returns all
    finished runs and the errors of those that failed.

    A method that diverges does not keep the others from being compared. Runs that are finished already are read, and
    stopped ones are resumed.
    """
    first_client_set = plan.build_client_set(run_specs[0].seed)
    clients = [c.id for c in first_client_set.clients]
    finished_runs: dict[RunSpec, FinishedRun] = {}
    failed: dict[RunSpec, Failure] = {}
    for job in run_specs:
        history = None
        if job.folder is not None:
            run_method = job.method  # as a run writes it: with the steps of the whole run in `privacy`
            if isinstance(run_method, LocalTraining):
                run_method = run_method.with_privacy_of_run(plan.settings.rounds)
            method = describe_method_and_settings(run_method, plan.settings)["algorithm"]
            history = load_history_if_finished(
                job.folder, plan.settings.rounds, clients, job.seed, method, job.data_fingerprint
            )
        if history is not None:
            finished_runs[job] = FinishedRun(list(history), job.folder)
    missing = [job for job in run_specs if job not in finished_runs]
    processes = min(_num_processes(plan, len(first_client_set.ids)), max(1, len(missing)))
    in_this_process = processes == 1
    settings = plan.panel.settings_of_run(plan.settings)
    settings = settings if in_this_process else dataclasses.replace(settings, engine="inprocess", workers=0)

    counts = plan.display.announce_runs(
        [f"{job.label}, {plan.describe_seed(job.seed)}" for job in missing], len(finished_runs), settings.rounds,
        is_search=not all(job.keep_predictions for job in run_specs),
    )  # fmt: skip

    def tasks() -> Iterator[tuple[RunSpec, Callable[[], Any]]]:
        for position, job in enumerate(missing):
            progress: Progress = RoundCounter(counts, position, plan.display if in_this_process else None)
            if plan.progress is not None:
                progress = plan.progress if in_this_process else plan.progress.for_another_process()
            client_set = plan.build_client_set(job.seed)
            yield job, partial(_run_and_report, job, client_set, settings, plan.metrics, progress, callbacks)

    for job, result in run_in_processes(tasks(), processes):
        if isinstance(result, Failure):
            failed[job] = result
        else:
            finished_runs[job] = FinishedRun(result["history"], job.folder, result["packed"])
        _LOG.info("%s, seed %s: %s", job.label, job.seed, "failed" if job in failed else "done")
        plan.display.finish_run(missing.index(job), failed=job in failed)
    return ExecutedRuns(finished_runs, failed)


def _num_processes(plan: ComparisonPlan, clients: int) -> int:
    if plan.parallel_runs == "auto":
        return default_parallel_runs(plan.settings, clients)
    if plan.parallel_runs > 1 and not supports_forked_runs(plan.settings):
        raise UserError(f"parallel={plan.parallel_runs} needs runs on the CPU of a Linux machine; leave it out")
    return plan.parallel_runs


def _run_and_report(
    job: RunSpec,
    client_set: ClientSet,
    settings: Settings,
    metrics: tuple[Metric, ...],
    progress: Progress,
    callbacks: Sequence[Callback],
) -> dict[str, Any]:
    """Executes one run, and returns its history and, if it has no folder, its packed predictions.

    An error is raised again with the method and the seed.
    """
    whose = f"method {job.label}, seed {job.seed}"
    try:
        run = _run_or_resume(job, client_set, settings, metrics, progress, callbacks)
        return {
            "history": list(run.history),
            "packed": _pack_outputs(run) if job.folder is None and job.keep_predictions else None,
        }
    except ClientError as error:
        reason = f"{error.reason} ({whose})"
        raise ClientError(error.round, error.client, error.phase, reason, error.trace) from error
    except RoundError as error:
        raise RoundError(f"{error} ({whose})") from error
    except UserError as error:
        raise UserError(f"{error} ({whose})") from error


def _run_or_resume(
    job: RunSpec,
    client_set: ClientSet,
    settings: Settings,
    metrics: tuple[Metric, ...],
    progress: Progress,
    callbacks: Sequence[Callback],
) -> Run:
    if job.folder is not None and (job.folder / "config.yaml").exists():
        return resume_federation(
            job.folder,
            clients=client_set.clients_of_run(job.method),
            algorithm=job.method,
            public=client_set.public,
            execution=settings.execution_settings,
            metrics=metrics,
            callbacks=callbacks,
            progress=progress,
            clients_are_checked=True,
        )
    settings = dataclasses.replace(
        client_set.settings_of_run(job.method, settings_of_method(settings, job.method)),
        seed=job.seed,
        keep=job.keep,
        on_error="skip" if job.skip_failed_clients else settings.on_error,
        cross_site=settings.cross_site and job.keep_predictions,  # runs of a search are not compared
    )
    return run_federation(
        client_set.clients_of_run(job.method),
        job.method,
        settings,
        public=client_set.public,
        metrics=metrics,
        out=job.folder,
        config=client_set.config,
        facts=client_set.facts,
        callbacks=callbacks,
        progress=progress,
        clients_are_checked=True,
    )


def settings_of_method(settings: Settings, method: Method) -> Settings:
    """Returns the settings with which a method of a comparison runs: training alone sends nothing and waits for nobody, and
    only means are summed by region."""
    alone = isinstance(method, Local)
    return dataclasses.replace(
        settings,
        secure=settings.secure and not alone,
        regions=settings.regions if supports_regions(method) else None,
        asynchronous=None if alone else settings.asynchronous,
    )


def _pack_outputs(run: Run) -> str:
    """Packs the outputs of each kept round on the test examples into a text that another process can read."""
    outputs_by_round: dict[str, dict[str, Tensor]] = {}
    for record in run.history:
        for client in record["clients"] if record["summary"] else ():
            try:
                outputs = run.predictions(client, round=record["round"]).outputs
            except UserError:  # not kept
                continue
            outputs_by_round.setdefault(str(record["round"]), {})[client.encode().hex()] = outputs
    return base64.b64encode(serialize_state(outputs_by_round)).decode()
