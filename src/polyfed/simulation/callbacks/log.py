"""Reports each round to the progress display, and writes the method's initial arrays for plots."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from polyfed.algorithms import registry_name
from polyfed.simulation.callbacks.base import Callback
from polyfed.simulation.monitoring.update_norms import describe_diverged_losses
from polyfed.simulation.rounds.run_state import RunState


@final
class ProgressReporter(Callback):
    """Shows each round's record and its warnings on the progress display of a run."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def on_start(self, earlier_records: Sequence[Mapping[str, Any]]) -> None:
        """Starts the progress display, and writes the method's initial arrays for plots."""
        run = self._run
        run.progress.start(registry_name(run.federation.algorithm), run.settings.rounds, len(earlier_records))
        if run.checkpoint.round == 0:
            run.write_plot_arrays_and_return_numbers(run.checkpoint, run.federation.client_registry.ids)

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Shows the record of the round, and warns the first time that training losses become infinite or NaN."""
        progress, history = self._run.progress, self._run.history
        progress.finish_round(record)
        for sentence in record["warnings"]:
            progress.say(f"warning: {sentence}")
        if (sentence := describe_diverged_losses([record])) and not describe_diverged_losses(history[-2:-1]):
            progress.warn(sentence)
