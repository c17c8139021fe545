"""Gives the tables of several sites a common preprocessing: merges columns and categories, and converts the rows to it.

Each place has coded its rows by its own categories and classes. Once all know the common ones, rows are recoded by these,
and regression targets are scaled by statistics over all places.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.data.tabular.fit_preprocessor import count_and_sum_numeric_columns
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor
from polyfed.data.tabular.schema import merge_schemas, read_schema, recode_targets_to_schema, table_schema


def preprocessor_of(examples: Examples) -> TablePreprocessor:
    """Returns the preprocessing of examples that come from a table.

    Raises:
        UserError: the examples are not from a table.
    """
    if not isinstance(examples.transform, TablePreprocessor):
        raise UserError("federated preprocessing needs examples of one table at all clients (pf.data.split_table)")
    return examples.transform


def count_and_sum_columns_and_targets(train: Examples, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns training values' counts and sums by numeric column, then by regression target.

    With `mean` it sums the squared differences from it instead. Targets are in the table's unit.

    Args:
        train: examples of a table.
        mean: of the same columns and targets; None for plain sums.

    Returns:
        Counts and sums, two float64 tensors of shape (columns of numbers + targets,).
    """
    preprocessor = preprocessor_of(train)
    num_numeric = len(preprocessor.mean)
    count, total = count_and_sum_numeric_columns(
        train, preprocessor.columns, None if mean is None else mean[:num_numeric]
    )
    if not preprocessor.task.standardises_targets:
        return count, total
    y = _unscale_targets(train.labels, preprocessor)
    y = y if mean is None else (y - mean[num_numeric:]) ** 2
    rows = torch.full(y.shape[1:], float(len(y)), dtype=torch.float64)
    return torch.cat([count, rows]), torch.cat([total, y.sum(0)])


def _unscale_targets(y: Tensor, preprocessor: TablePreprocessor) -> Tensor:
    """Returns regression targets in the unit of the table, float64, shape (n, targets)."""
    mean, spread = torch.tensor(preprocessor.target or ((0.0, 1.0),), dtype=torch.float64).T
    targets: Tensor = y.double().reshape(len(y), -1) * spread + mean
    return targets


def needs_common_preprocessing(tables: Sequence[TablePreprocessor]) -> bool:
    """Returns whether sites' tables are set to share one preprocessing, but do not share one yet."""
    federated_tables = [table for table in tables if table.scope == "federated"]
    return len(set(federated_tables)) > 1 or any(set(table.target) == {(0.0, 1.0)} for table in federated_tables)


def merge_table_definitions(tables: Mapping[str, TablePreprocessor]) -> TablePreprocessor:
    """Merges sites' tables: common columns, all categories and classes, without statistics.

    Args:
        tables: the preprocessing of each site's table, by site.

    Raises:
        UserError: a site has other columns, or in another order, another task or other targets.

    >>> first, second = (TablePreprocessor((Column("sex", ("f", "m")),), (), ()),
    ...             TablePreprocessor((Column("sex", ("f", "x")),), (), ()))
    >>> merge_table_definitions({"north": first, "south": second}).columns
    (Column(name='sex', categories=('f', 'm', 'x'), missing=False),)
    """
    first_site, first_table = next(iter(tables.items()))
    for site, site_table in tables.items():
        if difference := _table_difference(first_table, site_table):
            raise UserError(
                f"site {site!r} has another table than {first_site!r}: {difference}; preprocess='federated' needs the same "
                "columns in the same order at all sites (columns=...)"
            )
    common_table = read_schema(merge_schemas(*map(table_schema, tables.values())))
    return (
        first_table
        if (common_table.columns, common_table.classes) == (first_table.columns, first_table.classes)
        else common_table
    )


def _table_difference(first: TablePreprocessor, second: TablePreprocessor) -> str:
    names = [[column.name for column in table.columns] for table in (first, second)]
    less, more = ([repr(n) for n in a if n not in b] for a, b in (names, names[::-1]))
    if less or more:
        parts = [f"it has no column {', '.join(less[:5])}"] if less else []
        return ", and ".join([*parts, *([f"it has {', '.join(more[:5])} more"] if more else [])])
    if names[0] != names[1]:
        return "its columns are in another order"
    if first.task != second.task or (not first.task.one_class_per_example and first.classes != second.classes):
        return "its targets are others"
    pairs = zip(first.columns, second.columns, strict=True)
    odd = [a.name for a, b in pairs if (a.categories is None) != (b.categories is None)]
    return f"column {odd[0]!r} holds numbers at one and categories at the other" if odd else ""


def recode_examples(examples: Sequence[Examples], common: TablePreprocessor) -> list[Examples]:
    """Returns the examples of one table with categories, classes and scaling converted to the common preprocessing.

    Examples that share a store share a store afterwards.

    Args:
        examples: of one table.
        common: the common preprocessing.

    Raises:
        UserError: the common table is not that of these examples, or lacks one of their categories or classes.

    >>> site_preprocessor = TablePreprocessor((Column("sex", ("f", "x")),), (), (), classes=("no", "yes"))
    >>> rows = Examples(torch.tensor([[0.0], [1.0]]), torch.tensor([1, 0]), transform=site_preprocessor)
    >>> (both,) = recode_examples([rows],
    ...     TablePreprocessor((Column("sex", ("f", "m", "x")),), (), (), classes=("no", "perhaps", "yes")))
    >>> both.x.tolist(), both.y.tolist()
    ([[0.0], [2.0]], [2, 0])
    """
    stores: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    recoded = []
    for part in examples:
        preprocessor, store_key = preprocessor_of(part), (id(part.x), id(part.y))
        if store_key not in stores:
            if difference := _table_difference(preprocessor, common):
                raise UserError(f"the common table is not that of these rows: {difference}")
            stores[store_key] = (
                _recode_inputs(part.input_tensor, preprocessor, common),
                _recode_targets(part.y, preprocessor, common),
            )
        x, y = stores[store_key]
        recoded.append(Examples(x, y, part.index, common, part.augment, part.columns, part.group, part.time))
    return recoded


def _recode_inputs(x: Tensor, preprocessor: TablePreprocessor, common: TablePreprocessor) -> Tensor:
    if preprocessor.columns == common.columns:
        return x
    new = x.clone()
    for position, (before, after) in enumerate(zip(preprocessor.columns, common.columns, strict=True)):
        if before.missing and not after.missing:
            raise UserError(f"column {before.name!r} has empty cells here, which the common table does not know")
        if before.categories is not None and before != after:
            new[:, position] = _code_translation(before, after)[x[:, position].long()].to(x.dtype)
    return new


def _code_translation(before: Column, after: Column) -> Tensor:
    """Returns the new code of each category, then of missing values, and last of unknown categories (-1)."""
    old, new = before.categories or (), after.categories or ()
    if missing_categories := [value for value in old if value not in new]:
        raise UserError(
            f"column {before.name!r} has {len(missing_categories)} categories that the common table does not know"
        )
    return torch.tensor([*map(new.index, old), *([len(new)] if before.missing else []), -1])


def _recode_targets(y: Tensor, preprocessor: TablePreprocessor, common: TablePreprocessor) -> Tensor:
    if not preprocessor.task.standardises_targets:
        return (
            y
            if preprocessor.classes == common.classes
            else recode_targets_to_schema(y, preprocessor.classes, common, preprocessor.task)
        )
    if preprocessor.target == common.target:
        return y
    mean, spread = torch.tensor(common.target, dtype=torch.float64).T
    scaled: Tensor = (_unscale_targets(y, preprocessor) - mean) / spread
    return scaled.to(torch.float32).view_as(y)
