"""Prints tables and lines as plain text: markup in a text has no effect, and control characters are removed."""

import json
import sys
from collections.abc import Mapping
from typing import Any, final

import rich.table
from rich.console import Console
from rich.text import Text

from polyfed.core.io.text.advice import keep_advice_for_terminal
from polyfed.core.io.text.terminal_text import sanitise_for_terminal


def literal_rich_text_if_str(value: Any) -> Any:
    """Converts a text so that `rich` prints it without markup; other values are unchanged.

    >>> literal_rich_text_if_str("[/b]\\x1b[31m")
    <text '[/b]�[31m' [] ''>
    """
    return Text(sanitise_for_terminal(value)) if isinstance(value, str) else value


@final
class PlainTable(rich.table.Table):
    """Holds a table of the package `rich` that prints all of its texts literally, without interpreting markup."""

    def __init__(self, *headers: str, title: str | None = None, caption: str | None = None, **options: Any) -> None:
        super().__init__(
            title=None if title is None else Text(sanitise_for_terminal(title), style="table.title"),
            caption=None if caption is None else Text(sanitise_for_terminal(caption), style="table.caption"),
            **options,
        )
        for header in headers:
            self.add_column(header)

    def add_column(self, header: Any = "", footer: Any = "", **options: Any) -> None:
        """Adds a column to the table; its header and footer are printed literally."""
        super().add_column(literal_rich_text_if_str(header), literal_rich_text_if_str(footer), **options)

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Adds a row to the table; its cells are printed literally."""
        super().add_row(*map(literal_rich_text_if_str, cells), **options)


def print_line(console: Console, sentence: object, style: str = "") -> None:
    """Prints a line of text literally, in a style of the package `rich`; the terminal may wrap it.

    Where it names an argument of Python and the option that does the same, the option alone is printed.
    """
    text = sanitise_for_terminal(keep_advice_for_terminal(str(sentence)))
    console.print(Text(text, style), highlight=False, soft_wrap=True)


def print_json(content: Mapping[str, Any]) -> None:
    """Prints an object, and nothing else, as JSON on standard output, with escapes for other alphabets."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(content, indent=1, ensure_ascii=not is_utf8, allow_nan=False))
