"""Shows the progress of runs in a Jupyter notebook: a bar that is updated in place, and sentences below it."""

import html
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from polyfed.core.io.text.number_format import format_time_left
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.simulation.monitoring.progress import Progress, describe_score_and_traffic

_MOST_SENTENCES = 20  # below the bar; the first of more are left out
_SECONDS_BETWEEN_UPDATES = 0.2  # a notebook that is updated at each client would be slow

Display = Callable[..., Any]  # IPython's `display`


def find_notebook_display() -> Display | None:
    """Returns the function with which a Jupyter kernel shows objects in a cell; None outside of a notebook.

    IPython is not imported: in a notebook it is loaded already.

    >>> find_notebook_display() is None
    True
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:  # none, or a terminal
        return None
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    function: Display = display
    return function


@final
class NotebookBar:
    """Holds what a cell shows of a run: the bar, and sentences below it."""

    def __init__(self) -> None:
        self.text, self.done, self.total = "", 0, 0
        self.sentences: list[str] = []

    def __repr__(self) -> str:
        return "\n".join([self.text, *self.sentences])

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{html.escape(sentence)}</div>" for sentence in self.sentences)
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}" style="width: 20em"></progress>'
        return f"<div>{bar} {html.escape(self.text)}</div>{lines}"


@final
class NotebookProgress(Progress):
    """Shows a progress bar in a cell of a notebook: rounds, clients done, mean score, traffic and remaining time.

    Args:
        display: IPython's function `display`.
    """

    def __init__(self, display: Display) -> None:
        self._display, self._bar = display, NotebookBar()
        self._handle: Any = None
        self._title, self._summary, self._first_round, self._shown = "", "", 0, 0.0
        self._began = time.monotonic()

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Shows the bar with `rounds_done` of `rounds` rounds done."""
        self._title, self._summary, self._first_round = sanitise_for_terminal(title), "", rounds_done
        self._began = time.monotonic()
        self._bar.total = rounds
        self._show_round(rounds_done, "")

    def show_clients_done(self, phase: str, clients_done: int, total: int) -> None:
        """Shows how many clients have finished in the current round, at most five times in a second."""
        if time.monotonic() - self._shown > _SECONDS_BETWEEN_UPDATES:
            self._show_round(self._bar.done, f"{phase} {clients_done}/{total} clients")

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Advances the bar by one round, and shows the round's mean score and traffic and the remaining time."""
        num_rounds = record["round"] - self._first_round
        seconds_left = (time.monotonic() - self._began) / max(num_rounds, 1) * (self._bar.total - record["round"])
        self._summary = f"{describe_score_and_traffic(record)}, {format_time_left(seconds_left)}"
        self._show_round(record["round"], "")

    def finish_run(self, sentence: str, runs_done: int, total: int) -> None:
        """Shows how many runs of a comparison have finished and the remaining time; keeps the sentence of a failed one."""
        self._bar.done, self._bar.total = runs_done, total
        seconds_left = (time.monotonic() - self._began) / runs_done * (total - runs_done)
        time_left = f", {format_time_left(seconds_left)}" if runs_done < total else ""
        self._bar.text = f"{runs_done} of {total} runs{time_left}"
        if ": failed (" in sentence:
            self.say(sentence)
        else:
            self._update()

    def say(self, sentence: str) -> None:
        """Shows a sentence below the bar."""
        self._bar.sentences = [*self._bar.sentences, sanitise_for_terminal(sentence)][-_MOST_SENTENCES:]
        self._update()

    def stop(self) -> None:
        """Shows the last state of the bar, which stays in the cell."""
        if self._handle is not None:
            self._update()

    def _show_round(self, number: int, activity: str) -> None:
        self._bar.done = number
        parts = [f"{self._title}: round {number}/{self._bar.total}", activity, self._summary]
        self._bar.text = ", ".join(part for part in parts if part)
        self._update()

    def _update(self) -> None:
        self._shown = time.monotonic()
        if self._handle is None:
            self._handle = self._display(self._bar, display_id=True)
        else:
            self._handle.update(self._bar)
