"""Converts the times of examples (numbers or dates) to numbers, by which examples can be ordered."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.number_format import join_first_and_count_rest

_SHOWN = 5  # rows in a sentence


def times_as_numbers(values: Any, name: str) -> NDArray[np.float64]:
    """Returns times as numbers in the same order: numbers stay, dates become microseconds since 1970; raises a
    `UserError` for a missing value or any other kind.

    Args:
        values: numbers, dates (`datetime64`, `datetime`, `date`), or texts of the form 2026-01-31.
        name: of these values, for errors.

    Raises:
        UserError: values of another kind, or a value that is missing.

    >>> times_as_numbers([1.5, 2], "day"), times_as_numbers(["1970-01-02"], "day")
    (array([1.5, 2. ]), array([8.64e+10]))
    """
    times = np.asarray(values)
    try:
        if times.dtype.kind in "biuf":
            numbers = times.astype(np.float64)
        else:
            dates = times.astype("datetime64[us]")
            numbers = np.where(np.isnat(dates), np.nan, dates.astype(np.int64).astype(np.float64))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} must be numbers or dates of the form 2026-01-31, got values of type {times.dtype}; convert them"
        ) from error
    absent = (np.flatnonzero(~np.isfinite(numbers)) + 1).tolist()
    if absent:
        raise UserError(
            f"{name} has no value in {'row' if len(absent) == 1 else 'rows'} {join_first_and_count_rest(absent, _SHOWN)} "
            "(the first is 1); fill it in, or drop these rows"
        )
    return numbers
