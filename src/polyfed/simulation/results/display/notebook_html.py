"""Builds the short HTML that a notebook shows of a run or a comparison: a heading, sentences and a table."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.io.text.number_format import NumberUnit, count_with_noun, format_number
from polyfed.core.io.text.terminal_text import sanitise_for_terminal

_MOST_ROWS = 20  # of a table in a cell


def notebook_html(
    heading: str,
    sentences: Mapping[str, Sequence[str]],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    more: str = "row",
) -> str:
    """Returns HTML with a heading, lists of sentences, and a table of at most twenty rows; all text is escaped.

    Args:
        heading: one line.
        sentences: shown as a list below each title; titles without any are left out.
        columns: headings of the columns.
        rows: of text, one entry per column.
        more: the noun for rows that are left out.

    >>> notebook_html("Run", {}, ["client"], [["<b>"]])
    '<div><p><b>Run</b></p><table><thead><tr><th>client</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table></div>'
    """
    listed = "".join(
        f"<p>{_escape_html(title)}</p><ul>{''.join(f'<li>{_escape_html(sentence)}</li>' for sentence in group)}</ul>"
        for title, group in sentences.items()
        if group
    )
    head = "".join(f"<th>{_escape_html(column)}</th>" for column in columns)
    printed_rows = rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 1], rows[-1]]
    body = "".join("<tr>" + "".join(f"<td>{_escape_html(cell)}</td>" for cell in row) + "</tr>" for row in printed_rows)
    left_out = len(rows) - len(printed_rows)
    note = f"<p>{count_with_noun(left_out, more)} left out; table() has all.</p>" if left_out else ""
    return (
        f"<div><p><b>{_escape_html(heading)}</b></p>{listed}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}</div>"
    )


def run_html(
    heading: str, remarks: Sequence[str], table: Sequence[Mapping[str, Any]], units: Mapping[str, NumberUnit]
) -> str:
    """Returns HTML with a heading, remarks, and the scores of a run's clients and their means.

    Args:
        heading: one line about the run.
        remarks: sentences on clients that failed, and warnings.
        table: rows of a dict each, such as `Run.table` returns.
        units: of the metrics, by their names; other columns are numbers.
    """
    columns = list(table[0]) if table else []
    rows = [[_format_cell(column, row[column], units) for column in columns] for row in table]
    return notebook_html(heading, {"Look at this first:": remarks}, columns, rows, "client")


def _format_cell(column: str, value: Any, units: Mapping[str, NumberUnit]) -> str:
    if isinstance(value, str):
        return value
    if column == "num_examples":
        return format_number(value, "count")
    return format_number(value, unit_of_column(column, units))


def unit_of_column(column: str, units: Mapping[str, NumberUnit]) -> NumberUnit:
    """Returns the unit of a column of scores: that of its metric, which a prefix may precede; "" for no metric.

    >>> unit_of_column("val_accuracy", {"accuracy": "%"}), unit_of_column("loss", {"accuracy": "%"})
    ('%', '')
    """
    return next((unit for name, unit in units.items() if column == name or column.endswith(f"_{name}")), "")


def _escape_html(text: str) -> str:
    return html.escape(sanitise_for_terminal(text))
