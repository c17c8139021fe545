"""Formats numbers, lists and names as text for people to read."""

import math
from collections.abc import Sequence
from typing import Any, Literal

NumberUnit = Literal["%", "", "count"]
"""Names the format of a number: a share in per cent, with three decimals, or as a whole number."""
_SHOWN_ROWS = 5  # in a sentence


def format_number(value: float | None, unit: NumberUnit = "", signed: bool = False) -> str:
    """Returns a number as text, with its unit; a dash if the number is None or not finite.

    >>> (format_number(0.1234, "%"), format_number(-0.05, "%", signed=True), format_number(12.0, "count"),
    ...  format_number(math.nan))
    ('12.3 %', '−5.0 %', '12', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    sign = "+" if signed else "-"
    decimals = {"%": 1, "": 3, "count": 0}[unit]
    text = f"{100 * value if unit == '%' else value:{sign}.{decimals}f}"
    return text.replace("-", "−") + (" %" if unit == "%" else "")


def format_number_without_percent_sign(value: float | None, unit: NumberUnit = "", signed: bool = False) -> str:
    """Returns a number as `format_number` does, but without the per cent sign.

    >>> format_number_without_percent_sign(0.1234, "%")
    '12.3'
    """
    return format_number(value, unit, signed).removesuffix(" %")


def format_three_significant_digits(value: float) -> str:
    """Returns a number as text with three significant digits, or rounded to a whole number from 100 on; a dash for NaN.

    >>> [format_three_significant_digits(value) for value in (0.12345, 12345.6, math.nan)]
    ['0.123', '12 346', '–']
    """
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def format_bytes(count: float) -> str:
    """Returns a number of bytes as text, in MB (2^20 bytes), or below 0.1 MB in kB.

    >>> format_bytes(3_400_000), format_bytes(27_000), format_bytes(0)
    ('3.2 MB', '26 kB', '0 kB')
    """
    return f"{count / 2**20:.1f} MB" if count >= 0.1 * 2**20 else f"{count / 2**10:.0f} kB"


def format_count(value: float) -> str:
    """Returns a count as text: whole numbers without decimals, and other numbers (means of counts) with one decimal.

    >>> format_count(3.0), format_count(3.25), format_count(-0.0)
    ('3', '3.2', '0')
    """
    value = round(value, 1) + 0.0
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def count_with_noun(number: int, noun: str) -> str:
    """Returns a number followed by `noun`, with an "s" unless the number is 1: "3 clients".

    >>> count_with_noun(1, "client"), count_with_noun(3, "client")
    ('1 client', '3 clients')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_batch_shape(shape: Sequence[object], batch: str = "batch") -> str:
    """Returns the shape of a batch as text, with a word for its size.

    >>> format_batch_shape((3, 4)), format_batch_shape((), "n")
    ('(batch, 3, 4)', '(n)')
    """
    return f"({', '.join(map(str, (batch, *shape)))})"


def mean_label_of(label: str) -> str:
    """Returns the label of a mean of scores, without "mean" twice.

    >>> mean_label_of("AUC"), mean_label_of("mean absolute error")
    ('mean AUC', 'mean absolute error')
    """
    return label if label.startswith("mean ") else f"mean {label}"


def join_with_and(values: Sequence[object]) -> str:
    """Returns the values as one text, joined by commas and "and".

    >>> join_with_and([0, 1, 4])
    '0, 1 and 4'
    """
    *leading, last = map(str, values)
    return f"{', '.join(leading)} and {last}" if leading else last


def join_first_and_count_rest(values: Sequence[object], limit: int = 8) -> str:
    """Returns the first `limit` values as text, joined by commas, followed by how many more there are.

    >>> join_first_and_count_rest("abcde", 3), join_first_and_count_rest("ab", 3)
    ('a, b, c and 2 more', 'a, b')
    """
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return f"{', '.join(map(str, values[:limit]))}{more}"


def format_time_left(seconds: float | None) -> str:
    """Formats an estimated time for display; returns "" for None.

    >>> format_time_left(42.0), format_time_left(170.0), format_time_left(8000.0), format_time_left(None)
    ('42 s left', '3 min left', '2.2 h left', '')
    """
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def format_row_numbers(rows: Any) -> str:
    """Returns row positions, which count from 0, as words that count from 1: "rows 2 and 5".

    >>> format_row_numbers([0]), format_row_numbers([1, 4]), format_row_numbers(range(10))
    ('row 1', 'rows 2 and 5', 'rows 1, 2, 3, 4, 5 and 5 more')
    """
    numbers = [int(row) + 1 for row in rows[:_SHOWN_ROWS]]
    if len(rows) > _SHOWN_ROWS:
        return f"rows {', '.join(map(str, numbers))} and {len(rows) - _SHOWN_ROWS} more"
    return f"{'row' if len(numbers) == 1 else 'rows'} {join_with_and(numbers)}"


def shorten_name(name: str, max_length: int = 16) -> str:
    """Returns `name` with its middle left out if it is longer than `max_length` characters, else unchanged.

    >>> shorten_name("a-very-long-name-of-a-client", 9)
    'a-ve…ient'
    """
    half = max_length // 2
    return name if len(name) <= max_length else f"{name[:half]}…{name[len(name) - (max_length - half - 1) :]}"


def capitalize_first(text: str) -> str:
    """Returns the text with its first letter as a capital."""
    return text[:1].upper() + text[1:]


def end_with_period(text: str) -> str:
    """Returns the text with a period added at its end, unless it already ends a sentence."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
