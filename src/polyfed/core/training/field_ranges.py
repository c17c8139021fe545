"""Says which values the numbers of local training may have; the command line asks it before torch is imported."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import MAX_COUNT, is_whole_number

MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Bounds numbers that are factors of weights, as float32 does."""
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "local_epochs": (lambda number: number >= 1, "at least 1"),
    "local_steps": (lambda number: number is None or number >= 1, "at least 1, or none"),
    "batch_size": (lambda number: number >= 0, "at least 1, or 0 for the full batch"),
    "lr": (lambda number: 0 < number < math.inf, "positive"),
    "decay": (lambda number: 0 < number <= 1, "above 0 and at most 1"),
    "momentum": (lambda number: 0 <= number < 1, "at least 0 and below 1"),
    "weight_decay": (lambda number: 0 <= number < math.inf, "at least 0"),
    "warmup_rounds": (lambda number: number >= 0, "at least 0"),
    "warmup_steps": (lambda number: number >= 0, "at least 0"),
    "accumulate": (lambda number: number >= 1, "at least 1"),
    "patience": (lambda number: number is None or number >= 1, "at least 1 epoch, or none"),
    "clip_norm": (lambda number: number is None or number > 0, "positive, or none"),
    "label_smoothing": (lambda number: 0 <= number < 1, "at least 0 and below 1"),
}


def check_field_ranges(method: str, values: Mapping[str, Any]) -> None:
    """Raises a `UserError` if a number of a method's local training is out of its range.

    Args:
        method: name of the method's class, for the error.
        values: field -> value, of the field's type; others are left alone.

    >>> check_field_ranges("FedAvg", {"lr": -1.0, "mu": -1.0})
    Traceback (most recent call last):
    polyfed.core.errors.UserError: FedAvg: lr must be positive, got -1.0
    """
    for field, value in values.items():
        if is_whole_number(value, MAX_COUNT + 1):
            raise UserError(f"{method}: {field} must be at most {MAX_COUNT}, got {value}")
        if isinstance(value, float) and MAX_FLOAT32 < abs(value) < math.inf:
            raise UserError(f"{method}: {field} must be at most 3.4e38, as weights are, got {value!r}")
    for field, (is_in_range, requirement) in _RANGES.items():
        if field in values and not is_in_range(values[field]):
            raise UserError(f"{method}: {field} must be {requirement}, got {values[field]!r}")
