"""Describes the columns, categories and classes that the tables of several sites must share to be trained on together.

A schema holds names and categories, and nothing of a row.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.core.io.values.validation import parse_json
from polyfed.core.tasks.task import Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.tabular.columns import sorted_unique_texts
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor, preprocessor_from_json


def table_schema(preprocessor: TablePreprocessor) -> dict[str, Any]:
    """Returns a table's columns, categories and classes as a dict for JSON, without fitted statistics.

    >>> table_schema(TablePreprocessor((Column("age"),), (61.0,), (10.0,)))["mean"]
    [0.0]
    """
    num_numeric = len(preprocessor.mean)
    return TablePreprocessor(
        preprocessor.columns,
        (0.0,) * num_numeric,
        (1.0,) * num_numeric,
        (),
        preprocessor.scope,
        preprocessor.classes,
        preprocessor.task,
    ).to_json_dict()


def read_schema(source: str | Path | Mapping[str, Any]) -> TablePreprocessor:
    """Reads a schema from a JSON file, or from a dict of `table_schema`.

    Raises:
        UserError: the file cannot be read, or holds no schema.
    """
    if isinstance(source, Mapping):
        return preprocessor_from_json(dict(source))
    try:
        content = parse_json(read_file(expand_user_path(source, "the schema")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the schema {str(source)!r} cannot be read ({error}); give a file of polyfed's schema"
        ) from error
    return preprocessor_from_json(content)


def merge_schemas(*sources: str | Path | Mapping[str, Any], to: str | Path | None = None) -> dict[str, Any]:
    """Merges schemas: columns that all have, with categories and classes that any has.

    A column has a mark for missing values if any table has missing values in it.

    Args:
        sources: schemas (`ClientTables.schema`) or files of them.
        to: a JSON file to write.

    Raises:
        UserError: no schema, a column of numbers in one and of categories in another, different tasks, or no common column.

    >>> first = table_schema(TablePreprocessor((Column("sex", ("f", "m")), Column("age")), (0.0,), (1.0,)))
    >>> second = table_schema(TablePreprocessor((Column("sex", ("f", "x")), Column("bmi")), (0.0,), (1.0,)))
    >>> merge_schemas(first, second)["columns"]
    [{'name': 'sex', 'categories': ['f', 'm', 'x'], 'missing': False}]
    """
    schemas = [read_schema(source) for source in sources]
    if not schemas:
        raise UserError("merge_schemas needs schemas to merge, got none")
    if len(tasks := sorted({str(schema.task) for schema in schemas})) > 1:
        raise UserError(f"tables of one federation have one task, and these schemas are of {' and '.join(tasks)}")
    columns_by_name = [{column.name: column for column in schema.columns} for schema in schemas]
    columns = tuple(
        _merge_column([by_name[name] for by_name in columns_by_name])
        for name in columns_by_name[0]
        if all(name in by_name for by_name in columns_by_name)
    )
    if not columns:
        raise UserError("the schemas have no column in common; give tables of the same columns")
    classes = _union_of_lists([schema.classes for schema in schemas])
    num_numeric = sum(column.categories is None for column in columns)
    merged_schema = TablePreprocessor(
        columns, (0.0,) * num_numeric, (1.0,) * num_numeric, (), schemas[0].scope, classes, schemas[0].task
    )
    if to is not None:
        expand_user_path(to, "to").write_text(
            json.dumps(merged_schema.to_json_dict(), indent=1, ensure_ascii=False), encoding="utf-8"
        )
    return merged_schema.to_json_dict()


def _merge_column(columns: Sequence[Column]) -> Column:
    kinds = {column.categories is None for column in columns}
    if len(kinds) > 1:
        raise UserError(
            f"column {columns[0].name!r} holds numbers in one table and categories in another; give it as categorical in all"
        )
    missing = any(column.missing for column in columns)
    lists = [column.categories for column in columns if column.categories is not None]
    return Column(columns[0].name, _union_of_lists(lists) if lists else None, missing)


def _union_of_lists(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns all items in the order in which they first come; sorted if all lists are sorted."""
    items = list(dict.fromkeys(value for part in lists for value in part))
    return (
        sorted_unique_texts(items) if all(tuple(part) == sorted_unique_texts(part) for part in lists) else tuple(items)
    )


def recode_targets_to_schema(
    y: Tensor, class_names: Sequence[str], schema: TablePreprocessor, task: Task | str
) -> Tensor:
    """Converts class indices to those of a schema; other tasks' targets are unchanged.

    Raises:
        UserError: another task, or a class, label or target that the schema does not have.

    >>> schema = TablePreprocessor((), (), (), classes=("no", "perhaps", "yes"))
    >>> recode_targets_to_schema(torch.tensor([0, 1]), ["no", "yes"], schema, "classification")
    tensor([0, 2])
    """
    task = get_task(task)
    if task != schema.task:
        raise UserError(
            f"the task of the table is {task}, that of the schema {schema.task}; give task={str(schema.task)!r} "
            f"(--data.task {schema.task})"
        )
    if not task.one_class_per_example:
        if tuple(class_names) != schema.classes:
            raise UserError(
                f"the schema has the targets {', '.join(schema.classes)}, and this table has {', '.join(class_names)}"
            )
        return y
    if unknown := [name for name in class_names if name not in schema.classes]:
        rows = np.flatnonzero(np.isin(y.numpy(), [class_names.index(name) for name in unknown]))
        raise UserError(
            f"the target has no class of the schema ({', '.join(schema.classes)}) in {format_row_numbers(rows)}"
        )
    return torch.tensor([schema.classes.index(name) for name in class_names], dtype=y.dtype)[y]
