"""Infers the types of a table's columns (features, categories, targets), and warns of suspicious columns."""

import warnings
from collections.abc import Collection, Sequence
from shlex import quote
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.examples.text_columns import (
    MOST_CATEGORIES,
    ColumnRefusal,
    check_texts_are_classes,
    check_texts_are_no_dates,
    find_text_refusal,
    refuse_columns,
    refuse_dates,
)
from polyfed.core.io.text.advice import keep_advice_for_this_process
from polyfed.core.io.text.number_format import format_row_numbers, join_first_and_count_rest
from polyfed.core.tasks.task import DEFAULT_TASK, Task, TaskSpec
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.formats.files import Table
from polyfed.data.tabular.positive_class import is_condition_or_value_list, split_by_positive
from polyfed.data.tabular.preprocessing import Column
from polyfed.data.tabular.table_reader import (
    FRAME_MARK,
    column_as_arrow_array,
    column_as_numbers,
    column_as_texts,
    has_no_letter_or_digit,
    is_empty_non_numeric_column,
    is_numeric_column,
    is_numeric_type,
    is_text_type,
)
from polyfed.tasks import infer_table_task

_MOST_SUBGROUP_VALUES = 10  # different values of a column of numbers that is kept for scores of subgroups
_PRECISE = 1e-5  # of a column's standard deviation: with a larger rounding error it is kept as float64
_PRECISE_TARGET = 1e-3  # likewise of a target, which is float32
_MOST_SHOWN_VALUES = 5  # values of a column of texts that an error may name
_LEAST_ROWS_OF_SHOWN_VALUE = 5
LARGEST_EXACT = 2.0**53
"""Sets up to which number a floating-point number tells neighbouring whole numbers apart."""


def infer_feature_columns(table: Table, names: Sequence[str], categorical: Sequence[str]) -> tuple[Column, ...]:
    """Describes feature columns: categories if cells are text or the name is in `categorical`.

    Raises:
        UserError: columns hold dates, free text, or no value; it names all of them.
    """
    refusals = [find_feature_refusal(table, name, name in categorical) for name in names]
    refuse_columns([refusal for refusal in refusals if refusal is not None])
    return tuple(_infer_feature_column(table, name, name in categorical) for name in names)


def find_feature_refusal(table: Table, name: str, as_categories: bool) -> ColumnRefusal | None:
    """Says why a column cannot be a feature; None if it can."""
    import pyarrow.types as kinds

    kind = column_as_arrow_array(table, name).type
    if is_empty_non_numeric_column(table, name):
        return find_text_refusal([], name)
    if kinds.is_temporal(kind):
        return refuse_dates(name)
    if not (is_numeric_type(kind) or is_text_type(kind)):
        return ColumnRefusal(name, f"holds values of type {kind}, neither numbers nor texts")
    is_usable = as_categories or is_numeric_column(table, name)
    return None if is_usable else find_text_refusal(column_as_texts(table, name).tolist(), name)


def _infer_feature_column(table: Table, name: str, as_categories: bool) -> Column:
    import pyarrow.types as kinds

    if not as_categories and is_numeric_column(table, name):
        cells = column_as_numbers(table, name)
        is_floating = kinds.is_floating(column_as_arrow_array(table, name).type)
        if not is_floating and bool((np.abs(cells) > LARGEST_EXACT).any()):
            warn_of_data(
                f"column {name!r} has numbers of more than 15 digits, the last of which are lost: an id? Leave it out "
                f"(drop={name!r}, --data.drop {quote(name)}), or, if it is that of a patient, give group={name!r} "
                f"(--data.group {quote(name)})"
            )
        return Column(name, None, bool(np.isnan(cells).any()))
    column = column_as_texts(table, name)
    present_values = [value for value in column.tolist() if value is not None]
    if signs := sorted(filter(has_no_letter_or_digit, set(present_values))):
        warnings.warn(
            keep_advice_for_this_process(
                f"column {name!r} has the category {signs[0]!r}; if that means no value, give missing=[{signs[0]!r}] "
                f"(--data.missing {signs[0]!r})"
            ),
            UserWarning,
            stacklevel=2,
        )
    return Column(name, sorted_unique_texts(present_values), len(present_values) < len(column))


def sorted_unique_texts(items: Sequence[str]) -> tuple[str, ...]:
    """Returns the unique texts, sorted by value if all of them are numbers, else alphabetically.

    >>> sorted_unique_texts(["10", "9", "10"]), sorted_unique_texts(["b", "10", "9"])
    (('9', '10'), ('10', '9', 'b'))
    """
    unique_items = sorted(set(items))
    try:
        return tuple(sorted(unique_items, key=float))
    except ValueError:
        return tuple(unique_items)


def has_few_values(table: Table, name: str) -> bool:
    """Returns whether a column has so few different values that scores can be computed for the rows with each value."""
    import pyarrow.compute

    kind = column_as_arrow_array(table, name).type
    max_values = MOST_CATEGORIES if is_text_type(kind) else _MOST_SUBGROUP_VALUES if is_numeric_type(kind) else 0
    return bool(max_values) and pyarrow.compute.count_distinct(column_as_arrow_array(table, name)).as_py() <= max_values


def warn_of_duplicate_rows(table: Table, ignored: Collection[str], *, has_all_rows: bool = True) -> None:
    """Warns of rows equal in all columns but those of `ignored`, which may be in two sets.

    If more than half of the rows are equal to others, rows repeat by nature, and there is no warning. It names two of them
    if the table `has_all_rows` that the user gave: those of a frame as `df.iloc[0]`.
    """
    names = [name for name in table.column_names if name not in ignored]
    table_with_row_numbers = table.select(names).append_column("\0row", [np.arange(table.num_rows)])
    unique_rows = table_with_row_numbers.group_by(names, use_threads=False).aggregate(
        [("\0row", "min"), ("\0row", "max")]
    )
    copies = table.num_rows - unique_rows.num_rows
    if not copies or 2 * unique_rows.num_rows < table.num_rows:
        return
    first, last = (unique_rows.column(f"\0row_{which}").to_numpy() for which in ("min", "max"))
    duplicated = int(np.flatnonzero(first != last)[0])
    pair = [first[duplicated], last[duplicated]]
    is_frame = FRAME_MARK in (table.schema.metadata or {})
    places = " and ".join(f"df.iloc[{row}]" for row in pair) if is_frame else format_row_numbers(pair)
    example = f" ({places})" if has_all_rows else ""
    besides = f" but {join_first_and_count_rest(list(ignored), 5)}" if ignored else ""
    warn_of_data(
        f"{copies} of {table.num_rows} rows are equal to other rows in all columns{besides}{example}: copies? One may come "
        "into the training set and its original into the test set; remove copies, or give a column that keeps them together "
        "(group=..., --data.group); keep rows that only look alike"
    )


def to_float32_unless_precision_lost(stored: Tensor, features: Sequence[Column]) -> Tensor:
    """Returns cells as float32, or unchanged if a column's deviation would lose too much precision."""
    numeric_positions = [i for i, column in enumerate(features) if column.categories is None]
    numeric_cells = stored[:, numeric_positions].numpy()
    if not numeric_cells.size:
        return stored.to(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any value
        spread, error = (
            np.nanstd(numeric_cells, axis=0),
            np.nanmax(np.abs(numeric_cells - numeric_cells.astype(np.float32)), axis=0),
        )
    return stored if bool((error > _PRECISE * spread).any()) else stored.to(torch.float32)


def drop_rows_without(role: str, table: Table, names: Sequence[str], site: str | None = None) -> Table:
    """Returns the rows that have a value in each column of a role; warns of the number of the others, at each site.

    Raises:
        UserError: no row has them all.

    >>> import pyarrow
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     drop_rows_without("target", pyarrow.table({"ill": [0, None], "age": [50, 60]}), ["ill"]).to_pydict()
    {'ill': [0], 'age': [50]}
    """
    is_complete = np.all([[cell is not None for cell in column_as_texts(table, name)] for name in names], axis=0)
    if is_complete.all():
        return table
    joined = " and ".join(map(repr, names))
    if not is_complete.any():
        raise UserError(f"{role}: no row has a value in {joined}")
    sites = [] if site is None else column_as_texts(table, site)[~is_complete].tolist()
    counts = ", ".join(f"{name} {sites.count(name)}" for name in sorted_unique_texts(sites))
    warn_of_data(
        f"{int((~is_complete).sum())} of {table.num_rows} rows have no value in the {role} {joined} and are left out"
        f"{f' ({counts})' if counts else ''}"
    )
    return table.filter(is_complete)


def read_targets(
    table: Table, names: Sequence[str], task: TaskSpec, positive: str | None
) -> tuple[Tensor, tuple[str, ...], Task]:
    """Returns the targets of a table, the names of its classes, labels or targets, and the task.

    Raises:
        UserError: targets that do not fit the task.
    """
    if task == "auto" and len(names) == 1 and is_condition_or_value_list(positive):
        task = DEFAULT_TASK
    resolved_task = _infer_task(table, names) if task == "auto" else get_task(task)
    if resolved_task.one_class_per_example:
        if len(names) > 1:
            raise UserError(
                f"{resolved_task} has one target, got {', '.join(names)}; give task='multilabel' (--data.task "
                "multilabel) for several"
            )
        column = column_as_texts(table, names[0])
        if positive is not None and is_condition_or_value_list(positive) and positive not in column:
            codes, two_classes = split_by_positive(column, names[0], positive)
            return torch.from_numpy(codes), two_classes, resolved_task
        if task == "auto" and positive is None:
            check_texts_are_no_dates(column.tolist(), names[0])
        classes = _infer_classes(column, names[0], positive)
        code = {value: number for number, value in enumerate(classes)}
        return torch.tensor([code[value] for value in column.tolist()]), classes, resolved_task
    roles = resolved_task.target_columns
    if roles and len(names) != len(roles):
        raise UserError(
            f"{resolved_task} has {len(roles)} target columns, {' and '.join(roles)}, got {', '.join(names)}; give "
            f"target=... (--data.target {roles[0].upper()}) and {roles[1]}=... (--data.{roles[1]} {roles[1].upper()})"
        )
    if positive is not None and not roles:
        raise UserError(f"positive={positive!r} is for two classes, and the task is {resolved_task}; leave it out")
    columns = []
    for name in names:
        if positive is not None and name == names[-1]:
            columns.append(_equals_positive(column_as_texts(table, name), name, positive))
            continue
        if roles and name == names[-1] and not is_numeric_column(table, name):
            raise UserError(
                f"{roles[-1]} {name!r} holds texts{_list_frequent_values(column_as_texts(table, name))}; say which value is "
                f"the {roles[-1]} (positive=..., --data.positive)"
            )
        if not is_numeric_column(table, name):
            raise UserError(
                f"target {name!r} holds texts, and {resolved_task} needs numbers; drop the rows without a target, if "
                "that is what the texts mean"
            )
        column = column_as_numbers(table, name)
        resolved_task.check_table_column(column, name)
        if np.abs(column - column.astype(np.float32)).max() > _PRECISE_TARGET * np.std(column) > 0:
            raise UserError(
                f"target {name!r} has numbers so large compared with their differences that 32 bits round these away; "
                "subtract a constant from all, the same at each site"
            )
        columns.append(column)
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32)), tuple(names), resolved_task


def _list_frequent_values(column: NDArray[Any]) -> str:
    """Returns the values of a column in brackets if they are few and frequent, and so no data of a single row; else ""."""
    values, counts = np.unique(column.astype(str), return_counts=True)
    is_private = len(values) > _MOST_SHOWN_VALUES or counts.min() < _LEAST_ROWS_OF_SHOWN_VALUE
    return "" if is_private else f" ({', '.join(map(repr, values.tolist()))})"


def _equals_positive(column: NDArray[Any], name: str, positive: str) -> NDArray[np.float64]:
    if positive not in (values := sorted_unique_texts(column.tolist())) or len(values) > 2:
        raise UserError(
            f"positive={positive!r} must be one of at most two values of {name!r}; it has {', '.join(values[:10])}"
        )
    return np.asarray(column == positive, dtype=np.float64)


def _infer_task(table: Table, names: Sequence[str]) -> Task:
    is_numeric = all(is_numeric_type(column_as_arrow_array(table, name).type) for name in names)
    return infer_table_task(names, {name: column_as_numbers(table, name) for name in names} if is_numeric else None)


def check_task_option(task: TaskSpec) -> None:
    """Raises a `UserError` unless a table's `task` is "auto", a task's name or spec, or `module:Class`."""
    if not isinstance(task, str) or (task != "auto" and ":" not in task):
        get_task(task)


def _infer_classes(column: NDArray[Any], name: str, positive: str | None) -> tuple[str, ...]:
    classes = sorted_unique_texts(column.tolist())
    if len(classes) < 2:
        raise UserError(f"target {name!r} has only one value, {classes[0]!r}, and classes need at least two")
    check_texts_are_classes(column.tolist(), name)
    if positive is None:
        return classes
    if str(positive) not in classes:
        raise UserError(f"positive={positive!r} is not a value of target {name!r}; its values: {', '.join(classes)}")
    if len(classes) != 2:
        raise UserError(
            f"positive={positive!r} is one of {len(classes)} values of target {name!r}; for two classes give a condition, "
            f"such as '>0', or all positive values, such as '{','.join(classes[1:])}' (or '={positive}' for this one alone)"
        )
    return (next(value for value in classes if value != str(positive)), str(positive))
