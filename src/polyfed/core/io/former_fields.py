"""Renames the fields of methods in files that earlier versions of polyfed wrote."""

from collections.abc import Collection, Mapping
from typing import Any

PRESENT_NAMES = {"final": "averaged_over"}
"""Former name of a field -> its present name."""


def rename_former_fields(values: Mapping[str, Any], present_fields: Collection[str]) -> dict[str, Any]:
    """Returns `{field: value}` read from a file with present names in place of former ones.

    Args:
        values: field -> value, as a file holds them; a field may follow its section and a dot.
        present_fields: the fields that the method has; a former name among them is left alone.

    >>> rename_former_fields({"lr": 0.1, "final": "all"}, ["lr", "averaged_over"])
    {'lr': 0.1, 'averaged_over': 'all'}
    >>> rename_former_fields({"algorithm.final": "all"}, ["algorithm.averaged_over"])
    {'algorithm.averaged_over': 'all'}
    """
    renamed = {}
    for name, value in values.items():
        section, dot, field = name.rpartition(".")
        present = section + dot + PRESENT_NAMES.get(field, field)
        renamed[present if present in present_fields and name not in present_fields else name] = value
    return renamed
