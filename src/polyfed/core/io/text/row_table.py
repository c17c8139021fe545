"""Defines `RowTable`, a list of dicts that is printed as a table."""

from collections.abc import Sequence
from typing import Any, final

from polyfed.core.io.text.number_format import format_three_significant_digits


@final
class RowTable(list[dict[str, Any]]):
    """Holds the rows of a table as dicts, a list in every way; `print` shows them in columns, numbers with three digits.

    Numbers of a column have equally many decimals where they are below 100, and four at most.

    >>> print(RowTable([{"client": "north", "auc": 0.8125, "loss": None}, {"client": "mean", "auc": 0.8, "loss": 1.0}]))
    client    auc  loss
    north   0.812     –
    mean    0.800     1
    """

    def __str__(self) -> str:
        columns = list(dict.fromkeys(name for row in self for name in row))
        cells_by_column = [_format_column([row.get(name) for row in self]) for name in columns]
        lines = [columns, *map(list, zip(*cells_by_column, strict=True))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            [cells[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(cells[1:], widths[1:], strict=True))]
            for cells in lines
            if cells
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _format_column(values: Sequence[Any]) -> list[str]:
    texts = [_format_cell(value) for value in values]
    decimals = [
        len(text.partition(".")[2]) if isinstance(value, float) and "e" not in text else 0
        for value, text in zip(values, texts, strict=True)
    ]
    common = min(4, max(decimals, default=0))
    return [
        f"{value:.{max(number, common)}f}"
        if isinstance(value, float) and abs(value) < 100 and "e" not in text
        else text
        for value, text, number in zip(values, texts, decimals, strict=True)
    ]


def _format_cell(value: Any) -> str:
    if value is None:
        return "–"
    return format_three_significant_digits(value) if isinstance(value, float) else str(value)
