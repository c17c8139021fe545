"""Prints the answers of a comparison in about ten lines: who should join, with what gain, and how to go on."""

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.comparison.verdicts.answer_lines import ANSWER_WORDS, MAX_CLIENTS, build_answer_lines
from polyfed.core.io.text.site_words import say_sites_of
from polyfed.core.io.text.terminal_text import sanitise_for_terminal

_STYLES = {"join": "bold green", "stay": "bold magenta", "undecided": "yellow"}
_LOG_WIDTH = 1000


def print_answers(
    results: Mapping[str, Any], out: Path | None, console: Console, *, max_sites: int | None = MAX_CLIENTS
) -> None:
    """Prints a comparison's warnings, the answers for mean and sites, and commands that show more.

    Args:
        results: the content of `comparison.json`.
        out: the comparison's directory; None if it was kept in memory.
        console: where to print.
        max_sites: of more sites the rest is counted; None for all.
    """
    say_sites = partial(say_sites_of, results.get("clients") or ())
    for sentence in results.get("warnings") or ():
        print_line(console, say_sites(sentence), style="yellow")
    lines = build_answer_lines(results, max_sites)
    if lines is not None:
        print_line(console, lines.heading, style="bold")
        table = PlainTable(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for kind, name, text in lines.rows:
            table.add_row(Text(ANSWER_WORDS[kind], _STYLES[kind]), name, text)
        # In a terminal a long answer continues below its beginning, in a log each has one line.
        (console if console.is_terminal else Console(file=console.file, width=_LOG_WIDTH)).print(table)
        if len(lines.rows) == 1 and not results.get("same_clients", True):
            text = "No answers by client: each seed gives the clients other data (--same-data, --folds 5)"
            print_line(console, say_sites(text))
        if lines.rest:
            print_line(console, f"{lines.rest} (polyfed show)")
    if out is not None:
        print_next_commands(console, Page=["report", str(out)], Tables=["show", str(out)])


def print_next_commands(console: Console, **commands: list[str]) -> None:
    """Prints the commands with which to go on in one line, each with a word that says what it gives.

    >>> print_next_commands(Console(width=80), Page=["report", "runs/a b"])
    Page: polyfed report 'runs/a b'
    """
    texts = [
        f"{purpose}: {shlex.join(['polyfed', *map(sanitise_for_terminal, words)])}"
        for purpose, words in commands.items()
    ]
    print_line(console, "   ".join(texts), style="cyan")
