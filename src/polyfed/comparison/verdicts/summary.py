"""Shows a comparison in a notebook: its sentences and a table of methods as HTML."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.io.text.number_format import format_number, mean_label_of
from polyfed.simulation.results.display.notebook_html import notebook_html


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
