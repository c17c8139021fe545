"""Divides columns of numbers into groups by cut points or quartiles; only the groups' names are kept with predictions."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import split_column_and_cuts
from polyfed.data.formats.files import Table
from polyfed.data.look.counts import MIN_COUNT
from polyfed.data.tabular.table_reader import column_as_numbers, is_numeric_column

_QUARTILES = (0.25, 0.5, 0.75)


def divide_columns_into_subgroups(table: Table, entries: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Returns by column the name of each row's group, "" where the number is missing.

    Args:
        table: the rows.
        entries: "age=50:65" for three groups that 50 and 65 begin; "age" alone for quartiles of all rows.

    Raises:
        UserError: no column of numbers, cut points that do not ascend, or a group of fewer than five rows.

    >>> import pyarrow
    >>> ages = pyarrow.table({"age": [30, 40, 45, 47, 49, 50, 60, 70, 80, None, 90]})
    >>> divide_columns_into_subgroups(ages, ["age=50"])["age"].tolist()[4:]
    ['below 50', 'from 50', 'from 50', 'from 50', 'from 50', '', 'from 50']
    """
    return {split_column_and_cuts(entry, table.column_names)[0]: _name_groups(table, entry) for entry in entries}


def _name_groups(table: Table, entry: str) -> NDArray[Any]:
    name, text = split_column_and_cuts(entry, table.column_names)
    option = f"subgroups={entry!r} (--data.subgroups)"
    if not is_numeric_column(table, name):
        raise UserError(f"{option}: column {name!r} has no numbers; columns of few different texts are kept without it")
    numbers = column_as_numbers(table, name)
    present = numbers[~np.isnan(numbers)]
    if text:
        try:
            cuts = [float(cut) for cut in text.split(":")]
        except ValueError:
            cuts = []
        if not cuts or not all(map(math.isfinite, cuts)) or any(low >= high for low, high in pairwise(cuts)):
            raise UserError(f"{option}: give ascending numbers with colons between, such as {name}=50:65")
    else:
        cuts = sorted({float(f"{cut:.3g}") for cut in np.quantile(present, _QUARTILES)} if len(present) else ())
    ends = [f"{cut:.10g}" for cut in cuts]
    inner = [f"{low} to below {high}" for low, high in pairwise(ends)]
    names = np.array([f"below {ends[0]}", *inner, f"from {ends[-1]}", ""] if ends else ["", ""])
    groups = np.where(np.isnan(numbers), len(names) - 1, np.searchsorted(cuts, numbers, side="right"))
    for place, count in enumerate(np.bincount(groups, minlength=len(names))[:-1]):
        if count < MIN_COUNT:
            raise UserError(
                f"{option}: the group {str(names[place])!r} has fewer than {MIN_COUNT} rows; give fewer or other cut points"
            )
    divided: NDArray[Any] = names[groups]
    return divided
