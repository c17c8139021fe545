"""How a run tells where it is: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TextIO, final

from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import DEFAULT_METRIC
from polyfed.core.io.terminal_text import sanitise_for_terminal
from polyfed.simulation.monitoring.update_norms import norms_by_client


class Progress(ABC):
    """Told about a run as it goes on; everything is written to standard error."""

    @abstractmethod
    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """The run begins, or goes on after `rounds_done` rounds."""

    @abstractmethod
    def update_clients(self, phase: str, clients_done: int, total: int) -> None:
        """Another client of the current round has finished."""

    @abstractmethod
    def finish_round(self, record: Mapping[str, Any]) -> None:
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
    for score in [record["score"]] if "score" in record else DEFAULT_METRIC.values():
        if score in record.get("summary", {}):
            return f"{score} {record['summary'][score]['mean']:.3f}"
    return ""


def _megabytes(record: Mapping[str, Any]) -> str:
    return f"{(record['bytes_down_total'] + record['bytes_up_total']) / 2**20:.1f} MB"


@final
class SilentProgress(Progress):
    """Says nothing.

    Args:
        warns: whether what is grave is a warning of Python, since nobody else tells of it.
    """

    def __init__(self, *, warns: bool = False) -> None:
        self._warns = warns

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Nothing."""

    def update_clients(self, phase: str, clients_done: int, total: int) -> None:
        """Nothing."""

    def finish_round(self, record: Mapping[str, Any]) -> None:
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
class LineProgress(Progress):
    """A line a round, for logs.

    Args:
        stream: where to; None is standard error.
        norms: whether another line has the norm of each client's update, where it is known.
    """

    def __init__(self, stream: TextIO | None = None, *, norms: bool = False) -> None:
        self._stream, self._norms = stream or sys.stderr, norms
        self._title, self._rounds, self._done, self._start = "", 0, 0, 0.0

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Remembers when the run began."""
        self._title, self._rounds, self._done, self._start = title, rounds, rounds_done, time.monotonic()

    def update_clients(self, phase: str, clients_done: int, total: int) -> None:
        """Nothing: a line a client would drown the log."""

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Round, mean score, traffic and time left."""
        rounds_played = record["round"] - self._done
        seconds_left = (time.monotonic() - self._start) / rounds_played * (self._rounds - record["round"])
        parts = [f"{self._title}: round {record['round']}/{self._rounds}"]
        if record["train_loss"] is not None:
            parts.append(f"train loss {record['train_loss']:.3f}")
        parts += [_mean_score(record), _megabytes(record), f"{record['seconds']:.2f} s", f"{seconds_left:.0f} s left"]
        print(sanitise_for_terminal(", ".join(part for part in parts if part)), file=self._stream, flush=True)
        if self._norms and (norm_by_client := norms_by_client(record)):
            listed = ", ".join(f"{client} {norm:.4g}" for client, norm in sorted(norm_by_client.items()))
            self.say(f"round {record['round']}: norms of updates: {listed}")

    def say(self, sentence: str) -> None:
        """The sentence on a line."""
        print(sanitise_for_terminal(sentence), file=self._stream, flush=True)

    def stop(self) -> None:
        """Nothing."""


@final
class ProgressBar(Progress):
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

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Shows the bar."""
        self._bar.update(self._task, description=sanitise_for_terminal(title), total=rounds, completed=rounds_done)
        self._bar.start()

    def update_clients(self, phase: str, clients_done: int, total: int) -> None:
        """Counts the clients of the round."""
        self._bar.update(self._task, state=f"{phase} {clients_done}/{total} clients  {self._summary}")

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Moves the bar."""
        self._summary = "  ".join(part for part in (_mean_score(record), _megabytes(record)) if part)
        self._bar.update(self._task, completed=record["round"], state=self._summary)

    def say(self, sentence: str) -> None:
        """The sentence above the bar."""
        self._bar.console.print(sanitise_for_terminal(sentence), markup=False, highlight=False)

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()


def build_terminal_progress(*, quiet: bool = False, lines: bool = True, warns: bool = False) -> Progress:
    """A bar if standard error is a terminal; otherwise lines, or nothing if `lines` is false or `quiet` is true; `warns` is
    that of `SilentProgress`."""
    if quiet:
        return SilentProgress()
    if sys.stderr.isatty():
        return ProgressBar()
    return LineProgress() if lines else SilentProgress(warns=warns)


def resolve_progress(progress: Progress | bool | None, *, quiet: bool = False) -> Progress:
    """Returns who is told of a run made in Python: `progress` itself, or a bar on a terminal, or nobody if it is False or
    `quiet` is True.

    Raises:
        UserError: `progress` is something else.

    >>> type(resolve_progress(False)).__name__, type(resolve_progress(None, quiet=True)).__name__
    ('SilentProgress', 'SilentProgress')
    """
    if isinstance(progress, Progress):
        return progress
    if progress not in (None, True, False):
        raise UserError(f"progress must be True, False or a Progress, got {progress!r}")
    return build_terminal_progress(quiet=quiet or progress is False, lines=False, warns=True)
