"""Prints the answers of a comparison in about ten lines: who should join, with what gain, and how to go on."""

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.io.site_words import say_sites_of
from polyfed.core.io.terminal_text import sanitise_for_terminal

_WORDS = {"join": "join", "stay": "stay alone", "undecided": "not decided"}
_STYLES = {"join": "bold green", "stay": "bold magenta", "undecided": "yellow"}
_MAX_SITES = 8
_LOG_WIDTH = 1000
_MOST_DIGITS = 6  # after the decimal point


def print_answers(
    results: Mapping[str, Any], out: Path | None, console: Console, *, max_sites: int | None = _MAX_SITES
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
    mean, sites = results.get("mean_answer"), list(results.get("answers") or ())
    if mean is not None:
        points = "points of " if results["score_unit"] == "%" else ""
        level = f"{100 * results['level']:.0f} % interval"
        print_line(console, f"Gain in {points}{results['score_label']} on new examples, with its {level}", style="bold")
        ranked = sorted(sites, key=lambda row: (row["answer"] == "undecided", -(row["gain"] or 0.0), row["client"]))
        table = PlainTable(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for row in (mean, *ranked[:max_sites]):
            name = say_sites("mean over clients") if row["client"] is None else row["client"]
            table.add_row(
                Text(_WORDS[row["answer"]], _STYLES[row["answer"]]),
                name,
                say_sites(describe_answer(row, results["score_unit"], results.get("reference"))),
            )
        # In a terminal a long answer continues below its beginning, in a log each has one line.
        (console if console.is_terminal else Console(file=console.file, width=_LOG_WIDTH)).print(table)
        if not sites and not results.get("same_clients", True):
            text = "No answers by client: each seed gives the clients other data (--same-data, --folds 5)"
            print_line(console, say_sites(text))
        if max_sites is not None and (hidden := ranked[max_sites:]):
            counts = {word: sum(row["answer"] == word for row in hidden) for word in _WORDS}
            noun = say_sites("clients")
            text = ", ".join(f"{n} {noun}: {_WORDS[word]}" for word, n in counts.items() if n)
            print_line(console, f"and {text} (polyfed show)")
    if out is not None:
        print_next_commands(console, Page=["report", str(out)], Tables=["show", str(out)])


def describe_answer(row: Mapping[str, Any], unit: str, reference: str | None = "local") -> str:
    """Describes an answer's gain in a few words; of one without a usable interval the reason.

    >>> describe_answer({"answer": "join", "method": "fedavg", "gain": 0.041, "interval": [0.01, 0.062],
    ...                  "over": "local", "sentence": ""}, "%")
    'fedavg +4.1 [+1.0, +6.2] over training alone'
    >>> describe_answer({"answer": "undecided", "method": "fedavg", "gain": None, "interval": None,
    ...                  "over": "local", "sentence": "north: not decided: no predictions were kept (9 test examples)"}, "%")
    'no predictions were kept (9 test examples)'
    """
    reason = str(row["sentence"]).partition("not decided: ")[2]
    if row["gain"] is None or row["interval"] is None or ("(best estimate " not in row["sentence"] and reason):
        return reason
    low, high = (_format_gain(end, unit) for end in row["interval"])
    more = row["sentence"].rpartition("); ")
    doubt = f"; {more[2]}" if row["answer"] == "undecided" and more[1] else ""
    over = row.get("over", reference)
    rival = "training alone" if over == reference else f"{str(over).replace('_', ' ')} alone"
    return f"{row['method']} {_format_gain(row['gain'], unit)} [{low}, {high}] over {rival}{doubt}"


def _format_gain(value: float, unit: str) -> str:
    """Formats a gain with its sign, with more digits where the usual number of digits would show 0.

    >>> [_format_gain(gain, "%") for gain in (0.041, 0.0003, 0.0)]
    ['+4.1', '+0.03', '+0.0']
    """
    scaled, digits = (100 * value, 1) if unit == "%" else (value, 3)
    while scaled and not round(scaled, digits) and digits < _MOST_DIGITS:
        digits += 1
    return f"{scaled + 0.0:+.{digits}f}"


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
