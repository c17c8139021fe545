"""Calls the user's callbacks, and stops the run if one of them asks for it."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, final

from polyfed.core.errors import UserError, describe_exception
from polyfed.simulation.callbacks.callback import Callback, asks_to_stop, name_of_callback
from polyfed.simulation.rounds.run_state import RunState


@final
class UserCallbackRunner(Callback):
    """Calls the user's callbacks in their order, and stops the run if one returns False.

    Raises:
        UserError: in each hook, if one of the callbacks raises an exception.
    """

    def __init__(self, run: RunState, callbacks: Sequence[Callback]) -> None:
        self._run, self._callbacks = run, callbacks

    def on_start(self, earlier_records: Sequence[Mapping[str, Any]]) -> None:
        """Calls `on_start` of every user callback with the records of all earlier rounds."""
        for callback in self._callbacks:
            self._call(callback, "on_start", tuple(earlier_records))

    def on_aggregated(self, round_number: int) -> None:
        """Calls `on_aggregated` of every user callback with the number of the round."""
        for callback in self._callbacks:
            self._call(callback, "on_aggregated", round_number)

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Calls `on_round` of every user callback; the first that returns False stops the run."""
        for callback in self._callbacks:
            if asks_to_stop(self._call(callback, "on_round", record)):
                self._run.request_stop_after_round(name_of_callback(callback))

    def on_end(self) -> None:
        """Shows which callback stopped the run, if one did, and calls `on_end` of every user callback."""
        run = self._run
        if run.stopped_by is not None:
            run.progress.say(f"{run.stopped_by} stopped the run after round {run.last_round} of {run.settings.rounds}")
        for callback in self._callbacks:
            self._call(callback, "on_end")

    def _call(self, callback: Callback, hook: str, *arguments: Any) -> Any:
        try:
            return getattr(callback, hook)(*deepcopy(arguments))  # a change of a record changes no run
        except Exception as error:
            run = self._run
            remedy = "correct it, and start again"
            if run.directory is not None:
                saved = f"{run.checkpoint.last_recorded_round} of {run.settings.rounds} rounds are saved"
                how = f"polyfed.resume({str(run.directory.path)!r}, callbacks=[...])"
                remedy = f"{saved}: correct it, and continue with {how}"
            raise UserError(
                f"the callback {name_of_callback(callback)} failed in {hook}: {describe_exception(error)}; {remedy}"
            ) from error
