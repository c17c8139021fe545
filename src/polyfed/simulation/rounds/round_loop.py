"""Runs the loop over the rounds of a run.

A round samples clients, dispatches messages, runs the clients and aggregates their replies
(`polyfed.simulation.rounds.training_round.train_and_aggregate_round`). Then callbacks evaluate, log, save checkpoints and
stop the run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from polyfed.core.errors import RunInterrupt
from polyfed.core.io.atomic_files import add_resume_hint_if_disk_full
from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.callbacks.checkpoint import CheckpointSaver
from polyfed.simulation.callbacks.evaluate import RoundEvaluator
from polyfed.simulation.callbacks.log import ProgressReporter
from polyfed.simulation.callbacks.stop import UserCallbackRunner
from polyfed.simulation.engines.base import ClientTask, Engine
from polyfed.simulation.engines.benchmark import EngineChoice, benchmark_engines
from polyfed.simulation.engines.devices import choose_client_device
from polyfed.simulation.engines.factory import build_engine_for_settings
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.results.across_sites.cross_site_scores import write_cross_site
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.planning.round_scheduler import RoundScheduler
from polyfed.simulation.rounds.run_state import RunState
from polyfed.simulation.rounds.training_round import train_and_aggregate_round
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import RunDirectory, call_to_resume
from polyfed.simulation.storage.predictions.prediction_store import PredictionStore


def run_remaining_rounds(
    federation: Federation,
    start: Checkpoint | None,
    earlier_records: Sequence[Mapping[str, Any]],
    directory: RunDirectory | None,
    progress: Progress,
    engine: Engine | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Runs the remaining rounds; whatever ends the run early, the newest state is saved first.

    Args:
        federation: clients, method and settings.
        start: the state to continue from; None is the initial state.
        earlier_records: the records of the rounds before.
        directory: the run directory, closed at the end; None writes nothing.
        progress: the progress display.
        engine: runs the clients, closed at the end; None builds the one that the settings name.
        callbacks: those of the user.
    """
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(add_resume_hint_if_disk_full(f"`{call_to_resume(directory.path)}`"))
            stack.callback(directory.close)
        checkpoint = start or federation.initial_checkpoint()
        engine = engine or _build_engine(federation, checkpoint, directory, progress)
        stack.callback(engine.close)
        predictions = PredictionStore(federation.clients, None if directory is None else directory.path)
        predictions.load_history_and_remove_later_rounds(earlier_records)
        stack.callback(progress.stop)
        run = RunState(federation, engine, progress, predictions, directory, checkpoint, list(earlier_records))
        scheduler, checkpoint_saver = RoundScheduler(federation, engine), CheckpointSaver(run)
        run.callbacks = (
            RoundEvaluator(run),
            ProgressReporter(run),
            checkpoint_saver,
            UserCallbackRunner(run, callbacks),
        )
        try:
            for callback in run.callbacks:
                callback.on_start(run.history)
            if checkpoint.unevaluated_record is not None:  # the run was stopped between training and evaluation
                for callback in run.callbacks:
                    callback.on_aggregated(checkpoint.round)
            while run.checkpoint.last_recorded_round < run.last_round:
                run.current_round = run.checkpoint.round + 1
                plan = scheduler.plan_round(run.checkpoint, run.history)
                aggregated = train_and_aggregate_round(
                    federation, run.checkpoint, run.history, engine, progress, run.finish_round, plan
                )
                run.aggregated = scheduler.add_simulated_time(aggregated, plan)
                for callback in run.callbacks:
                    callback.on_aggregated(run.current_round)
            for callback in run.callbacks:
                callback.on_end()
        except BaseException as stop:
            checkpoint_saver.save_newest_state()
            if isinstance(stop, KeyboardInterrupt) and directory is not None:
                raise RunInterrupt(
                    f"interrupted; {run.checkpoint.round} of {run.settings.rounds} rounds are saved: continue with "
                    f"`{call_to_resume(directory.path)}`"
                ) from stop
            raise
    path = None if directory is None else directory.path
    finished_run = Run(federation, run.history, run.checkpoint, path, run.best, predictions, run.stopped_by)
    if federation.settings.cross_site:
        finished_run = dataclasses.replace(finished_run, cross_site_scores=finished_run.cross_site())
        if path is not None:
            write_cross_site(finished_run.cross_site(), path)
    return finished_run


def _build_engine(
    federation: Federation, checkpoint: Checkpoint, directory: RunDirectory | None, progress: Progress
) -> Engine:
    choice = resolve_auto_engine(federation, checkpoint, directory, progress)
    clients = federation.clients if isinstance(federation.clients, SourceClients) else list(federation.clients.values())
    return build_engine_for_settings(federation.settings, federation.algorithm, clients, federation.metrics, choice)


def resolve_auto_engine(
    federation: Federation, checkpoint: Checkpoint, directory: RunDirectory | None, progress: Progress
) -> EngineChoice:
    """Chooses for `engine="auto"`; a resumed run keeps its choice, a new one measures.

    Args:
        federation: of the run.
        checkpoint: the state from which the run begins or continues.
        directory: of the run, or None; its manifest holds the choice.
        progress: shows the measurement.
    """
    settings = federation.settings
    is_source = isinstance(federation.clients, SourceClients)  # whose clients are not made to measure
    if settings.engine != "auto" or checkpoint.round == settings.rounds or is_source:
        return EngineChoice()
    manifest = {} if directory is None else directory.read_manifest()
    if "auto" in manifest:
        return EngineChoice.from_manifest_entry(manifest["auto"])

    def tasks(ids: Sequence[str]) -> list[ClientTask]:
        return [
            task
            for block in federation.build_task_blocks("local", ids, checkpoint.round + 1, checkpoint)
            for task in block
        ]

    clients, device = list(federation.clients.values()), choose_client_device(settings)
    choice = benchmark_engines(settings, federation.algorithm, clients, device, tasks)
    if choice.gains:
        progress.say(str(choice))
    if directory is not None:
        directory.add_to_manifest({"auto": choice.to_manifest_entry()})
    return choice
