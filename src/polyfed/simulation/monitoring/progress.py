"""Shows the progress of a run: a bar on a terminal, plain lines elsewhere, a function's answer to it, or nothing."""

import math
import sys
import time
import warnings
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, TextIO, final

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metrics import default_metric_names, metric_by_name
from polyfed.core.io.text.number_format import format_bytes, format_number, format_time_left
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.simulation.monitoring.update_directions import update_bound_sentences
from polyfed.simulation.monitoring.update_norms import norms_by_client

_MOST_LINES = 100  # of a log about one run


class Progress(ABC):
    """Shows the progress of a run to the user, on standard error; a subclass overrides the methods for what it shows."""

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Starts the display, when a run begins (`rounds_done` is 0) or resumes after `rounds_done` rounds."""
        return

    def show_clients_done(self, phase: str, clients_done: int, total: int) -> None:
        """Shows how many clients have finished in the current round."""
        return

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Shows that a round is complete; `record` is the round's record in `metrics.jsonl`."""
        return

    def say(self, sentence: str) -> None:
        """Shows a sentence to the user."""
        return

    def warn(self, sentence: str) -> None:
        """Draws attention to a serious problem, for example by an alert; the caller also shows the sentence with `say`."""
        return

    def finish_run(self, sentence: str, runs_done: int, total: int) -> None:
        """Shows that a run of a comparison has finished; by default with `say`.

        Args:
            sentence: says which run has finished, and how many have.
            runs_done, total: how many runs have finished, of how many.
        """
        self.say(sentence)

    def for_another_process(self) -> "Progress":
        """Returns the display for a comparison's run in a process of its own; here a silent one."""
        return SilentProgress()

    def stop(self) -> None:
        """Ends the display when the run has ended, with or without an error."""
        return


def _mean_score(record: Mapping[str, Any]) -> str:
    """Formats a round's mean score over clients, in the metric that decides; returns "" if the round has no score."""
    for score in [record["score"]] if "score" in record else default_metric_names():
        if score in record.get("summary", {}):
            return f"{score} {_format_mean(record['summary'][score]['mean'], score)}"
    return ""


def _format_mean(mean: float, score: str) -> str:
    """Formats a mean score: shares in per cent, others as a number; the user's own metrics too."""
    try:
        unit = metric_by_name(score).unit
    except UserError:
        unit = ""
    return format_number(mean, unit)


def _format_traffic(record: Mapping[str, Any]) -> str:
    """Formats the bytes sent and received so far."""
    return format_bytes(record["bytes_down_total"] + record["bytes_up_total"])


def describe_score_and_traffic(record: Mapping[str, Any], separator: str = ", ") -> str:
    """Returns a round's mean score over clients, if it has one, and the traffic so far, as text."""
    return separator.join(part for part in (_mean_score(record), _format_traffic(record)) if part)


@final
class SilentProgress(Progress):
    """Shows no progress; can turn serious problems into Python warnings.

    Args:
        warns: whether serious problems become Python warnings, since nothing else shows them.
    """

    def __init__(self, *, warns: bool = False) -> None:
        self._warns = warns

    def warn(self, sentence: str) -> None:
        """Emits a Python warning if `warns` is True."""
        if self._warns:
            warnings.warn(sentence, RuntimeWarning, stacklevel=5)


@final
class FunctionProgress(Progress):
    """Calls a user's function with the record of each round, in place of a display.

    Args:
        function: gets the round's record, as in `metrics.jsonl`; what it returns is ignored.
    """

    def __init__(self, function: Callable[[Mapping[str, Any]], Any]) -> None:
        self._function = function

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Calls the function with the record of the round."""
        self._function(record)

    def warn(self, sentence: str) -> None:
        """Emits a Python warning, since nothing else shows the problem."""
        warnings.warn(sentence, RuntimeWarning, stacklevel=5)

    def for_another_process(self) -> Progress:
        """Returns this object: the function is called in the process of the run."""
        return self


@final
class LineProgress(Progress):
    """Prints one line for each round, or a hundred for all of more rounds, suitable for a log file.

    Args:
        stream: where to print; None is standard error.
        norms: whether to print the norm of each client's update in a further line, where it is known; then each round
            has its line.
    """

    def __init__(self, stream: TextIO | None = None, *, norms: bool = False) -> None:
        self._stream, self._norms = stream or sys.stderr, norms
        self._title, self._rounds, self._done, self._start = "", 0, 0, 0.0

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Stores the time at which the run began, from which the remaining time is estimated."""
        self._title, self._rounds, self._done, self._start = title, rounds, rounds_done, time.monotonic()

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Prints a line with the round, mean score, traffic and remaining time; a hundred lines of more rounds."""
        is_printed = (
            record["round"] in (1, self._rounds) or record["round"] % math.ceil(self._rounds / _MOST_LINES) == 0
        )
        if not (is_printed or self._norms):
            return
        rounds_played = record["round"] - self._done
        seconds_left = (time.monotonic() - self._start) / rounds_played * (self._rounds - record["round"])
        parts = [f"{self._title}: round {record['round']}/{self._rounds}"]
        if record["train_loss"] is not None:
            parts.append(f"train loss {record['train_loss']:.3f}")
        parts += [
            _mean_score(record),
            _format_traffic(record),
            f"{record['seconds']:.2f} s",
            format_time_left(seconds_left),
        ]
        print(sanitise_for_terminal(", ".join(part for part in parts if part)), file=self._stream, flush=True)
        if self._norms and (norm_by_client := norms_by_client(record)):
            listed = ", ".join(f"{client} {norm:.4g}" for client, norm in sorted(norm_by_client.items()))
            self.say(f"round {record['round']}: norms of updates: {listed}")
        for sentence in update_bound_sentences(record) if self._norms else ():
            self.say(f"round {record['round']}: {sentence}")

    def say(self, sentence: str) -> None:
        """Prints the sentence as a line."""
        print(sanitise_for_terminal(sentence), file=self._stream, flush=True)


@final
class ProgressBar(Progress):
    """Shows a progress bar on a terminal: rounds, clients done, mean score, traffic and remaining time."""

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
        """Shows the bar with `rounds_done` of `rounds` rounds done."""
        self._bar.update(self._task, description=sanitise_for_terminal(title), total=rounds, completed=rounds_done)
        self._bar.start()

    def show_clients_done(self, phase: str, clients_done: int, total: int) -> None:
        """Shows how many clients have finished in the current round."""
        self._bar.update(self._task, state=f"{phase} {clients_done}/{total} clients  {self._summary}")

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Advances the bar by one round, and shows the round's mean score and traffic."""
        self._summary = describe_score_and_traffic(record, "  ")
        self._bar.update(self._task, completed=record["round"], state=self._summary)

    def say(self, sentence: str) -> None:
        """Prints the sentence above the bar."""
        self._bar.console.print(sanitise_for_terminal(sentence), markup=False, highlight=False)

    def stop(self) -> None:
        """Removes the bar from the terminal."""
        self._bar.stop()


def build_terminal_progress(*, quiet: bool = False, prints_lines: bool = True, warns: bool = False) -> Progress:
    """Builds the display: a bar on a terminal, else lines if `prints_lines`, or nothing.

    Args:
        quiet: shows nothing at all.
        prints_lines: whether to print lines where there is no terminal.
        warns: as for `SilentProgress`.
    """
    if quiet:
        return SilentProgress()
    if sys.stderr.isatty():
        return ProgressBar()
    return LineProgress() if prints_lines else SilentProgress(warns=warns)
