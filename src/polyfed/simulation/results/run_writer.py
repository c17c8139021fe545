"""Writes a run that was kept in memory to a run directory, as a run with `out` writes it."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.simulation.engines.devices import choose_device
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.start.preparation import create_run_directory
from polyfed.simulation.rounds.training_round import write_personal_models
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint, save_checkpoint_and_remove_older
from polyfed.simulation.storage.directory import read_config
from polyfed.simulation.storage.predictions.prediction_store import PredictionStore


@exclusive_single_torch_thread_with_grad()
def write_run_from_memory(
    out: str | Path,
    federation: Federation,
    history: Sequence[Mapping[str, Any]],
    last: Checkpoint,
    best: Checkpoint | None,
    predictions: PredictionStore | None,
    stopped_by: str | None,
) -> Path:
    """Writes configuration, records, checkpoints, models and predictions to a new run directory; returns its path.

    Args:
        out: the folder, which must not exist or be empty.
        federation, history, last, best, predictions, stopped_by: as the fields of `Run`.

    Raises:
        UserError: the folder is taken or cannot be written, or the configuration holds what YAML cannot.
    """
    last, best = deepcopy((last, best))  # saved states are read from the directory, which may be moved
    states = {state.round: state for state in (last, best) if state is not None}
    clients = federation.clients if isinstance(federation.clients, SourceClients) else list(federation.clients.values())
    device = choose_device(federation.settings.device)
    engine = InProcessEngine(federation.algorithm, clients, device, federation.metrics)
    with closing(engine), closing(create_run_directory(out, federation, last, {}, {})) as directory:
        binding = integrity.compute_run_hashes(read_config(directory.path), directory.read_manifest())
        saved_round = 0
        for record in history:
            directory.append_record(record)
            if (state := states.get(record["round"])) is not None:
                run_hashes = {**binding, "metrics": directory.metrics_sha256}
                save_checkpoint_and_remove_older(
                    directory.checkpoint_folder, state, saved_round, list(states), run_hashes, directory.state_store
                )
                saved_round = state.round
        write_personal_models(federation, best or last, engine, directory, SilentProgress())
        if predictions is not None:
            predictions.write_memory_to_run_directory(directory.path)
        stopped = {} if stopped_by is None else {"stopped": {"round": last.round, "by": stopped_by}}
        files = integrity.hash_files(directory.path, ("models", "predictions"))
        directory.add_to_manifest({"files": files, **stopped})
        return directory.path
