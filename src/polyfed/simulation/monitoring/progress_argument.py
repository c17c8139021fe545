"""Checks the argument `progress` of `federate`, `resume` and `compare`, and finds the display that it asks for."""

from typing import Any

from polyfed.core.errors import UserError
from polyfed.simulation.monitoring.notebook import NotebookProgress, find_notebook_display
from polyfed.simulation.monitoring.progress import FunctionProgress, Progress, build_terminal_progress


def resolve_progress(progress: Any = None, *, quiet: bool = False) -> Progress:
    """Returns the progress display for the argument `progress` of `federate` or `resume`.

    That is `progress` itself, or a bar in a notebook or on a terminal if it is None or True, or nothing if it is False or
    `quiet` is True.

    Raises:
        UserError: `progress` is something else.

    >>> type(resolve_progress(False)).__name__, type(resolve_progress(quiet=True)).__name__
    ('SilentProgress', 'SilentProgress')
    >>> resolve_progress("bar")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: progress must be True, False, a Progress or a function of a round's record, got 'bar'
    """
    own_display = resolve_own_progress(progress, quiet=quiet)
    if own_display is not None:
        return own_display
    return build_terminal_progress(quiet=quiet or progress is False, prints_lines=False, warns=True)


def resolve_own_progress(progress: Any = None, *, quiet: bool = False) -> Progress | None:
    """Returns the display that a user gave, or that of a notebook; None on a terminal, and where nothing is shown.

    Args:
        progress: True, False, None, a `Progress`, or a function of a round's record.
        quiet: whether nothing is shown unless `progress` is a display.

    Raises:
        UserError: `progress` is something else.
    """
    if isinstance(progress, Progress):
        return progress
    if callable(progress) and not isinstance(progress, type):
        return FunctionProgress(progress)
    if progress is not None and not isinstance(progress, bool):
        cure = "; give an object of it" if isinstance(progress, type) else ""
        raise UserError(
            f"progress must be True, False, a Progress or a function of a round's record, got {progress!r}{cure}"
        )
    display = None if quiet or progress is False else find_notebook_display()
    return None if display is None else NotebookProgress(display)
