"""Prints errors and warnings: one line in a log; for a terminal a long one has lines of its own for why and for hints."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable

from polyfed.core.io.text.advice import keep_advice_for_terminal
from polyfed.core.io.text.terminal_text import sanitise_for_terminal

_LONG = 200  # characters from which on a message has several lines, or from two lines of the terminal on
_END_OF_CLAUSE = re.compile(r"; (?:besides, )?|: (?=did you mean|give |leave it out)|(?<=[.?]) (?=[A-Z])")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_ADVICE = re.compile(
    r"(?:if [^,;]+, |otherwise |or, )?(?:to [^,;]+, )?(?:did you mean|give|leave|choose|fill|take|put|drop|write|name|save|"
    r"unpack|rename|make|close|end|try|install|correct|look|pip|add|use|set|keep|a partition)\b",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"(?<!\()\bpolyfed [a-z]|\bpip install|`")


def print_error_and_return_status(message: object, status: int) -> int:
    """Prints an error on standard error, and returns `status`, the exit status of the command."""
    print(_format_message("polyfed: ", message), file=sys.stderr)
    return status


def build_warning_formatter() -> Callable[..., str]:
    """Returns a function that formats a warning, and one that it has formatted before as nothing.

    Python itself repeats a warning after each `warnings.catch_warnings`.

    >>> format_warning = build_warning_formatter()
    >>> format_warning("3 rows are copies", UserWarning), format_warning("3 rows are copies", UserWarning)
    ('polyfed: warning: 3 rows are copies\\n', '')
    """
    known_texts = set[str]()

    def format_warning(message: Warning | str, *_: object, **__: object) -> str:
        text = f"{_format_message('polyfed: warning: ', message)}\n"
        is_new = text not in known_texts
        known_texts.add(text)
        return text if is_new else ""

    return format_warning


def _format_message(prefix: str, message: object) -> str:
    text = prefix + sanitise_for_terminal(keep_advice_for_terminal(" ".join(str(message).split())))
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return text if len(text) <= min(_LONG, 2 * width) else break_message_into_lines(text, width)


def break_message_into_lines(text: str, width: int) -> str:
    """Returns a long message with a line for each clause, wrapped at `width`; advice is marked as a hint.

    A clause with a command is not wrapped, so that the command can be copied.

    >>> print(break_message_into_lines("polyfed: rows.csv is empty; no row (a; b) has a label; give another file", 40))
    polyfed: rows.csv is empty
      no row (a; b) has a label
      hint: give another file
    """
    first, *others = split_into_clauses(text)
    lines = [first, *(f"  {'hint: ' if _ADVICE.match(clause) else ''}{clause}" for clause in others)]
    return "\n".join(
        line
        if _COMMAND.search(line.removeprefix("polyfed: "))
        else textwrap.fill(
            line, max(width, 40), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    )


def split_into_clauses(text: str) -> list[str]:
    """Splits a message at semicolons and at the ends of sentences, outside of parentheses.

    >>> split_into_clauses("no 'x'; give y (a; b). Or z")
    ["no 'x'", 'give y (a; b).', 'Or z']
    """
    clauses, start = [], 0
    for end in _END_OF_CLAUSE.finditer(text):
        clause = text[start : end.start()]
        if all(clause.count(opening) == clause.count(closing) for opening, closing in _BRACKETS.items()):
            clauses.append(clause)
            start = end.end()
    return [*clauses, text[start:]]
