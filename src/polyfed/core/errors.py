"""Defines the errors that a user can act on, and the warnings about data that may mislead (leaks, ids among the features,
copies of rows); each message says what was wrong, shows the value, and says what to do.
"""

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from inspect import currentframe
from pathlib import Path

from polyfed.core.io.text.advice import keep_advice_for_this_process

_COLLECTED: ContextVar[list[str] | None] = ContextVar("_COLLECTED", default=None)


class UserError(ValueError):
    """Raised when polyfed cannot work with something that the user gave: configuration, data or a file.

    The command line prints the message without a traceback and exits with status 2. Where a message names an argument of
    Python and the option of the command line that does the same, as in `seeds=5 (--seeds 5)`, Python shows the argument
    alone and the command the option.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(keep_advice_for_this_process(str(message)))


class ClientError(RuntimeError):
    """Raised when a client could not finish its part of a round, or when the server refused the client's reply.

    Attributes: `round` (counted from 1), `client` (its id), `phase` ("local", "evaluate" or "reply"), `reason` and `trace`
    (the client's traceback, or ""). The message ends with the line of your own code that failed, if it was in yours.
    """

    def __init__(self, round_number: int, client: str, phase: str, reason: str, trace: str = "") -> None:
        reason = keep_advice_for_this_process(reason)
        place = _find_line_of_user(trace)
        super().__init__(f"round {round_number}, client {client!r}, phase {phase!r}: {reason}{place and f' ({place})'}")
        self.round, self.client, self.phase, self.reason, self.trace = round_number, client, phase, reason, trace


_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_NOT_OF_USER = str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<frozen ", "<string>"


def _find_line_of_user(trace: str) -> str:
    r"""Returns the innermost place of a traceback that is in no package (polyfed, torch, Python's own); "" if there is none.

    >>> _find_line_of_user('  File "/home/ann/mine.py", line 7, in local_update\n    1 / 0')
    '/home/ann/mine.py, line 7, in local_update'
    """
    frames = _FRAME.findall(trace.rpartition("Traceback (most recent call last):")[2])
    places = [frame for frame in frames if not frame[0].startswith(_NOT_OF_USER) and "-packages" not in frame[0]]
    return "{}, line {}, in {}".format(*places[-1]) if places else ""


class RoundError(RuntimeError):
    """Raised when too few clients replied in a round, or when a comparison of methods contains a run with such a round."""


class RunInterrupt(KeyboardInterrupt):
    """Raised after Ctrl-C; names the last saved round and the command that continues the run."""


def check_extra_installed(package: str, extra: str, feature: str, alternative: str = "") -> None:
    """Raises a `UserError` if an optional package is not installed; does not import the package.

    Args:
        package: its import name.
        extra: the extra of polyfed that installs it.
        feature: what needs the package; the start of the error message.
        alternative: what to do without the package.


    >>> check_extra_installed("numpy", "hub", "this example")  # installed
    >>> check_extra_installed("no_such_package", "hub", "this example", "do without it")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: this example needs the package no_such_package, which is not installed:
    pip install 'polyfed[hub]', or do without it
    """
    if find_spec(package) is None:
        remedy = f"pip install 'polyfed[{extra}]'{', or ' if alternative else ''}{alternative}"
        raise UserError(f"{feature} needs the package {package}, which is not installed: {remedy}")


_MAX_DESCRIPTION = 2_000  # characters


def describe_exception(error: BaseException) -> str:
    """Returns the type of an exception, and the start of its text if it has one that can be formed.

    >>> describe_exception(KeyError("sex")), describe_exception(MemoryError())
    ("KeyError: 'sex'", 'MemoryError')
    """
    try:
        text = str(error)
    except Exception:  # what a user's class may raise here would hide the error itself
        text = ""
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:_MAX_DESCRIPTION]


_FEW_CHOICES = 12


def did_you_mean(name: str, choices: Iterable[str], listing: str = "") -> str:
    """Returns the end of an error: the choices closest to the misspelt `name`, and all or how to list them.

    Args:
        name: what was given.
        choices: what is there.
        listing: a command that lists the choices.

    >>> did_you_mean("fedprx", ["fedavg", "fedprox"])
    'did you mean fedprox? Choices: fedavg, fedprox'
    >>> did_you_mean("fedprx", ["fedavg", "fedprox", *map(str, range(20))], "polyfed list algorithms")
    'did you mean fedprox? All 22: polyfed list algorithms'
    >>> did_you_mean("FedAvg-FT", ["fedavg", "fedavg_ft"])  # capitals, hyphens and spaces are no other name
    'did you mean fedavg_ft? Choices: fedavg, fedavg_ft'
    """
    name, choices = str(name), sorted(choices)
    same = [choice for choice in choices if _fold_name(choice) == _fold_name(name)]
    close = same or difflib.get_close_matches(name.lower(), choices, n=3, cutoff=0.6)
    if listing and len(choices) > _FEW_CHOICES:
        nearest = difflib.get_close_matches(name.lower(), choices, n=3, cutoff=0.0)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the nearest are {', '.join(nearest)}."
        return f"{hint} All {len(choices)}: {listing}"
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}{'C' if hint else 'c'}hoices: {', '.join(choices)}"


def _fold_name(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def warn_of_data(text: str) -> None:
    """Issues `text` as a `UserWarning`, and adds it to an enclosing `collect_data_warnings` block."""
    collected = _COLLECTED.get()
    if collected is not None and text not in collected:
        collected.append(text)
    warnings.warn(keep_advice_for_this_process(text), UserWarning, stacklevel=_count_frames_of_polyfed())


def _count_frames_of_polyfed() -> int:
    """Returns the `stacklevel` with which a caller's warning shows the line of the user that called polyfed."""
    depth, frame, level = 0, currentframe(), 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("polyfed."):
            level = depth
        depth, frame = depth + 1, frame.f_back
    return level + 1


@contextmanager
def collect_data_warnings() -> Iterator[list[str]]:
    """Yields a list of the texts of data warnings inside the `with` block, which are still issued.

    >>> with warnings.catch_warnings(), collect_data_warnings() as texts:
    ...     warnings.simplefilter("ignore")
    ...     warn_of_data("3 rows are copies")
    >>> texts
    ['3 rows are copies']
    """
    texts: list[str] = []
    before = _COLLECTED.set(texts)
    try:
        yield texts
    finally:
        _COLLECTED.reset(before)
