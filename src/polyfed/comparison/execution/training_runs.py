"""Executes the training runs of a comparison, several in parallel, or loads those that are finished."""

import base64
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor

from polyfed.comparison.execution.process_pool import default_parallel_runs, run_in_processes, supports_forked_runs
from polyfed.comparison.execution.runs_display import RoundCounter
from polyfed.comparison.plan import ComparisonPlan, Method, settings_of_method
from polyfed.comparison.planning.client_set import ClientSet
from polyfed.comparison.storage.comparison_directory import load_history_if_finished
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.training.config import LocalTraining
from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.checks.code_fingerprints import code_fingerprint, find_changed_code, warn_of_changed_code
from polyfed.simulation.federate import resume_federation, run_federation
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.results.run import Run
from polyfed.simulation.settings import Keep, Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.directory import read_manifest
from polyfed.simulation.storage.predictions import prediction_store as predictions

_LOG = logging.getLogger("polyfed.comparison")


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
    """Holds a run's record of each round, and its predictions in `folder` or as `packed_outputs`."""

    history: History
    folder: Path | None = None
    packed_outputs: str | None = None

    @cached_property
    def _unpacked_outputs(self) -> Mapping[str, Any]:
        return {} if self.packed_outputs is None else deserialize_state(base64.b64decode(self.packed_outputs))

    def test_outputs(self, client: str, round_number: int) -> Tensor | None:
        """Returns a client's outputs (n, outputs) on its test examples after a round; None if not kept."""
        if self.folder is None:
            stored: Tensor | None = self._unpacked_outputs.get(str(round_number), {}).get(client.encode().hex())
            return stored
        try:
            return predictions.read_predictions(self.folder, client, round=round_number).outputs
        except UserError:
            return None


@final
class ExecutedRuns(NamedTuple):
    """Holds the training runs of a comparison that have finished, and the errors of those that failed."""

    finished: dict[RunSpec, FinishedRun]
    failed: dict[RunSpec, Failure]


def execute_or_load_runs(
    plan: ComparisonPlan, run_specs: Sequence[RunSpec], callbacks: Sequence[Callback] = ()
) -> ExecutedRuns:
    """Loads finished runs, executes the others in parallel; returns runs and errors.

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
    _warn_of_changed_code(plan, finished_runs)
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
            train = partial(_run_or_resume, job, client_set, settings, plan.metrics, progress, callbacks)
            yield job, partial(_run_and_report, job, train)

    for job, result in run_in_processes(tasks(), processes):
        if isinstance(result, Failure):
            failed[job] = result
        else:
            finished_runs[job] = FinishedRun(result["history"], job.folder, result["packed"])
        _LOG.info("%s, seed %s: %s", job.label, job.seed, "failed" if job in failed else "done")
        plan.display.finish_run(missing.index(job), failed=job in failed)
    return ExecutedRuns(finished_runs, failed)


def _warn_of_changed_code(plan: ComparisonPlan, finished_runs: Iterable[RunSpec]) -> None:
    """Warns if the user's own code is not that with which the finished runs of a method were computed."""
    changed: list[str] = []
    for job in {job.label: job for job in finished_runs}.values():
        if job.folder is not None:
            clients = plan.build_client_set(job.seed).clients_of_run(job.method)
            code = code_fingerprint(clients if isinstance(clients, tuple) else (), job.method)
            changed += find_changed_code(read_manifest(job.folder).get("code"), code)
    warn_of_changed_code(changed, "finished runs of the comparison are read as they are, and not computed again")


def _num_processes(plan: ComparisonPlan, clients: int) -> int:
    if plan.parallel_runs == "auto":
        return default_parallel_runs(plan.settings, clients)
    if plan.parallel_runs > 1 and not supports_forked_runs(plan.settings):
        raise UserError(f"parallel={plan.parallel_runs} needs runs on the CPU of a Linux machine; leave it out")
    return plan.parallel_runs


def _run_and_report(job: RunSpec, train: Callable[[], Run]) -> dict[str, Any]:
    """Executes one run, and returns its history and, if it has no folder, its packed predictions.

    An error is raised again with the method and the seed.
    """
    whose = f"method {job.label}, seed {job.seed}"
    try:
        run = train()
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
