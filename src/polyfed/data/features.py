"""From the rows of a table to a network's inputs: numbers scaled, missing values filled in, categories as zeros and ones.

A table is stored as it was read, one number a cell: a number itself (NaN where there is none), or the position of a
category. `Prepared` makes a batch of these ready. So one store serves all sites, equal rows are found, and a network can be
given raw rows later. The arithmetic is that of scikit-learn's `StandardScaler`, `SimpleImputer(add_indicator=True)` and
`OneHotEncoder(handle_unknown="ignore")` in a `ColumnTransformer` (tested), without the two seconds that they take to import
and in a form that can be saved as JSON.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypedDict, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Task
from polyfed.core.errors import UserError
from polyfed.core.examples import Examples
from polyfed.core.typed import conforms
from polyfed.data.frames import (
    check_columns,
    holds_numbers,
    is_empty,
    is_number_text,
    is_text,
    numbers,
    read_table,
    rows_of,
    texts,
    values,
)

ABSENT = "(missing)"
_CONSTANT = 1e-9  # of the mean, below which numbers do not vary
_SHOWN = 5  # names in a sentence
Scope = Literal["site", "federated"]


@final
@dataclass(frozen=True)
class Column:
    """A column of a table that networks see.

    Args:
        name: of the column.
        categories: the texts that it may hold, in order; None for numbers.
        missing: whether rows without a value are marked by a feature of their own.
    """

    name: str
    categories: tuple[str, ...] | None = None
    missing: bool = False


class _Described(TypedDict):
    """A `Prepared` as JSON holds it."""

    columns: list[dict[str, Any]]
    mean: list[float]
    spread: list[float]
    target: list[list[float]]
    scope: Scope
    classes: list[str]
    task: Task


@final
@dataclass(frozen=True)
class Prepared:
    """What turns stored rows into inputs; fitted on training rows. It is the `transform` of a table's `Examples`.

    Inputs are in this order: the numbers, (value − mean) / spread, 0 where there is none, and always 0 for a column that did
    not vary in the training rows, whose scale nobody knows; for those with `missing` 1 where
    there is none, else 0; one 0 or 1 for each category (and for no category, if `missing`). A category that is not in
    the list gives zeros.

    Args:
        columns: of the table, in the order of the store.
        mean, spread: of the columns of numbers, in their order; a spread of 0 is of a column that did not vary.
        target: mean and spread by which regression targets were scaled, a pair a target.
        scope: "site" if fitted on one site's rows, "federated" if on sums over all sites.
        classes: names of the classes, labels or targets, for those who read predictions.
        task: of the targets, for the same.

    Raises:
        UserError: another number of means or spreads than of columns of numbers, a spread that is negative, or one of a
            target that is not positive.

    >>> columns = Column("age", missing=True), Column("sex", ("f", "m"))
    >>> ready = Prepared(columns, (50.0,), (10.0,))
    >>> ready.features, ready(ready.encode([{"age": 70, "sex": "m"}, {"age": None, "sex": "f"}])).tolist()
    (('age', 'age is missing', 'sex=f', 'sex=m'), [[2.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    """

    columns: tuple[Column, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    target: tuple[tuple[float, float], ...] = ()
    scope: Scope = "site"
    classes: tuple[str, ...] = ()
    task: Task = "classification"

    def __post_init__(self) -> None:
        count = sum(column.categories is None for column in self.columns)
        if len(self.mean) != count or len(self.spread) != count:
            raise UserError(f"{count} columns of numbers need as many means and spreads, got {len(self.mean)} and "
                            f"{len(self.spread)}")  # fmt: skip
        if any(not spread >= 0 for spread in self.spread) or any(not spread > 0 for _, spread in self.target):
            raise UserError(
                f"spreads must be positive (0 for a column that does not vary), got {self.spread}, of targets {self.target}"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs, in their order."""
        plain = [c.name for c in self.columns if c.categories is None]
        marked = [f"{c.name} is missing" for c in self.columns if c.categories is None and c.missing]
        shares = [f"{c.name}={value}" for c in self.columns for value in _values(c)]
        return (*plain, *marked, *shares)

    @property
    def divisors(self) -> tuple[float, ...]:
        """By what numbers are divided: their spread; infinity for a column that did not vary, which so is 0."""
        return tuple(spread or math.inf for spread in self.spread)

    @cached_property
    def _tensors(self) -> dict[Any, Any]:
        return {}

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Which columns are numbers, their means and spreads, which are marked, and column and code of each category."""
        key = (x.device, x.dtype)
        if key not in self._tensors:
            plain = [i for i, c in enumerate(self.columns) if c.categories is None]
            marked = [i for i in plain if self.columns[i].missing]
            shares = [(i, code) for i, c in enumerate(self.columns) for code, _ in enumerate(_values(c))]
            whole = (torch.tensor(found, dtype=torch.int64) for found in (plain, marked, [i for i, _ in shares]))
            real = (torch.tensor(found, dtype=x.dtype) for found in (self.mean, self.divisors, [c for _, c in shares]))
            (numbers_, marked_, owners), (mean, spread, codes) = whole, real
            found = (numbers_, mean, spread, marked_, owners, codes)
            self._tensors[key] = tuple(tensor.to(x.device) for tensor in found)
        constants: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = self._tensors[key]
        return constants

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tensors"}

    def __call__(self, x: Tensor) -> Tensor:
        """Inputs of a batch of stored rows: float32, shape (batch, features)."""
        own, mean, spread, marked, owners, codes = self._constants(x)
        scaled = (x[:, own] - mean) / spread
        parts = [torch.where(scaled.isnan(), 0.0, scaled).to(torch.float32)]
        if len(marked):
            parts.append(x[:, marked].isnan().to(torch.float32))
        if len(owners):
            parts.append((x[:, owners] == codes).to(torch.float32))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def encode(self, rows: Any) -> Tensor:
        """Raw rows as they are stored.

        Args:
            rows: a pandas frame, a mapping of columns, a list of {name: value}, or the path of a CSV or Parquet file. Other
                columns are not read.

        Raises:
            UserError: a column is missing, or holds texts where the run had numbers.
        """
        return encode(read_table(rows), self.columns).to(torch.float64)

    def constants_changed(self, x: Tensor) -> tuple[str, ...]:
        """Names of the columns that had one value, or none, in the training rows and have another in stored rows.

        >>> ready = Prepared((Column("age"), Column("chol")), (50.0, 0.0), (10.0, 0.0))
        >>> ready.constants_changed(torch.tensor([[70.0, 240.0]])), ready(torch.tensor([[70.0, 240.0]])).tolist()
        (('chol',), [[2.0, 0.0]])
        """
        plain = [i for i, column in enumerate(self.columns) if column.categories is None]
        found = []
        for place, mean, spread in zip(plain, self.mean, self.spread, strict=True):
            if spread == 0 and bool(((x[:, place].double() - mean).abs() > _CONSTANT * abs(mean)).any()):
                found.append(self.columns[place].name)
        return tuple(found)

    def warn_of_constants(self, x: Tensor, name: str) -> None:
        """Warns of stored rows with another value in a column that did not vary; `name` is what the rows are called."""
        if changed := self.constants_changed(x):
            warn_of_constants({name: changed})

    def outputs(self, given: Tensor) -> Tensor:
        """What a network gives for regression, in the unit of the table; other outputs as they are."""
        if not self.target:
            return given
        mean, spread = torch.tensor(self.target, dtype=torch.float64).T
        found: Tensor = given.double() * spread + mean
        return found.to(torch.float32)

    def described(self) -> dict[str, Any]:
        """For JSON; `from_description` reads it."""
        columns = [
            {"name": c.name, "categories": None if c.categories is None else list(c.categories), "missing": c.missing}
            for c in self.columns
        ]
        return {
            "columns": columns, "mean": list(self.mean), "spread": list(self.spread),
            "target": [list(pair) for pair in self.target], "scope": self.scope, "classes": list(self.classes),
            "task": self.task,
        }  # fmt: skip


def from_description(content: Any) -> Prepared:
    """The preprocessing that a run wrote beside a model, `models/ID.preprocessing.json`.

    Raises:
        UserError: it is no such description.

    >>> ready = Prepared((Column("sex", ("f", "m"), True),), (), ())
    >>> from_description(ready.described()) == ready
    True
    """
    known = {"name": str, "categories": list[str] | None, "missing": bool}
    wrong = conforms(content, _Described)
    for one in () if wrong else content["columns"]:
        wrong = wrong or next(filter(None, (conforms(one.get(name), kind, name) for name, kind in known.items())), "")
    if wrong:
        raise UserError(f"this is no preprocessing of a table: {wrong}")
    columns = tuple(
        Column(c["name"], None if c["categories"] is None else tuple(c["categories"]), c["missing"])
        for c in content["columns"]
    )
    target = tuple((pair[0], pair[1]) for pair in content["target"])
    return Prepared(columns, tuple(content["mean"]), tuple(content["spread"]), target, content["scope"],
                    tuple(content["classes"]), content["task"])  # fmt: skip


def _values(column: Column) -> tuple[str, ...]:
    """The categories of a column, and after them that of rows without one."""
    if column.categories is None:
        return ()
    return (*column.categories, ABSENT) if column.missing else column.categories


def encode(table: Any, columns: Sequence[Column]) -> Tensor:
    """The cells of a table as they are stored: float64, shape (rows, columns).

    Raises:
        UserError: a column is missing, or of another kind.
    """
    check_columns(table, [column.name for column in columns], "features")
    stored = np.empty((table.num_rows, len(columns)))
    for position, column in enumerate(columns):
        if column.categories is None:
            empty = is_empty(table, column.name)
            if not empty and not holds_numbers(table, column.name):
                raise UserError(f"column {column.name!r} must hold numbers, as it did in the table of the run, got "
                                f"{_kind(table, column.name)}")  # fmt: skip
            stored[:, position] = np.nan if empty else numbers(table, column.name)
            continue
        code = {value: number for number, value in enumerate(column.categories)}
        found = texts(table, column.name).tolist()
        absent = len(code) if column.missing else -1
        stored[:, position] = [absent if value is None else code.get(value, -1) for value in found]
        unknown = sorted({value for value in found if value is not None and value not in code})
        if unknown:
            warnings.warn(
                f"column {column.name!r} has {', '.join(map(repr, unknown[:5]))}, which the table of the run did not have; "
                "such a row is taken as of none of its categories",
                UserWarning,
                stacklevel=2,
            )
    return torch.from_numpy(stored)


def _kind(table: Any, name: str) -> str:
    """What a column holds that is no column of numbers."""
    kind = values(table, name).type
    if not is_text(kind):
        return str(kind)
    cells = texts(table, name)
    odd = [row for row, value in enumerate(cells.tolist()) if value is not None and not is_number_text(value)]
    return f"{kind}: {str(cells[odd[0]])[:40]!r} in {rows_of(np.array(odd))}; leave cells without a value empty"


def warn_of_constants(changed: Mapping[str, Sequence[str]]) -> None:
    """Warns of columns that did not vary in training rows and do in others; none where there are none.

    Args:
        changed: names of such columns, by what has them, such as "site 'north'".
    """
    told = [f"{whose}: {_shown(list(map(repr, names)))}" for whose, names in changed.items() if names]
    if not told:
        return
    warnings.warn(
        "columns with one value, or none, in all training rows and with others later, for which networks get 0: "
        f"{_shown(told, '; ')}. Give more rows to train on, leave the columns out (drop=..., --data.drop), or scale by the "
        "rows of all sites (preprocess='federated', --data.preprocess federated)",
        UserWarning,
        stacklevel=3,
    )


def _shown(names: Sequence[str], between: str = ", ") -> str:
    more = f"{between}{len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more


def moments(train: Examples, columns: Sequence[Column], mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How many training rows have each column of numbers, and the sum of their values: or, around a mean, of the squares of
    what they differ from it by. Both float64, shape (columns of numbers,)."""
    own = [i for i, column in enumerate(columns) if column.categories is None]
    x = (train.tensor if train.index is None else train.tensor[train.index])[:, own].double()
    known = ~x.isnan()
    deviation = x if mean is None else (x - mean) ** 2
    return known.sum(0).double(), torch.where(known, deviation, 0.0).sum(0)


def of_moments(count: Tensor, total: Tensor) -> Tensor:
    """Means of sums; 0 where no row has a value."""
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), 0.0)


def prepared(like: Prepared, mean: Tensor, variance: Tensor, scope: Scope) -> Prepared:
    """The preprocessing with these means and variances; after those of columns may be those of targets."""
    plain, spread = len(like.mean), spread_of(mean, variance).tolist()
    units = [one or 1.0 for one in spread[plain:]]  # targets that do not vary keep their unit
    target = tuple(zip(mean[plain:].tolist(), units, strict=True)) or like.target
    return replace(like, mean=tuple(mean[:plain].tolist()), spread=tuple(spread[:plain]), target=target, scope=scope)


def spread_of(mean: Tensor, variance: Tensor) -> Tensor:
    """Standard deviations; 0 for numbers that do not vary."""
    spread = variance.sqrt()
    return torch.where(spread <= _CONSTANT * mean.abs(), torch.zeros_like(spread), spread)


def fitted(like: Prepared, trains: Sequence[Examples], scope: Scope = "site") -> Prepared:
    """The preprocessing fitted on training rows: of one site, or on the sums over several, in their order.

    >>> like = Prepared((Column("age"),), (0.0,), (1.0,))
    >>> rows = Examples(torch.tensor([[40.0], [60.0], [torch.nan]]), torch.tensor([0, 1, 0]))
    >>> fitted(like, [rows]).mean, fitted(like, [rows]).spread
    ((50.0,), (10.0,))
    """
    mean = of_moments(*_summed([moments(train, like.columns) for train in trains]))
    variance = of_moments(*_summed([moments(train, like.columns, mean) for train in trains]))
    return prepared(like, mean, variance, scope)


def _summed(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    count, total = (torch.zeros_like(part) for part in parts[0])
    for one, other in parts:
        count, total = count + one, total + other
    return count, total


def fitted_again(trains: Mapping[str, Examples]) -> dict[str, Prepared]:
    """For sites whose training rows have changed: each site's preprocessing, fitted on its new ones. Sites whose examples
    are of no table are left out."""
    known = {i: train.transform for i, train in trains.items() if isinstance(train.transform, Prepared)}
    together: dict[tuple[Column, ...], Prepared] = {}
    for i in known:
        if known[i].scope == "federated" and known[i].columns not in together:
            members = [trains[j] for j in known if known[j].columns == known[i].columns]
            together[known[i].columns] = fitted(known[i], members, "federated")
    return {
        i: together[own.columns] if own.scope == "federated" else fitted(own, [trains[i]]) for i, own in known.items()
    }
