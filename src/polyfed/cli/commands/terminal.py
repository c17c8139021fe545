"""Prints tables and lines as plain text: no text is markup, and no control character reaches the terminal."""

from typing import Any, final

import rich.table
from rich.console import Console
from rich.text import Text

from polyfed.core.io.terminal_text import sanitise_for_terminal


def plain_text(value: Any) -> Any:
    """Returns text that rich does not read as markup; other renderables stay as they are.

    >>> plain_text("[/b]\\x1b[31m")
    <text '[/b]�[31m' [] ''>
    """
    return Text(sanitise_for_terminal(value)) if isinstance(value, str) else value


@final
class PlainTable(rich.table.Table):
    """A rich table of plain text: title, caption, headers and cells."""

    def __init__(self, *headers: str, title: str | None = None, caption: str | None = None, **options: Any) -> None:
        super().__init__(
            title=None if title is None else Text(sanitise_for_terminal(title), style="table.title"),
            caption=None if caption is None else Text(sanitise_for_terminal(caption), style="table.caption"),
            **options,
        )
        for header in headers:
            self.add_column(header)

    def add_column(self, header: Any = "", footer: Any = "", **options: Any) -> None:
        """Adds a column."""
        super().add_column(plain_text(header), plain_text(footer), **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Adds a row."""
        super().add_row(*map(plain_text, cells), **options)


def print_line(console: Console, sentence: object) -> None:
    """Prints a line, which the terminal may wrap."""
    console.print(Text(sanitise_for_terminal(sentence)), highlight=False, soft_wrap=True)
