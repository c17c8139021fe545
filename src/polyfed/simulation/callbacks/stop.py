"""Calls the user's callbacks, and stops the run if one of them asks for it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.simulation.callbacks.base import Callback
from polyfed.simulation.rounds.run_state import RunState


@final
class StopOnRequest(Callback):
    """Passes each hook to the user's callbacks, in their order.

    Raises:
        UserError: in each hook, if one of the callbacks raises an exception.
    """

    def __init__(self, run: RunState, callbacks: Sequence[Callback]) -> None:
        self._run, self._callbacks = run, callbacks

    def on_start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Passes the records of a run that is resumed."""
        for callback in self._callbacks:
            self._call(callback, "on_start", tuple(records))

    def on_aggregated(self, round_number: int) -> None:
        """Passes the number of the round."""
        for callback in self._callbacks:
            self._call(callback, "on_aggregated", round_number)

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Passes the record to every callback; the first that returns True counts as who stopped the run."""
        for callback in self._callbacks:
            if self._call(callback, "on_round", record):
                self._run.stop(type(callback).__name__)

    def on_end(self) -> None:
        """Says on the progress display who stopped the run."""
        run = self._run
        if run.stopped_by is not None:
            run.progress.say(f"{run.stopped_by} stopped the run after round {run.last_round} of {run.settings.rounds}")
        for callback in self._callbacks:
            self._call(callback, "on_end")

    def _call(self, callback: Callback, hook: str, *arguments: Any) -> Any:
        try:
            return getattr(callback, hook)(*arguments)
        except Exception as error:
            run = self._run
            remedy = "correct it, and start again"
            if run.directory is not None:
                saved = f"{run.checkpoint.last_recorded_round} of {run.settings.rounds} rounds are saved"
                how = f"polyfed.resume({str(run.directory.path)!r}, callbacks=[...])"
                remedy = f"{saved}: correct it, and continue with {how}"
            raise UserError(
                f"the callback {type(callback).__name__} failed in {hook}: {type(error).__name__}: {error}; {remedy}"
            ) from error
