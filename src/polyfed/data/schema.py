"""What tables in different places must have in common to be trained on together: columns, categories and classes. It holds
names and categories, and nothing of a row."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.files import read_file, user_path
from polyfed.core.typed import from_json
from polyfed.data.columns import in_order
from polyfed.data.features import Column, Prepared, from_description


def schema_of(prepared: Prepared) -> dict[str, Any]:
    """The schema of a table, for JSON: how it is prepared, without what was fitted.

    >>> schema_of(Prepared((Column("age"),), (61.0,), (10.0,)))["mean"]
    [0.0]
    """
    plain = len(prepared.mean)
    return Prepared(
        prepared.columns, (0.0,) * plain, (1.0,) * plain, (), prepared.scope, prepared.classes, prepared.task
    ).described()


def read_schema(source: str | Path | Mapping[str, Any]) -> Prepared:
    """A schema from a file that holds it as JSON, or from what `schema_of` gave.

    Raises:
        UserError: the file cannot be read, or holds no schema.
    """
    if isinstance(source, Mapping):
        return from_description(dict(source))
    try:
        content = from_json(read_file(user_path(source, "the schema")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the schema {str(source)!r} cannot be read ({error}); give a file of polyfed's schema"
        ) from error
    return from_description(content)


def merge_schemas(*sources: str | Path | Mapping[str, Any], to: str | Path | None = None) -> dict[str, Any]:
    """One schema for several tables: the columns that all have, with the categories and classes of any, and a mark for
    missing values where any table has some.

    Args:
        sources: schemas (`Sites.schema`) or files of them.
        to: a JSON file to write.

    Raises:
        UserError: none, a column that is of numbers here and of categories there, another task, or no column in common.

    >>> one = schema_of(Prepared((Column("sex", ("f", "m")), Column("age")), (0.0,), (1.0,)))
    >>> two = schema_of(Prepared((Column("sex", ("f", "x")), Column("bmi")), (0.0,), (1.0,)))
    >>> merge_schemas(one, two)["columns"]
    [{'name': 'sex', 'categories': ['f', 'm', 'x'], 'missing': False}]
    """
    schemas = [read_schema(source) for source in sources]
    if not schemas:
        raise UserError("merge_schemas needs schemas to merge, got none")
    if len(tasks := sorted({schema.task for schema in schemas})) > 1:
        raise UserError(f"tables of one federation have one task, and these schemas are of {' and '.join(tasks)}")
    known = [{column.name: column for column in schema.columns} for schema in schemas]
    columns = tuple(_merged([one[name] for one in known]) for name in known[0] if all(name in one for one in known))
    if not columns:
        raise UserError("the schemas have no column in common; give tables of the same columns")
    classes = _union([schema.classes for schema in schemas])
    plain = sum(column.categories is None for column in columns)
    like = Prepared(columns, (0.0,) * plain, (1.0,) * plain, (), schemas[0].scope, classes, schemas[0].task)
    if to is not None:
        user_path(to, "to").write_text(json.dumps(like.described(), indent=1, ensure_ascii=False), encoding="utf-8")
    return like.described()


def _merged(columns: Sequence[Column]) -> Column:
    kinds = {column.categories is None for column in columns}
    if len(kinds) > 1:
        raise UserError(
            f"column {columns[0].name!r} holds numbers in one table and categories in another; give it as categorical in all"
        )
    missing = any(column.missing for column in columns)
    lists = [column.categories for column in columns if column.categories is not None]
    return Column(columns[0].name, _union(lists) if lists else None, missing)


def _union(lists: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The first list, then what the others have more; in order, if the lists are, as one table of all rows has them."""
    found = list(dict.fromkeys(value for one in lists for value in one))
    return in_order(found) if all(tuple(one) == in_order(one) for one in lists) else tuple(found)


def in_classes(y: Tensor, own: Sequence[str], schema: Prepared, task: str) -> Tensor:
    """Targets of a table in the classes of a schema.

    Raises:
        UserError: another task, or a class, label or target that the schema does not have.

    >>> schema = Prepared((), (), (), classes=("no", "perhaps", "yes"))
    >>> in_classes(torch.tensor([0, 1]), ["no", "yes"], schema, "classification")
    tensor([0, 2])
    """
    if task != schema.task:
        raise UserError(
            f"the task of the table is {task}, that of the schema {schema.task}; give --data.task {schema.task}"
        )
    if task != "classification":
        if tuple(own) != schema.classes:
            raise UserError(
                f"the schema has the targets {', '.join(schema.classes)}, the table was asked for {', '.join(own)}"
            )
        return y
    if unknown := [name for name in own if name not in schema.classes]:
        raise UserError(f"the target has {unknown[0]!r}, which is no class of the schema: {', '.join(schema.classes)}")
    return torch.tensor([schema.classes.index(name) for name in own], dtype=y.dtype)[y]
