"""Writes the HTML page of a run or comparison from Python."""

from importlib import import_module
from pathlib import Path

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path


def write_page_of(folder: Path | None, out: str | Path | None) -> Path:
    """Writes the HTML page of a run or comparison directory, as `polyfed report` does but without printing, and returns
    its path; raises a `UserError` if `folder` is None.

    Args:
        folder: of the run or comparison; None if it was kept in memory.
        out: the page; None for `report.html` in `folder`.

    Raises:
        UserError: `folder` is None, or the page cannot be written.

    >>> write_page_of(None, None)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a page is made from a directory, and this was kept in memory; give out="DIR" when you
    train or compare
    """
    if folder is None:
        raise UserError(
            'a page is made from a directory, and this was kept in memory; give out="DIR" when you train or compare'
        )
    report_command = import_module("polyfed.cli.commands.results.report_command")  # above this room, hence by name
    page: Path = report_command.write_report_quietly(folder, None if out is None else expand_user_path(out, "out"))
    return page
