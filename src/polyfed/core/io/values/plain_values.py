"""Converts values to Python numbers, texts, lists and dicts, which torch, JSON and YAML accept.

Settings and hyper-parameters often come from `numpy.arange` or `numpy.logspace`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyfed.core.errors import UserError

_PLAIN = (str, int, float, bool, type(None))


def numpy_to_python(value: Any) -> Any:
    """Returns a nested value with all NumPy numbers and arrays in it converted to Python numbers and lists.

    Lists, tuples and dicts are converted recursively; anything else is returned unchanged.

    >>> import numpy as np
    >>> numpy_to_python({"lr": np.array([0.5, 1.0]), "k": (np.int64(3), np.bool_(True)), "name": "north"})
    {'lr': [0.5, 1.0], 'k': (3, True), 'name': 'north'}
    """
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # without the import of NumPy
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(numpy_to_python(entry) for entry in value)
    if type(value) is dict:
        return {numpy_to_python(key): numpy_to_python(entry) for key, entry in value.items()}
    return value


def convert_numpy_fields_in_place(instance: Any) -> None:
    """Replaces NumPy numbers and arrays in a frozen dataclass's fields by Python numbers and lists."""
    for field in dataclasses.fields(instance):
        object.__setattr__(instance, field.name, numpy_to_python(getattr(instance, field.name)))


def to_plain_values(value: Any, name: str) -> Any:
    """Converts a nested value for YAML and JSON (NumPy scalars become Python numbers, tuples become lists).

    Raises:
        UserError: a value cannot be written; the message has its place.

    >>> import numpy as np
    >>> to_plain_values({"lr": np.float64(0.1), "milestones": (3, np.int64(6))}, "algorithm")
    {'lr': 0.1, 'milestones': [3, 6]}
    """
    import numpy as np

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {k if type(k) in _PLAIN else str(k): to_plain_values(item, f"{name}.{k}") for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_values(item, f"{name}[{position}]") for position, item in enumerate(value)]
    if type(value) not in _PLAIN:
        raise UserError(
            f"{name} is a {type(value).__name__}, which config.yaml cannot hold: {value!r}; give numbers, strings, lists or "
            "mappings, or run without out="
        )
    return value


def plainness_error(value: Any, place: str = "") -> str:
    """Returns an error message for the first value that plain YAML cannot hold; "" if there is none."""
    if isinstance(value, dict):
        if wrong_keys := [key for key in value if type(key) not in _PLAIN]:
            return f"a key of {place or 'it'} is a {type(wrong_keys[0]).__name__}"
        return next(
            filter(None, (plainness_error(item, f"{place}.{key}".lstrip(".")) for key, item in value.items())), ""
        )
    if isinstance(value, list):
        return next(filter(None, (plainness_error(item, f"{place}[{k}]") for k, item in enumerate(value))), "")
    return "" if type(value) in _PLAIN else f"{place} is a {type(value).__name__}"
