"""Converts the times of examples (numbers or dates) to numbers, by which examples can be ordered."""

import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import join_first_and_count_rest

_SHOWN = 5  # rows in a sentence
_TIME_WITH_ZONE = re.compile(r".*\d\d:\d\d.*(Z|[+-]\d\d(:?\d\d)?)")


def times_as_numbers(values: Any, name: str) -> NDArray[np.float64]:
    """Returns times as numbers in the same order: numbers stay, dates become microseconds since 1970.

    Args:
        values: numbers, dates (`datetime64`, `datetime`, `date`), or texts of the form 2026-01-31. Times with a time zone
            are compared as times in UTC.
        name: of these values, for errors.

    Raises:
        UserError: values of another kind, a value that is missing, or a time zone in some values only.

    >>> times_as_numbers([1.5, 2], "day"), times_as_numbers(["1970-01-02"], "day")
    (array([1.5, 2. ]), array([8.64e+10]))
    """
    times = np.asarray(values)
    try:
        times = _without_zones(times, name) if times.dtype.kind in "OU" else times
        if times.dtype.kind in "biuf":
            numbers = times.astype(np.float64)
        else:
            dates = times.astype("datetime64[us]")
            numbers = np.where(np.isnat(dates), np.nan, dates.astype(np.int64).astype(np.float64))
    except UserError:  # which is a ValueError
        raise
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} must be numbers or dates of the form 2026-01-31, got "
            + ("texts" if times.dtype.kind in "OU" else f"values of type {times.dtype}")
            + "; convert them, of dates such as 31.01.2026: pandas.to_datetime(column, format='%d.%m.%Y')"
        ) from error
    absent = (np.flatnonzero(~np.isfinite(numbers)) + 1).tolist()
    if absent:
        raise UserError(
            f"{name} has no value in {'row' if len(absent) == 1 else 'rows'} {join_first_and_count_rest(absent, _SHOWN)} "
            "(the first is 1); fill it in, or drop these rows"
        )
    return numbers


def _without_zones(times: NDArray[Any], name: str) -> NDArray[Any]:
    """Returns times with a time zone as times in UTC, datetime64; any others as they are.

    Raises:
        UserError: some have a time zone, and others none.
    """
    cells = [
        datetime.fromisoformat(value) if isinstance(value, str) and _TIME_WITH_ZONE.fullmatch(value) else value
        for value in times.tolist()
    ]
    present = [value for value in cells if value is not None and value == value]
    zoned = [value for value in present if isinstance(value, datetime) and value.tzinfo is not None]
    if not zoned:
        return times
    if len(zoned) < len(present):
        number = f"{len(zoned)} of {len(present)} rows"
        raise UserError(f"{name} has a time zone in {number}; give one to all of them, or to none")
    in_utc = iter(value.astimezone(UTC).replace(tzinfo=None) for value in zoned)
    return np.array(
        [next(in_utc) if value is not None and value == value else None for value in cells], dtype="datetime64[us]"
    )
