"""Defines the base class of callbacks, whose methods the training loop calls before, during and after the rounds."""

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, final

import numpy as np

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.keyword_names import check_can_be_called

RecordFunction = Callable[[Mapping[str, Any]], Any]
"""A function of a round's record, the object that `metrics.jsonl` gets."""


class Callback(ABC):
    """Follows a run round by round, and can stop it; a user's subclass overrides the methods that it needs.

    A record is the object that `metrics.jsonl` gets for a round: scores, losses and bytes by client, and their summary. No
    hook receives examples, networks or messages. Hooks must not change the records.

    >>> from polyfed.algorithms import FedAvg
    >>> from polyfed.simulation.federate import federate
    >>> from polyfed.testing import small_clients
    >>> class TrafficLimit(Callback):
    ...     def on_round(self, record):
    ...         return record["bytes_up_total"] < 1000
    >>> run = federate(small_clients(), FedAvg(), rounds=50, workers=0, callbacks=[TrafficLimit()])
    >>> len(run.history), run.stopped_by
    (1, 'TrafficLimit')
    """

    def on_start(self, earlier_records: Sequence[Mapping[str, Any]]) -> None:
        """Runs once when a run starts, and again each time it is resumed, before the next round.

        A callback resets here what it keeps from round to round.

        Args:
            earlier_records: the records of the rounds before; empty unless the run is resumed.
        """
        return

    def on_aggregated(self, round_number: int) -> None:
        """Runs in each round after the server has aggregated the clients' replies, and before the round is evaluated."""
        return

    def on_round(self, record: Mapping[str, Any]) -> bool | None:
        """Runs when a round is complete, evaluation included; False stops the run.

        Returns:
            False to stop the run after this round; with anything else (None, True) it goes on. (Between real sites the next
            round has begun by then; it is the last.)
        """
        return None

    def on_end(self) -> None:
        """Runs once, after the last round or a callback's stop, when all results are written."""
        return


@final
class FunctionCallback(Callback):
    """Calls a user's function with the record of each round; the function returns False to stop the run."""

    def __init__(self, function: RecordFunction) -> None:
        self._function = function

    @property
    def name(self) -> str:
        """Returns the name of the function."""
        return getattr(self._function, "__name__", type(self._function).__name__)

    def on_round(self, record: Mapping[str, Any]) -> bool | None:
        """Calls the function with the record of the round, and returns its answer."""
        answer: bool | None = self._function(record)
        return answer


def name_of_callback(callback: Callback) -> str:
    """Returns the name of a callback in messages and files: that of its class or function."""
    return callback.name if isinstance(callback, FunctionCallback) else type(callback).__name__


def asks_to_stop(answer: Any) -> bool:
    """Returns True if a callback's answer to a round asks for the end of the run: if it is False, Python's or NumPy's.

    >>> asks_to_stop(False), asks_to_stop(None), asks_to_stop(0)
    (True, False, False)
    """
    return isinstance(answer, bool | np.bool_) and not answer


def validate_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Returns the callbacks that a user gave as a tuple of `Callback` objects.

    Raises:
        UserError: `callbacks` is not a list, or an entry is neither an object of a subclass of `Callback` nor a function, or
            it takes other arguments than it is called with.

    >>> [name_of_callback(callback) for callback in validate_callbacks([print])]
    ['print']
    """
    rule = "callbacks must be a list of functions of a round's record or polyfed.Callback objects"
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Iterable):
        cure = f"; give a list: callbacks=[{getattr(callbacks, '__name__', '...')}]" if callable(callbacks) else ""
        raise UserError(f"{rule}, got {callbacks!r}{cure}")
    listed = []
    for callback in callbacks:
        if isinstance(callback, type) or not (isinstance(callback, Callback) or callable(callback)):
            cure = "a class; give an object of it" if isinstance(callback, type) else "which is neither"
            raise UserError(f"{rule}, got {callback!r}, {cure}")
        if isinstance(callback, Callback):
            _check_hooks(callback)
        else:
            check_can_be_called(callback, 1, "a callback is called with one argument, the record of a round")
        listed.append(callback if isinstance(callback, Callback) else FunctionCallback(callback))
    return tuple(listed)


def _check_hooks(callback: Callback) -> None:
    """Raises a `UserError` if a callback has a method `on_...` that is no hook, or a hook with other arguments."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in hooks and callable(getattr(callback, name)):
            raise UserError(f"{name_of_callback(callback)} has a method {name!r}, and no such hook is ever called; "
                            f"{did_you_mean(name, hooks)}")  # fmt: skip
    for name in hooks:
        arguments = list(signature(getattr(Callback, name)).parameters)[1:]
        rule = f"the hook is called as {name}({', '.join(arguments)})"
        check_can_be_called(getattr(callback, name), len(arguments), rule)
