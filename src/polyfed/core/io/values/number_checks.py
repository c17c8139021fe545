"""Tells numbers from other values that a user, a file or a message may give. True and False, which Python counts as whole
numbers, are none here."""

import math
from numbers import Real
from typing import Any, TypeGuard

from polyfed.core.errors import UserError

MAX_COUNT = 10**9
"""Bounds numbers of rounds, examples and steps; a larger one is a mistake."""
MAX_RUNS = 1000
"""Bounds the number of runs of a method in a comparison."""


def check_whole_number(name: str, value: Any, least: int, most: int = MAX_COUNT) -> None:
    """Raises a `UserError` unless a value is an int (no boolean) from `least` to `most`.

    >>> check_whole_number("rounds", 10**30, 1)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: rounds must be at most 1000000000, got 1000000000000000000000000000000
    """
    if not is_whole_number(value, least):
        raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if value > most:
        raise UserError(f"{name} must be at most {most}, got {value}")


def is_whole_number(value: Any, least: int | None = None) -> TypeGuard[int]:
    """Returns True if a value is an int (no boolean), and at least `least`.

    >>> is_whole_number(3, 1), is_whole_number(0, 1), is_whole_number(True), is_whole_number(1.0)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns True if a value is an int or a float (no boolean); it may be infinite or NaN.

    >>> is_number(2), is_number(2.5), is_number(False), is_number("2")
    (True, True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_real_number(value: Any) -> bool:
    """Returns True if a value is a number of Python, NumPy or `fractions` on the real line (no boolean).

    >>> import numpy as np
    >>> is_real_number(np.float32(0.5)), is_number(np.float32(0.5)), is_real_number(True)
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_positive_number(value: Any) -> TypeGuard[int | float]:
    """Returns True if a value is an int or a float, finite and above 0.

    >>> is_positive_number(0.5), is_positive_number(0), is_positive_number(float("inf")), is_positive_number(True)
    (True, False, False, False)
    """
    return is_number(value) and 0 < value < math.inf
