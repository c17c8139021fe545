"""Converts NumPy's numbers and arrays to Python numbers and lists, which torch, JSON and YAML accept.

Settings and hyper-parameters often come from `numpy.arange` or `numpy.logspace`.
"""

import dataclasses
from typing import Any


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
