"""Renames fields of methods in files that earlier versions of polyfed wrote."""

from collections.abc import Collection, Mapping
from typing import Any

PRESENT_NAMES = {"final": "averaged_over"}
"""Former name of a field -> its present name."""


def rename_former_fields(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the values with former names of fields replaced by the present names.

    Args:
        values: field -> value, as a file holds them; a field may follow its section and a dot.
        names: the fields that the method has; a former name among them is left alone.

    >>> rename_former_fields({"lr": 0.1, "final": "all"}, ["lr", "averaged_over"])
    {'lr': 0.1, 'averaged_over': 'all'}
    >>> rename_former_fields({"algorithm.final": "all"}, ["algorithm.averaged_over"])
    {'algorithm.averaged_over': 'all'}
    """
    renamed = {}
    for name, value in values.items():
        section, dot, field = name.rpartition(".")
        present = section + dot + PRESENT_NAMES.get(field, field)
        renamed[present if present in names and name not in names else name] = value
    return renamed
