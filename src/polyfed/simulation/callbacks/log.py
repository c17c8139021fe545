"""Reports each round to the progress display and the log, and writes the method's initial arrays for plots."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

from polyfed.algorithms import registry_name
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.monitoring.progress import describe_score_and_traffic
from polyfed.simulation.monitoring.update_norms import describe_diverged_losses
from polyfed.simulation.rounds.run_state import RunState

_LOG = logging.getLogger("polyfed.simulation")
_MOST_PLOTTED_CLIENTS = 1_000  # whose initial weights a plot can show; all of a million would take minutes


@final
class ProgressReporter(Callback):
    """Shows each round's record and its warnings on the progress display of a run, and logs them."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def on_start(self, earlier_records: Sequence[Mapping[str, Any]]) -> None:
        """Starts the progress display, and writes the method's initial arrays for plots."""
        run = self._run
        method, num_clients = registry_name(run.federation.algorithm), len(run.federation.client_registry.ids)
        run.progress.start(method, run.settings.rounds, len(earlier_records))
        _LOG.info("%s: %d clients, %d of %d rounds to do", method, num_clients,
                  run.settings.rounds - len(earlier_records), run.settings.rounds)  # fmt: skip
        if run.checkpoint.round == 0:
            first_ids = run.federation.client_registry.ids[:_MOST_PLOTTED_CLIENTS]
            run.write_plot_arrays_and_return_numbers(run.checkpoint, first_ids)

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Shows the record of the round, and warns the first time that training losses become infinite or NaN."""
        progress, history = self._run.progress, self._run.history
        progress.finish_round(record)
        _LOG.info("round %d of %d: %s", record["round"], self._run.settings.rounds, describe_score_and_traffic(record))
        for sentence in record["warnings"]:
            progress.say(f"warning: {sentence}")
            _LOG.warning("%s", sanitise_for_terminal(sentence))
        if (sentence := describe_diverged_losses([record])) and not describe_diverged_losses(history[-2:-1]):
            progress.warn(sentence)

    def on_end(self) -> None:
        """Logs the end of the run, and which callback stopped it."""
        run = self._run
        by = "" if run.stopped_by is None else f", stopped by {run.stopped_by}"
        _LOG.info("ended after round %d of %d%s", len(run.history), run.settings.rounds, by)
