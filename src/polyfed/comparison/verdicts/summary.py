"""Shows a comparison in a notebook: its sentences and a table of methods as HTML, and its answers as a plot."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import format_number, mean_label_of
from polyfed.simulation.results.display.notebook_html import notebook_html
from polyfed.simulation.results.display.plots import plot_intervals


def comparison_html(
    heading: str, sentences: Mapping[str, Sequence[str]], results: Mapping[str, Any], table: Sequence[Mapping[str, Any]]
) -> str:
    """Returns HTML with the warnings and answers of a comparison, and its methods with their mean scores and gains.

    Args:
        heading: one line about the comparison.
        sentences: the warnings and the answers, each below their title.
        results: the content of `comparison.json`.
        table: a row per method, as `Comparison.table` returns it.
    """
    unit = results.get("score_unit", "")
    rows = [
        [
            row["method"],
            format_number(row["mean"], unit),
            _format_ends(row["low"], row["high"], unit),
            format_number(row["gain"], unit, signed=True),
            _format_ends(row["gain_low"], row["gain_high"], unit, signed=True),
            format_number(row["worst"], unit),
            format_number(row["megabytes"]),
        ]
        for row in table
    ]
    columns = ("method", mean_label_of(results.get("score_label", "score")), "interval", "gain", "interval of the gain",
               "worst client", "MB")  # fmt: skip
    return notebook_html(heading, sentences, columns, rows, "method")


def _format_ends(low: float | None, high: float | None, unit: Any, signed: bool = False) -> str:
    return "–" if low is None else f"{format_number(low, unit, signed)} to {format_number(high, unit, signed)}"


def plot_comparison(
    results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], table: Sequence[Mapping[str, Any]], ax: Any
) -> Any:
    """Draws the answers' gains with their intervals, or without any gain the methods' mean scores; returns the axes.

    Args:
        results: the content of `comparison.json`.
        answers: as `Comparison.answer_table` returns them.
        table: a row per method, as `Comparison.table` returns it.
        ax: axes to draw into; None makes new ones.

    Raises:
        UserError: no method has a score.
    """
    unit, label = results.get("score_unit", ""), results.get("score_label", "score")
    level = f"{100 * results.get('level', 0.95):.0f} % interval"
    rows = [(f"{row['client']}: {row['method']}", row["gain"], row) for row in answers if row["gain"] is not None]
    has_gains = bool(rows)
    title, axis = f"gain over the best alone, with its {level}", f"gain in {'points of ' * (unit == '%')}{label}"
    if not has_gains:
        rows = [(row["method"], row["mean"], row) for row in table if row["mean"] is not None]
        title, axis = f"mean over clients, with its {level}", f"{label}{' (%)' * (unit == '%')}"
    if not rows:
        raise UserError("no method of this comparison has a score that could be drawn")
    entries = [(name, value, None if row["low"] is None else (row["low"], row["high"])) for name, value, row in rows]
    return plot_intervals(entries, unit, axis, title, draws_zero_line=has_gains, ax=ax)
