"""Says which examples belong to one group, such as all recordings of a patient."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import torch_generator

ALONE = "\0"
"""Begins the id of a row without a group, which is one by itself; the row's place in the column follows."""


def group_id_of_each_row(group_column: NDArray[Any]) -> NDArray[Any]:
    """Returns the id of each row's group (a patient, for example); a row without a value forms a group by itself.

    A whole number has one id, whether its column has whole numbers or, since a value is missing, floating-point ones.

    >>> group_id_of_each_row(np.array([7.0, np.nan, 7.5])).tolist() == ["7", f"{ALONE}1", "7.5"]
    True
    """
    return np.array(
        [
            f"{ALONE}{row}" if is_missing else _text_of(value)
            for row, (value, is_missing) in enumerate(
                zip(group_column.tolist(), _is_missing(group_column), strict=True)
            )
        ]
    )


def _text_of(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def is_alone(group_id: str) -> bool:
    """Returns whether an id from `group_id_of_each_row` is that of a row without a group."""
    return group_id.startswith(ALONE)


def number_units(examples: Examples) -> NDArray[np.int64]:
    """Returns for each example the number of its unit, counted from 0: its group, or the example itself if it has none.

    >>> import torch
    >>> number_units(Examples(torch.zeros(4, 1), torch.zeros(4), group=["b", None, "a", "b"])).tolist()
    [2, 0, 1, 2]
    """
    if examples.group is None:
        return np.arange(len(examples))
    units = replace_missing_groups(examples.column(examples.group))
    return np.asarray(np.unique(units, return_inverse=True)[1], dtype=np.int64)


def draw_rows_of_whole_groups(examples: Examples, size: int, seed: int) -> Tensor:
    """Draws up to `size` examples to hold out, by whole groups if there are groups; returns rows, ascending.

    If all groups have more examples, it is the smallest group. Examples of one single group are drawn as if they had none.

    >>> people = Examples(torch.zeros(6, 1), torch.zeros(6), group=list("aabbbb"))
    >>> draw_rows_of_whole_groups(people, 3, seed=0).tolist()
    [0, 1]
    """
    units = number_units(examples)
    sizes = np.bincount(units)
    if len(sizes) == 1:
        units, sizes = np.arange(len(units)), np.ones_like(units)
    order = torch.randperm(len(sizes), generator=torch_generator(seed)).numpy()
    fitting = order[sizes[order] <= size]
    held_out_units = fitting[sizes[fitting].cumsum() <= size] if len(fitting) else sizes.argmin()
    return torch.from_numpy(np.flatnonzero(np.isin(units, held_out_units)))


def replace_missing_groups(group_column: NDArray[Any]) -> NDArray[Any]:
    """Returns the column, or group ids in its place if a row has no group or values may not be sortable."""
    has_ids = group_column.dtype.kind == "O" or any(_is_missing(group_column))
    return group_id_of_each_row(group_column) if has_ids else group_column


def _is_missing(column: NDArray[Any]) -> list[bool]:
    return [value is None or value != value or not str(value).strip() for value in column.tolist()]
