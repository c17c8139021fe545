"""Saves checkpoints during a run, and the personal models and predictions at its end."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.rounds.run_state import RunState
from polyfed.simulation.rounds.start.resume import load_kept_checkpoint
from polyfed.simulation.rounds.training_round import write_personal_models
from polyfed.simulation.storage import integrity
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint, save_checkpoint_and_remove_older
from polyfed.simulation.storage.directory import read_config


@final
class CheckpointSaver(Callback):
    """Saves checkpoints: every `checkpoint_every` rounds, the last, and the one of `keep`.

    A run without a directory saves nothing; the state after its best round is kept in memory.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._saved_round = run.checkpoint.round
        self._kept_rounds: tuple[int, ...] = ()
        self._binding: integrity.RunHashes = {}

    def on_start(self, earlier_records: Sequence[Mapping[str, Any]]) -> None:
        """Loads, if the run is resumed, the checkpoint of the round whose models the setting `keep` selects."""
        run, directory = self._run, self._run.directory
        if directory is None:
            return
        if run.settings.keep != "last" and run.checkpoint.round:
            run.best = load_kept_checkpoint(directory, run.federation, earlier_records, run.checkpoint)
        self._kept_rounds = _rounds_of(run.best)
        self._binding = integrity.compute_run_hashes(read_config(directory.path), directory.read_manifest())
        if outdated := {"files", "stopped"} & directory.read_manifest().keys():  # of the end that the run had before
            directory.add_to_manifest({name: {} for name in outdated})

    def on_aggregated(self, round_number: int) -> None:
        """Saves a checkpoint if `checkpoint_every` or `keep` want one, or the round is the last."""
        run = self._run
        state, keep = run.checkpoint, run.settings.keep
        kept_round = keep if isinstance(keep, int) else run.history[-1]["best_round"] if run.history else None
        is_best = keep != "last" and kept_round == state.round
        if is_best:
            run.best = state
        is_end = state.last_recorded_round == run.last_round
        if is_best or is_end or (state.round % run.settings.checkpoint_every == 0 and state.round < run.last_round):
            self.save_newest_state()

    def save_newest_state(self) -> None:
        """Saves the newest state as a checkpoint, unless it is saved or the run has no directory."""
        run, directory, state = self._run, self._run.directory, self._run.checkpoint
        if directory is None or state.round <= self._saved_round:
            return
        directory.check_in_place()
        binding = {**self._binding, "metrics": directory.metrics_sha256}
        if state.unevaluated_record is not None:
            binding["records"] = str(state.last_recorded_round)
        # The checkpoint of the round that was the best until now is needed if this one gets damaged.
        kept_rounds = (*_rounds_of(run.best), *self._kept_rounds)
        save_checkpoint_and_remove_older(
            directory.checkpoint_folder, state, self._saved_round, kept_rounds, binding, directory.state_store
        )
        self._saved_round, self._kept_rounds = state.round, _rounds_of(run.best)

    def on_end(self) -> None:
        """Writes personal models and predictions of the round that `keep` selects to the run directory."""
        run, directory, keep = self._run, self._run.directory, self._run.settings.keep
        if run.best is None and keep in ("best", "loss"):
            criterion = "score" if keep == "best" else "loss"
            warnings.warn(
                f"keep={keep!r}: no round has a validation {criterion}, so that the last is kept",
                RuntimeWarning,
                stacklevel=6,
            )
        if directory is not None:
            write_personal_models(run.federation, run.best or run.checkpoint, run.engine, directory, run.progress)
        run.predictions.write_one_file_per_client()
        if directory is not None:
            files = integrity.hash_files(directory.path, ("models", "predictions"))
            directory.add_to_manifest({"files": files, **run.build_manifest_entry_of_stop()})


def _rounds_of(state: Checkpoint | None) -> tuple[int, ...]:
    return () if state is None else (state.round,)
