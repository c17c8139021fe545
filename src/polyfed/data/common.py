"""One preprocessing for tables in several places: what it is fitted on, and examples that are given it.

Each place has coded its rows by its own categories and classes. Once all know the common ones, rows are coded by these, and
targets of regression are scaled by what is known of all places.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples import Examples
from polyfed.data.features import Column, Prepared, moments
from polyfed.data.schema import in_classes, merge_schemas, read_schema, schema_of


def prepared_of(examples: Examples) -> Prepared:
    """The preprocessing of examples of a table.

    Raises:
        UserError: they are of none.
    """
    if not isinstance(examples.transform, Prepared):
        raise UserError("federated preprocessing needs examples of one table at all clients (pf.data.table)")
    return examples.transform


def sums(train: Examples, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How many training rows of a table have each column of numbers, and the sum of their values, or around a mean of the
    squares of what they differ from it by; after them the same of targets of regression, in the table's unit.

    Args:
        train: of a table.
        mean: of the same columns and targets.

    Returns:
        Two float64 tensors of shape (columns of numbers + targets,).
    """
    known = prepared_of(train)
    plain = len(known.mean)
    count, total = moments(train, known.columns, None if mean is None else mean[:plain])
    if known.task != "regression":
        return count, total
    y = _in_unit(train.labels, known)
    y = y if mean is None else (y - mean[plain:]) ** 2
    rows = torch.full(y.shape[1:], float(len(y)), dtype=torch.float64)
    return torch.cat([count, rows]), torch.cat([total, y.sum(0)])


def _in_unit(y: Tensor, known: Prepared) -> Tensor:
    """Targets in the table's unit, float64, shape (n, targets)."""
    mean, spread = torch.tensor(known.target or ((0.0, 1.0),), dtype=torch.float64).T
    found: Tensor = y.double().reshape(len(y), -1) * spread + mean
    return found


def unsettled(tables: Sequence[Prepared]) -> bool:
    """Whether tables have yet to agree on one preprocessing: that of sums over all sites, which was read one by one."""
    asked = [table for table in tables if table.scope == "federated"]
    return len(set(asked)) > 1 or any(set(table.target) == {(0.0, 1.0)} for table in asked)


def merged(tables: Mapping[str, Prepared]) -> Prepared:
    """What tables have in common: the same columns, with the categories and classes of any, and nothing fitted yet.

    Args:
        tables: by the site that has it.

    Raises:
        UserError: a site has other columns, or in another order, another task or other targets.

    >>> one, two = Prepared((Column("sex", ("f", "m")),), (), ()), Prepared((Column("sex", ("f", "x")),), (), ())
    >>> merged({"north": one, "south": two}).columns
    (Column(name='sex', categories=('f', 'm', 'x'), missing=False),)
    """
    first, like = next(iter(tables.items()))
    for site, own in tables.items():
        if flaw := _unlike(like, own):
            raise UserError(
                f"site {site!r} has another table than {first!r}: {flaw}; preprocess='federated' needs the same columns in "
                "the same order at all sites (columns=...)"
            )
    found = read_schema(merge_schemas(*map(schema_of, tables.values())))
    return like if (found.columns, found.classes) == (like.columns, like.classes) else found


def _unlike(one: Prepared, other: Prepared) -> str:
    names = [[column.name for column in known.columns] for known in (one, other)]
    less, more = ([repr(n) for n in a if n not in b] for a, b in (names, names[::-1]))
    if less or more:
        parts = [f"it has no column {', '.join(less[:5])}"] if less else []
        return ", and ".join([*parts, *([f"it has {', '.join(more[:5])} more"] if more else [])])
    if names[0] != names[1]:
        return "its columns are in another order"
    if one.task != other.task or (one.task != "classification" and one.classes != other.classes):
        return "its targets are others"
    pairs = zip(one.columns, other.columns, strict=True)
    odd = [a.name for a, b in pairs if (a.categories is None) != (b.categories is None)]
    return f"column {odd[0]!r} holds numbers at one and categories at the other" if odd else ""


def coded(examples: Sequence[Examples], common: Prepared) -> list[Examples]:
    """Examples of one table, coded, scaled and prepared by what is common to all places. Those that share a store share one
    afterwards.

    Raises:
        UserError: the common table is not that of these, or lacks a category or class of theirs.

    >>> own = Prepared((Column("sex", ("f", "x")),), (), (), classes=("no", "yes"))
    >>> rows = Examples(torch.tensor([[0.0], [1.0]]), torch.tensor([1, 0]), transform=own)
    >>> (both,) = coded([rows], Prepared((Column("sex", ("f", "m", "x")),), (), (), classes=("no", "perhaps", "yes")))
    >>> both.x.tolist(), both.y.tolist()
    ([[0.0], [2.0]], [2, 0])
    """
    stores: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    found = []
    for part in examples:
        own, place = prepared_of(part), (id(part.x), id(part.y))
        if place not in stores:
            if flaw := _unlike(own, common):
                raise UserError(f"the common table is not that of these rows: {flaw}")
            stores[place] = _inputs(part.tensor, own, common), _targets(part.y, own, common)
        x, y = stores[place]
        found.append(Examples(x, y, part.index, common, part.augment, part.columns, part.group))
    return found


def _inputs(x: Tensor, own: Prepared, common: Prepared) -> Tensor:
    if own.columns == common.columns:
        return x
    new = x.clone()
    for position, (before, after) in enumerate(zip(own.columns, common.columns, strict=True)):
        if before.missing and not after.missing:
            raise UserError(f"column {before.name!r} has empty cells here, which the common table does not know")
        if before.categories is not None and before != after:
            new[:, position] = _codes(before, after)[x[:, position].long()].to(x.dtype)
    return new


def _codes(before: Column, after: Column) -> Tensor:
    """The new code of each category, of rows without one, and, at the end, of those that are of none (-1)."""
    old, new = before.categories or (), after.categories or ()
    if lost := [value for value in old if value not in new]:
        raise UserError(f"column {before.name!r} has {len(lost)} categories that the common table does not know")
    return torch.tensor([*map(new.index, old), *([len(new)] if before.missing else []), -1])


def _targets(y: Tensor, own: Prepared, common: Prepared) -> Tensor:
    if own.task != "regression":
        return y if own.classes == common.classes else in_classes(y, own.classes, common, own.task)
    if own.target == common.target:
        return y
    mean, spread = torch.tensor(common.target, dtype=torch.float64).T
    scaled: Tensor = (_in_unit(y, own) - mean) / spread
    return scaled.to(torch.float32).view_as(y)
