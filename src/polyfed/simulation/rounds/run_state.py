"""Defines `RunState`, which holds what the loop over rounds and its callbacks read and change."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.training_round import PhaseResults, complete_record
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.directory import RunDirectory
from polyfed.simulation.storage.predictions.prediction_store import PredictionStore


@final
@dataclass(eq=False)
class RunState:
    """Holds everything about a run that changes from round to round, such as the newest state and the records.

    Attributes:
        federation, engine, progress, predictions: what the run works with.
        directory: the run directory; None if the run writes nothing.
        checkpoint: the newest state that can be saved. While its round is unevaluated, it has the incomplete record.
        history: the records of the complete rounds.
        callbacks: called when a record is complete.
        aggregated: the state after the last aggregation; `checkpoint` follows when the round is evaluated.
        current_round: the round that is trained or evaluated now.
        last_round: the run ends after this round: that of the settings, or an earlier one if a callback stops the run.
        stopped_by: the class of the callback that stopped the run; None if none did.
        best: unless `keep="last"`, the state after the round that is kept; None until there is one.
    """

    federation: Federation
    engine: Engine
    progress: Progress
    predictions: PredictionStore
    directory: RunDirectory | None
    checkpoint: Checkpoint
    history: list[Mapping[str, Any]]
    callbacks: Sequence[Callback] = ()
    stopped_by: str | None = None
    best: Checkpoint | None = None
    aggregated: Checkpoint = field(init=False)
    current_round: int = field(init=False)
    last_round: int = field(init=False)

    def __post_init__(self) -> None:
        self.aggregated, self.current_round = self.checkpoint, self.checkpoint.round
        self.last_round = self.settings.rounds

    @property
    def settings(self) -> Settings:
        """Returns the settings of the run."""
        return self.federation.settings

    @property
    def overlaps_evaluation(self) -> bool:
        """Returns whether rounds are evaluated while the next trains, unless `keep` needs scores before."""
        waits_for_all = self.settings.asynchronous is None
        return self.engine.overlaps_evaluation and waits_for_all and self.settings.keep == "last"

    def finish_round(self, after: Checkpoint, evaluation_results: PhaseResults | None) -> None:
        """Completes the record of a round, writes it to `metrics.jsonl`, and calls `on_round` of the callbacks.

        Args:
            after: the state after the round, with the incomplete record.
            evaluation_results: the evaluation of all clients; None in a round without one.
        """
        record, outputs = complete_record(
            self.federation, after.unevaluated_record or {}, evaluation_results, self.history
        )
        record["analysis"] = self.write_plot_arrays_and_return_numbers(after, record.pop("replied"))
        keep = self.settings.keep
        round_to_keep = keep if isinstance(keep, int) else record["best_round"]
        if too_large := self.predictions.store_round_or_explain(after.round, outputs, round_to_keep):
            if self.directory is not None:
                self.directory.add_to_manifest({"predictions": too_large})
            warnings.warn(too_large, RuntimeWarning, stacklevel=7)
        if self.directory is not None:
            self.directory.append_record(record)
        self.history.append(record)
        self.checkpoint = replace(after, unevaluated_record=None)
        for callback in self.callbacks:
            callback.on_round(record)

    def request_stop_after_round(self, callback_name: str) -> None:
        """Ends the run after this round, and records which callback asked first."""
        if self.stopped_by is None and self.current_round < self.settings.rounds:
            self.stopped_by, self.last_round = callback_name, self.current_round

    def build_manifest_entry_of_stop(self) -> dict[str, Any]:
        """Returns `{"stopped": {"round", "by"}}` if a callback stopped the run, else {}."""
        return {} if self.stopped_by is None else {"stopped": {"round": self.last_round, "by": self.stopped_by}}

    def write_plot_arrays_and_return_numbers(
        self, checkpoint: Checkpoint, client_ids: Sequence[str]
    ) -> dict[str, float]:
        """Writes the method's arrays for plots, and returns its numbers for the record by name.

        Args:
            checkpoint: the state after the round.
            client_ids: the clients that replied.

        Returns:
            The numbers that the method keeps, for the record of the round.
        """
        analysis = self.federation.algorithm.analysis(checkpoint.state, client_ids)
        arrays = {name: value for name, value in analysis.items() if not isinstance(value, int | float)}
        if self.directory is not None and arrays:
            self.directory.write_plot_arrays(checkpoint.round, arrays)
        return {name: value for name, value in analysis.items() if isinstance(value, int | float)}
