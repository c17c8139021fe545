"""How a run tells where it is: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TextIO, final

from polyfed.core.errors import UserError
from polyfed.core.evaluation import SCORE
from polyfed.core.text import clean
from polyfed.simulation.norms import norms_of


class Progress(ABC):
    """Told about a run as it goes on; everything is written to standard error."""

    @abstractmethod
    def start(self, title: str, rounds: int, done: int) -> None:
        """The run begins, or goes on after `done` rounds."""

    @abstractmethod
    def client(self, phase: str, done: int, total: int) -> None:
        """Another client of the current round has finished."""

    @abstractmethod
    def round(self, record: Mapping[str, Any]) -> None:
        """A round is complete; `record` is what `metrics.jsonl` gets."""

    @abstractmethod
    def say(self, sentence: str) -> None:
        """Something that the user should know."""

    def warn(self, sentence: str) -> None:
        """What was said of this round is grave; nothing more, where somebody reads what is said."""
        return

    @abstractmethod
    def stop(self) -> None:
        """The run has ended, well or not."""


def _mean_score(record: Mapping[str, Any]) -> str:
    for score in [record["score"]] if "score" in record else SCORE.values():
        if score in record.get("summary", {}):
            return f"{score} {record['summary'][score]['mean']:.3f}"
    return ""


def _megabytes(record: Mapping[str, Any]) -> str:
    return f"{(record['bytes_down_total'] + record['bytes_up_total']) / 2**20:.1f} MB"


@final
class Silent(Progress):
    """Says nothing.

    Args:
        warns: whether what is grave is a warning of Python, since nobody else tells of it.
    """

    def __init__(self, *, warns: bool = False) -> None:
        self._warns = warns

    def start(self, title: str, rounds: int, done: int) -> None:
        """Nothing."""

    def client(self, phase: str, done: int, total: int) -> None:
        """Nothing."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def say(self, sentence: str) -> None:
        """Nothing."""

    def warn(self, sentence: str) -> None:
        """A warning of Python, where it is to be one."""
        if self._warns:
            warnings.warn(sentence, RuntimeWarning, stacklevel=5)

    def stop(self) -> None:
        """Nothing."""


@final
class Lines(Progress):
    """A line a round, for logs.

    Args:
        stream: where to; None is standard error.
        norms: whether another line has the norm of each client's update, where it is known.
    """

    def __init__(self, stream: TextIO | None = None, *, norms: bool = False) -> None:
        self._stream, self._norms = stream or sys.stderr, norms
        self._title, self._rounds, self._done, self._start = "", 0, 0, 0.0

    def start(self, title: str, rounds: int, done: int) -> None:
        """Remembers when the run began."""
        self._title, self._rounds, self._done, self._start = title, rounds, done, time.monotonic()

    def client(self, phase: str, done: int, total: int) -> None:
        """Nothing: a line a client would drown the log."""

    def round(self, record: Mapping[str, Any]) -> None:
        """Round, mean score, traffic and time left."""
        played = record["round"] - self._done
        left = (time.monotonic() - self._start) / played * (self._rounds - record["round"])
        parts = [f"{self._title}: round {record['round']}/{self._rounds}"]
        if record["train_loss"] is not None:
            parts.append(f"train loss {record['train_loss']:.3f}")
        parts += [_mean_score(record), _megabytes(record), f"{record['seconds']:.2f} s", f"{left:.0f} s left"]
        print(clean(", ".join(part for part in parts if part)), file=self._stream, flush=True)
        if self._norms and (known := norms_of(record)):
            listed = ", ".join(f"{client} {norm:.4g}" for client, norm in sorted(known.items()))
            self.say(f"round {record['round']}: norms of updates: {listed}")

    def say(self, sentence: str) -> None:
        """The sentence on a line."""
        print(clean(sentence), file=self._stream, flush=True)

    def stop(self) -> None:
        """Nothing."""


@final
class Bar(Progress):
    """A rich bar: round, clients done, mean score, traffic, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
            TimeRemainingColumn(), TextColumn("{task.fields[state]}", markup=False),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, state="")
        self._summary = ""

    def start(self, title: str, rounds: int, done: int) -> None:
        """Shows the bar."""
        self._bar.update(self._task, description=clean(title), total=rounds, completed=done)
        self._bar.start()

    def client(self, phase: str, done: int, total: int) -> None:
        """Counts the clients of the round."""
        self._bar.update(self._task, state=f"{phase} {done}/{total} clients  {self._summary}")

    def round(self, record: Mapping[str, Any]) -> None:
        """Moves the bar."""
        self._summary = "  ".join(part for part in (_mean_score(record), _megabytes(record)) if part)
        self._bar.update(self._task, completed=record["round"], state=self._summary)

    def say(self, sentence: str) -> None:
        """The sentence above the bar."""
        self._bar.console.print(clean(sentence), markup=False, highlight=False)

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()


def for_terminal(*, quiet: bool = False, lines: bool = True, warns: bool = False) -> Progress:
    """A bar if standard error is a terminal; otherwise lines, or nothing if `lines` is false or `quiet` is true; `warns` is
    that of `Silent`."""
    if quiet:
        return Silent()
    if sys.stderr.isatty():
        return Bar()
    return Lines() if lines else Silent(warns=warns)


def progress_of(progress: Progress | bool | None, *, quiet: bool = False) -> Progress:
    """Returns who is told of a run made in Python: `progress` itself, or a bar on a terminal, or nobody if it is False or
    `quiet` is True.

    Raises:
        UserError: `progress` is something else.

    >>> type(progress_of(False)).__name__, type(progress_of(None, quiet=True)).__name__
    ('Silent', 'Silent')
    """
    if isinstance(progress, Progress):
        return progress
    if progress not in (None, True, False):
        raise UserError(f"progress must be True, False or a Progress, got {progress!r}")
    return for_terminal(quiet=quiet or progress is False, lines=False, warns=True)
