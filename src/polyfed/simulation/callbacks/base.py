"""The base of all callbacks: hooks that the loop over rounds calls."""

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyfed.core.errors import UserError


class Callback(ABC):
    """Follows a run round by round, and may stop it. A subclass overrides the hooks that it needs.

    A record is the object that `metrics.jsonl` gets for a round: scores, losses and bytes by client, and their summary. No
    hook receives examples, networks or messages. Hooks must not change the records.

    >>> from polyfed.algorithms import FedAvg
    >>> from polyfed.simulation.federate import federate
    >>> from polyfed.testing import small_clients
    >>> class TrafficLimit(Callback):
    ...     def on_round(self, record):
    ...         return record["bytes_up_total"] > 1000
    >>> run = federate(small_clients(), FedAvg(), rounds=50, workers=0, callbacks=[TrafficLimit()])
    >>> len(run.history), run.stopped_by
    (1, 'TrafficLimit')
    """

    def on_start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Called before the first round that is left. An object that keeps something from round to round sets it here.

        Args:
            records: of the rounds before, empty unless the run is resumed.
        """
        return

    def on_aggregated(self, round_number: int) -> None:
        """Called when the server has aggregated the replies of a round, which is still to be evaluated."""
        return

    def on_round(self, record: Mapping[str, Any]) -> bool | None:
        """Called when the record of a round is complete.

        Returns:
            True to stop the run after this round. (Between real sites the next round has begun by then; it is the last.)
        """
        return None

    def on_end(self) -> None:
        """Called when the run has ended, after its last round or stopped by a callback, and its results are written."""
        return


def list_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Returns the callbacks that a user gave as a tuple.

    Raises:
        UserError: it is no list, or an entry is no object of a subclass of `Callback`.
    """
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        raise UserError(f"callbacks must be a list of polyfed.Callback objects, got {callbacks!r}")
    listed = tuple(callbacks)
    for callback in listed:
        if not isinstance(callback, Callback):
            cure = "a class; give an object of it" if isinstance(callback, type) else "which is no subclass of it"
            raise UserError(f"callbacks must be a list of polyfed.Callback objects, got {callback!r}, {cure}")
    return listed
