"""Shows how far the runs of a comparison are: a bar with the time left on a terminal, a line for each run elsewhere, or
nothing.

Runs in processes of their own count their rounds in shared memory, which the bar reads.
"""

import sys
import time
from abc import ABC
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, final

from polyfed.core.io.text.number_format import format_time_left
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.simulation.monitoring.progress import Progress

if TYPE_CHECKING:
    from rich.console import RenderableType

_NOT_STARTED = -1
_SHOWN_RUNS = 4  # runs that are going on and have a line below the bar
_BAR_WIDTH = 30
_LOG_LINES = 5  # of a log about the runs of a comparison that takes no longer than a few minutes
_SECONDS_BETWEEN_LINES = 60  # after which a log has a line about the next run


@final
class RoundCounter(Progress):
    """Counts the finished rounds of one run where the comparison's display reads them; shows nothing itself.

    Args:
        counts: finished rounds of each run, in memory that processes share.
        position: of the run among them.
        display: shows what the run says; None in a process of its own, which says nothing.
    """

    def __init__(self, counts: MutableSequence[int], position: int, display: "RunsDisplay | None" = None) -> None:
        self._counts, self._position, self._display = counts, position, display

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Counts the rounds that were done before the run was resumed."""
        self._counts[self._position] = rounds_done

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Counts the round."""
        self._counts[self._position] = record["round"]

    def say(self, sentence: str) -> None:
        """Passes the sentence to the comparison's display, if the run is in its process."""
        if self._display is not None:
            self._display.say(sentence)


class RunsDisplay(ABC):
    """Counts the runs of a comparison and their rounds; a subclass decides what is shown.

    Runs of the search for hyper-parameters and runs that are compared are announced apart, since a search may be extended.
    """

    def __init__(self) -> None:
        self._expected, self._begun = {"search": 0, "compared": 0}, {"search": 0, "compared": 0}
        self._num_done, self._num_stored, self._rounds, self._start = 0, 0, 1, 0.0
        self._names: Sequence[str] = ()
        self._open: set[int] = set()
        self._counts: MutableSequence[int] = []
        self._stage, self._stage_start, self._num_steps, self._num_steps_done = "", 0.0, 0, 0

    def set_expected_runs(self, compared_runs: int, search_runs: int) -> None:
        """Announces how many runs the comparison has."""
        self._expected = {"search": search_runs, "compared": compared_runs}

    def announce_runs(
        self, names: Sequence[str], num_stored: int, rounds: int, *, is_search: bool
    ) -> MutableSequence[int]:
        """Announces the next runs by name, and returns the memory in which each counts its finished rounds.

        Args:
            names: of the runs that are trained now.
            num_stored: number of further runs that were finished before, and are only read.
            rounds: of each run.
            is_search: whether the runs belong to the search for hyper-parameters.
        """
        kind = "search" if is_search else "compared"
        self._begun[kind] += len(names) + num_stored
        self._expected[kind] = max(self._expected[kind], self._begun[kind])
        self._num_done, self._num_stored = self._num_done + num_stored, self._num_stored + num_stored
        self._open = set()  # last what the bar's thread follows to the others
        self._names, self._rounds = names, rounds
        self._counts = RawArray("i", [_NOT_STARTED] * len(names))
        self._open = set(range(len(names)))
        self._start = self._start or time.monotonic()
        return self._counts

    def finish_run(self, position: int, *, failed: bool) -> None:
        """Notes that the run at a position among those announced last is finished, or has failed."""
        self._open.discard(position)
        self._num_done += 1
        self.show_finished_run(self._names[position], failed=failed)

    def show_stage(self, text: str, num_steps: int = 0) -> None:
        """Shows what is computed when all runs are finished.

        Args:
            text: what it is.
            num_steps: the steps it has, each of which `finish_step` announces; 0 if they are not counted.
        """
        self._stage, self._stage_start = text, time.monotonic()
        self._num_steps, self._num_steps_done = num_steps, 0

    def finish_step(self, sentence: str) -> None:
        """Notes that a step of what is computed after all runs is finished, and says so."""
        self._num_steps_done += 1
        self.say(sentence)

    @property
    def num_runs(self) -> int:
        """Returns the number of runs of the whole comparison, as far as it is known."""
        return sum(self._expected.values())

    @property
    def num_done(self) -> int:
        """Returns the number of runs that are finished or have failed."""
        return self._num_done

    def share_done(self) -> float:
        """Returns the share of all rounds to be trained that are done, from 0 to 1."""
        to_train = (self.num_runs - self._num_stored) * self._rounds
        return min(1.0, self._rounds_trained() / to_train) if to_train else 1.0

    def seconds_left(self) -> float | None:
        """Estimates the seconds until all runs, then all steps of the stage are finished; None if not known."""
        if self._stage:
            done, left = self._num_steps_done, self._num_steps - self._num_steps_done
            return (time.monotonic() - self._stage_start) * left / done if done and left else None
        share = self.share_done()
        return (time.monotonic() - self._start) * (1 - share) / share if self._rounds_trained() else None

    def list_running_runs(self) -> list[str]:
        """Returns the names of the runs that are going on, each with its round."""
        return [
            f"{self._names[k]}: round {min(self._counts[k] + 1, self._rounds)} of {self._rounds}"
            for k in sorted(self._open.copy())
            if self._counts[k] != _NOT_STARTED
        ]

    def _rounds_trained(self) -> int:
        finished = (self._num_done - self._num_stored) * self._rounds
        return finished + sum(max(0, self._counts[k]) for k in self._open.copy())

    def show_finished_run(self, name: str, *, failed: bool) -> None:
        """Shows that a run is finished."""
        return

    def say(self, sentence: str) -> None:
        """Shows a sentence to the user."""
        return

    def close(self) -> None:
        """Ends the display, with or without an error."""
        return


@final
class SilentRunsDisplay(RunsDisplay):
    """Shows nothing."""


@final
class RunLines(RunsDisplay):
    """Prints lines for a log file: at each fifth of the runs, each minute, and each failed run."""

    def __init__(self) -> None:
        super().__init__()
        self._num_parts_shown, self._last_line = 0, time.monotonic()

    def show_finished_run(self, name: str, *, failed: bool) -> None:
        """Prints how many runs are finished, and the time left, if a line is due."""
        num_parts = self.num_done * _LOG_LINES // self.num_runs
        if not failed and num_parts <= self._num_parts_shown and not self._is_line_due(self.num_done == self.num_runs):
            return
        self._num_parts_shown = num_parts
        time_left = format_time_left(self.seconds_left()) if self.num_done < self.num_runs else ""
        how_far = f"{self.num_done} of {self.num_runs} runs{', ' if time_left else ''}{time_left}"
        self.say(f"{name}: {'failed' if failed else 'done'} ({how_far})")

    def finish_step(self, sentence: str) -> None:
        """Counts the step; says so if it is the last one, or if a line is due."""
        self._num_steps_done += 1
        if self._is_line_due(self._num_steps_done >= self._num_steps):
            self.say(sentence)

    def _is_line_due(self, is_last: bool) -> bool:
        return is_last or time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES

    def say(self, sentence: str) -> None:
        """Prints the sentence as a line."""
        self._last_line = time.monotonic()
        print(sanitise_for_terminal(sentence), file=sys.stderr, flush=True)


@final
class ProgressRunsDisplay(RunsDisplay):
    """Passes finished runs and sentences to the `Progress` that the user gave, or to that of a notebook."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def show_finished_run(self, name: str, *, failed: bool) -> None:
        """Passes on which run is finished, and how many are."""
        sentence = f"{name}: {'failed' if failed else 'done'} ({self.num_done} of {self.num_runs} runs)"
        self._progress.finish_run(sentence, self.num_done, self.num_runs)

    def say(self, sentence: str) -> None:
        """Passes the sentence on."""
        self._progress.say(sentence)


@final
class RunsBar(RunsDisplay):
    """Shows a bar on the terminal with the runs done and the time left, and below it the runs that are going on."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._live = Live(
            get_renderable=self.render, console=Console(stderr=True), transient=True, refresh_per_second=4
        )
        self._live.start()

    def render(self) -> "RenderableType":
        """Returns the lines that the terminal shows now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self.num_runs:
            return Text("checking clients and methods")
        grid = Table.grid(padding=(0, 1))
        parts = (f"{self.num_done} of {self.num_runs} runs", self._time_left())
        grid.add_row(
            Text("comparing"), ProgressBar(1.0, self.share_done(), width=_BAR_WIDTH), *(Text(part) for part in parts)
        )
        steps = f": {self._num_steps_done} of {self._num_steps}" if self._num_steps else ""
        below = [self._stage + steps] if self._stage else self.list_running_runs()[:_SHOWN_RUNS]
        lines = [
            Text(f"  {sanitise_for_terminal(line)}", no_wrap=True, overflow="ellipsis", style="dim") for line in below
        ]
        return Group(grid, *lines)

    def _time_left(self) -> str:
        # All rounds are done, and what follows has no end yet.
        is_saving = self.num_done == self.num_runs and not self._stage
        return "" if is_saving else format_time_left(self.seconds_left())

    def show_finished_run(self, name: str, *, failed: bool) -> None:
        """Prints a line above the bar if the run failed; the bar itself shows the others."""
        if failed:
            self.say(f"{name}: failed")

    def finish_step(self, sentence: str) -> None:
        """Counts the step below the bar."""
        self._num_steps_done += 1

    def say(self, sentence: str) -> None:
        """Prints the sentence above the bar."""
        self._live.console.print(sanitise_for_terminal(sentence), markup=False, highlight=False)

    def close(self) -> None:
        """Removes the bar from the terminal."""
        self._live.stop()


@contextmanager
def open_runs_display(progress: Progress | None = None, *, quiet: bool) -> Iterator[RunsDisplay]:
    """Yields `progress`, or a bar on a terminal, lines elsewhere, nothing if `quiet`; ends it afterwards."""
    display: RunsDisplay
    if progress is not None:
        display = ProgressRunsDisplay(progress)
    else:
        display = SilentRunsDisplay() if quiet else RunsBar() if sys.stderr.isatty() else RunLines()
    try:
        yield display
    finally:
        display.close()
