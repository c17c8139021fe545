"""Defines `RowTable`, a list of dicts that is printed as a table."""

from typing import Any, final

from polyfed.core.io.text.number_format import format_three_significant_digits


@final
class RowTable(list[dict[str, Any]]):
    """Holds the rows of a table as dicts, a list in every way; `print` shows them in columns, numbers with three digits.

    >>> print(RowTable([{"client": "north", "auc": 0.8125, "loss": None}, {"client": "mean", "auc": 0.8, "loss": 1.0}]))
    client    auc  loss
    north   0.812     –
    mean      0.8     1
    """

    def __str__(self) -> str:
        columns = list(dict.fromkeys(name for row in self for name in row))
        lines = [columns, *([_format_cell(row.get(name)) for name in columns] for row in self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [
            [cells[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(cells[1:], widths[1:], strict=True))]
            for cells in lines
            if cells
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _format_cell(value: Any) -> str:
    if value is None:
        return "–"
    return format_three_significant_digits(value) if isinstance(value, float) else str(value)
