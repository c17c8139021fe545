"""Defines the base class of callbacks, whose methods the training loop calls before, during and after the rounds."""

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyfed.core.errors import UserError


class Callback(ABC):
    """Follows a run round by round, and can stop it; a user's subclass overrides the methods that it needs.

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

    def on_start(self, earlier_records: Sequence[Mapping[str, Any]]) -> None:
        """Runs once when a run starts, and again each time it is resumed, before the next round. A callback resets here
        what it keeps from round to round.

        Args:
            earlier_records: the records of the rounds before; empty unless the run is resumed.
        """
        return

    def on_aggregated(self, round_number: int) -> None:
        """Runs in each round after the server has aggregated the clients' replies, and before the round is evaluated."""
        return

    def on_round(self, record: Mapping[str, Any]) -> bool | None:
        """Runs when a round is complete, after its evaluation if it has one; a callback returns True here to stop the
        run.

        Returns:
            True to stop the run after this round. (Between real sites the next round has begun by then; it is the last.)
        """
        return None

    def on_end(self) -> None:
        """Runs once at the end, when all results are written: after the last round, or after a callback has stopped the
        run.
        """
        return


def validate_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Returns the callbacks that a user gave as a tuple; raises a `UserError` unless they are a list of objects whose
    classes are subclasses of `Callback`.

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
