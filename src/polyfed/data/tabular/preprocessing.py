"""Converts the rows of a table to inputs of a network: scales numbers, fills in missing values, encodes categories.

A table is stored as it was read, one number a cell: a number itself (NaN where there is none), or the index of a category.
`TablePreprocessor` converts batches of these. So one store serves all sites, equal rows are found, and a network can be
given raw rows later. The arithmetic is that of scikit-learn's `StandardScaler`, `SimpleImputer(add_indicator=True)` and
`OneHotEncoder(handle_unknown="ignore")` in a `ColumnTransformer` (tested), but imports faster and is saved as JSON.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NotRequired, TypedDict, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import is_numeric_text
from polyfed.core.io.text.advice import keep_advice_for_this_process
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.core.io.values.validation import validation_error
from polyfed.core.tasks.task import Task, TaskSpec
from polyfed.core.tasks.task_lookup import get_task
from polyfed.data.formats.files import Table
from polyfed.data.tabular.csv_reader import CSVFormat
from polyfed.data.tabular.table_reader import (
    check_columns_exist,
    column_as_arrow_array,
    column_as_numbers,
    column_as_texts,
    is_empty_non_numeric_column,
    is_numeric_column,
    is_text_type,
    read_table,
)
from polyfed.tasks import Classification

MISSING_CATEGORY = "(missing)"
RELATIVE_ROUNDING = 1e-9
"""Numbers with a smaller standard deviation, relative to their mean, do not vary."""
CONSTANT_COLUMNS_WARNING = "columns that had one value, or none, in all training rows"
"""Begins the warning of `warn_of_changed_constants`; a filter of warnings finds it by these words."""
_SHOWN = 5  # names shown in a sentence
_FAR = 10  # standard deviations
Scope = Literal["site", "federated"]


@final
@dataclass(frozen=True)
class Column:
    """Describes a feature column of a table: its name, and its categories (None if it is numeric).

    Args:
        name: of the column.
        categories: the texts that it may hold, in order; None for numbers.
        missing: whether an extra feature marks rows without a value.
    """

    name: str
    categories: tuple[str, ...] | None = None
    missing: bool = False


class _ReadingJSON(TypedDict, total=False):
    """Describes how the table's files are written, where that is not as usual: fields of `CSVFormat`."""

    missing: list[str]
    delimiter: str
    decimal: str
    encoding: str


class _PreprocessorJSON(TypedDict):
    """Describes the JSON form of a `TablePreprocessor`."""

    columns: list[dict[str, Any]]
    mean: list[float]
    spread: list[float]
    target: list[list[float]]
    scope: Scope
    classes: list[str]
    task: TaskSpec
    reading: NotRequired[_ReadingJSON]
    site: NotRequired[str]


@final
@dataclass(frozen=True)
class TablePreprocessor:
    """Converts rows of a table to inputs of a network, with statistics fitted on training rows.

    It is the `transform` of a table's `Examples`. Inputs are in this order: the numbers, (value − mean) / spread, 0 where
    there is none, and always 0 for a column that did not vary in the training rows, whose scale is unknown; for those with
    `missing` 1 where there is none, else 0; one 0 or 1 for each category (and for no category, if `missing`). A category
    that is not in the list gives zeros.

    Args:
        columns: of the table, in the order of the store.
        mean, spread: mean and standard deviation of the columns of numbers, in order; a spread of 0 for a column that did
            not vary.
        target: mean and spread by which regression targets were scaled, one pair per target.
        scope: "site" if fitted on one site's rows, "federated" if on sums over all sites.
        classes: names of the classes, labels or targets, to label predictions.
        task: of the targets, to interpret predictions.
        reading: how the table was read, its texts for no value among it; new rows are read alike.
        site: name of the column with the site of each row; None if the table has none.

    Raises:
        UserError: another number of means or spreads than of columns of numbers, a spread that is negative, or one of a
            target that is not positive.

    >>> columns = Column("age", missing=True), Column("sex", ("f", "m"))
    >>> ready = TablePreprocessor(columns, (50.0,), (10.0,))
    >>> ready.feature_names, ready(ready.encode([{"age": 70, "sex": "m"}, {"age": None, "sex": "f"}])).tolist()
    (('age', 'age is missing', 'sex=f', 'sex=m'), [[2.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    """

    columns: tuple[Column, ...] = field(repr=False)  # a `repr` shows no values of the data
    mean: tuple[float, ...] = field(repr=False)
    spread: tuple[float, ...] = field(repr=False)
    target: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    scope: Scope = "site"
    classes: tuple[str, ...] = ()
    task: Task = field(default_factory=Classification)
    reading: CSVFormat = field(default=CSVFormat(), repr=False, compare=False)
    site: str | None = field(default=None, repr=False, compare=False)
    is_rowwise: ClassVar[bool] = True  # each row is prepared by itself, so that `Examples` may keep prepared rows

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", get_task(self.task))
        count = sum(column.categories is None for column in self.columns)
        if len(self.mean) != count or len(self.spread) != count:
            raise UserError(f"{count} columns of numbers need as many means and spreads, got {len(self.mean)} and "
                            f"{len(self.spread)}")  # fmt: skip
        if any(not spread >= 0 for spread in self.spread) or any(not spread > 0 for _, spread in self.target):
            raise UserError(
                f"spreads must be positive (0 for a column that does not vary), got {self.spread}, of targets {self.target}"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Returns the names of the network's input features, in their order."""
        plain = [c.name for c in self.columns if c.categories is None]
        marked = [f"{c.name} is missing" for c in self.columns if c.categories is None and c.missing]
        shares = [f"{c.name}={value}" for c in self.columns for value in _category_names(c)]
        return (*plain, *marked, *shares)

    @property
    def divisors(self) -> tuple[float, ...]:
        """Returns each numeric column's standard deviation; infinity for a constant one, which becomes 0."""
        return tuple(spread or math.inf for spread in self.spread)

    @cached_property
    def _tensors(self) -> dict[Any, Any]:
        return {}

    def _column_tensors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the tensors with which `__call__` computes, on the device and in the type of `x`; cached.

        They are the indices of the columns of numbers, means, divisors, indices of the columns with `missing`, and column
        and code of each category.
        """
        key = (x.device, x.dtype)
        if key not in self._tensors:
            numeric = [i for i, c in enumerate(self.columns) if c.categories is None]
            marked = [i for i in numeric if self.columns[i].missing]
            category_codes = [
                (i, code) for i, c in enumerate(self.columns) for code, _ in enumerate(_category_names(c))
            ]
            integer_tensors = (
                torch.tensor(numbers, dtype=torch.int64)
                for numbers in (numeric, marked, [i for i, _ in category_codes])
            )
            float_tensors = (
                torch.tensor(numbers, dtype=x.dtype)
                for numbers in (self.mean, self.divisors, [c for _, c in category_codes])
            )
            (numbers_, marked_, owners), (mean, spread, codes) = integer_tensors, float_tensors
            self._tensors[key] = tuple(t.to(x.device) for t in (numbers_, mean, spread, marked_, owners, codes))
        constants: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = self._tensors[key]
        return constants

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tensors"}

    def __call__(self, x: Tensor) -> Tensor:
        """Returns a network's inputs for a batch of encoded rows: float32, shape (batch, features)."""
        numeric, mean, spread, marked, owners, codes = self._column_tensors(x)
        scaled = (x[:, numeric] - mean) / spread
        parts = [torch.where(scaled.isnan(), 0.0, scaled).to(torch.float32)]
        if len(marked):
            parts.append(x[:, marked].isnan().to(torch.float32))
        if len(owners):
            parts.append((x[:, owners] == codes).to(torch.float32))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def encode(self, rows: Any) -> Tensor:
        """Converts rows of a user's table to numbers: numeric cells, and positions of categories.

        Args:
            rows: a pandas frame, a mapping of columns, a list of {name: value}, or the path of a CSV or Parquet file. Other
                columns are not read.

        Raises:
            UserError: a column is missing, or holds texts where the run had numbers.
        """
        return encode_table(self.read(rows), self.columns).to(torch.float64)

    def read(self, rows: Any) -> Table:
        """Reads rows of a user's table, as `encode` takes them, in the way in which the run's table was read.

        Raises:
            UserError: the table is unreadable or empty.
        """
        return read_table(rows, **asdict(self.reading))

    def changed_constant_columns(self, x: Tensor) -> tuple[str, ...]:
        """Returns columns constant or empty in training that have other values in `x`.

        >>> ready = TablePreprocessor((Column("age"), Column("chol")), (50.0, 0.0), (10.0, 0.0))
        >>> ready.changed_constant_columns(torch.tensor([[70.0, 240.0]])), ready(torch.tensor([[70.0, 240.0]])).tolist()
        (('chol',), [[2.0, 0.0]])
        """
        numeric = [i for i, column in enumerate(self.columns) if column.categories is None]
        changed_names = []
        for position, mean, spread in zip(numeric, self.mean, self.spread, strict=True):
            if spread == 0 and bool(((x[:, position].double() - mean).abs() > RELATIVE_ROUNDING * abs(mean)).any()):
                changed_names.append(self.columns[position].name)
        return tuple(changed_names)

    def warn_of_changed_constants(self, x: Tensor, name: str) -> None:
        """Warns if columns constant in training have other values in the encoded rows `x` of `name`."""
        if changed := self.changed_constant_columns(x):
            warn_of_changed_constants({name: changed})

    def warn_of_unlike_rows(self, x: Tensor, name: str) -> None:
        """Warns if the encoded rows `x`, called `name`, are not like the training rows.

        It does if columns that were constant have other values, or numbers are so far off that they may be in another unit.
        """
        self.warn_of_changed_constants(x, name)
        numeric = [i for i, column in enumerate(self.columns) if column.categories is None]
        mean, divisors = torch.tensor([self.mean, self.divisors], dtype=torch.float64)
        distances = ((x[:, numeric].double() - mean) / divisors).abs()
        far = [self.columns[i].name for i, z in zip(numeric, distances.T, strict=True) if z.nanmedian() > _FAR]
        if far:
            warnings.warn(
                f"{name}: {_join_first(list(map(repr, far)))} is typically more than {_FAR} standard deviations away from "
                "the training rows; check that it is in the same unit",
                UserWarning,
                stacklevel=3,
            )

    def unscale_outputs(self, outputs: Tensor) -> Tensor:
        """Converts regression outputs to the table's unit; those of other tasks are unchanged."""
        if not self.target:
            return outputs
        mean, spread = torch.tensor(self.target, dtype=torch.float64).T
        unscaled: Tensor = outputs.double() * spread + mean
        return unscaled.to(torch.float32)

    def to_json_dict(self) -> dict[str, Any]:
        """Returns the preprocessing as a dict for JSON, from which `preprocessor_from_json` rebuilds it."""
        columns = [
            {"name": c.name, "categories": None if c.categories is None else list(c.categories), "missing": c.missing}
            for c in self.columns
        ]
        usual = asdict(CSVFormat())
        reading = {name: value for name, value in asdict(self.reading).items() if value != usual[name]}
        return {
            "columns": columns, "mean": list(self.mean), "spread": list(self.spread),
            "target": [list(pair) for pair in self.target], "scope": self.scope, "classes": list(self.classes),
            "task": self.task.spec, **({"reading": reading} if reading else {}),
            **({} if self.site is None else {"site": self.site}),
        }  # fmt: skip


def preprocessor_from_json(content: Any) -> TablePreprocessor:
    """Builds the preprocessing from the content of `models/ID.preprocessing.json`, which a run wrote next to a network.

    Raises:
        UserError: the content is not such a description.

    >>> ready = TablePreprocessor((Column("sex", ("f", "m"), True),), (), ())
    >>> preprocessor_from_json(ready.to_json_dict()) == ready
    True
    """
    field_types = {"name": str, "categories": list[str] | None, "missing": bool}
    error = validation_error(content, _PreprocessorJSON)
    for column in () if error else content["columns"]:
        error = error or next(
            filter(None, (validation_error(column.get(name), kind, name) for name, kind in field_types.items())), ""
        )
    if error:
        raise UserError(f"this is not the preprocessing of a table: {error}")
    columns = tuple(
        Column(c["name"], None if c["categories"] is None else tuple(c["categories"]), c["missing"])
        for c in content["columns"]
    )
    target = tuple((pair[0], pair[1]) for pair in content["target"])
    reading = {
        name: value for name, value in content.get("reading", {}).items() if name in _ReadingJSON.__annotations__
    }
    form = CSVFormat(**{**reading, "missing": tuple(reading.get("missing", ()))})
    return TablePreprocessor(columns, tuple(content["mean"]), tuple(content["spread"]), target, content["scope"],
                    tuple(content["classes"]), get_task(content["task"]), form, content.get("site"))  # fmt: skip


def _category_names(column: Column) -> tuple[str, ...]:
    """Returns the names of a column's categories, followed by a name for missing values if there are any."""
    if column.categories is None:
        return ()
    return (*column.categories, MISSING_CATEGORY) if column.missing else column.categories


def encode_table(table: Any, columns: Sequence[Column]) -> Tensor:
    """Converts a table to numbers (numeric cells, and positions of categories): float64, shape (rows, columns).

    Raises:
        UserError: a column is missing, or of another kind.
    """
    check_columns_exist(table, [column.name for column in columns], "features")
    stored = np.empty((table.num_rows, len(columns)))
    for position, column in enumerate(columns):
        if column.categories is None:
            empty = is_empty_non_numeric_column(table, column.name)
            if not empty and not is_numeric_column(table, column.name):
                raise UserError(f"column {column.name!r} must hold numbers, as it did in the table of the run, got "
                                f"{_describe_non_numbers(table, column.name)}")  # fmt: skip
            stored[:, position] = np.nan if empty else column_as_numbers(table, column.name)
            continue
        code = {value: number for number, value in enumerate(column.categories)}
        cells = column_as_texts(table, column.name).tolist()
        absent = len(code) if column.missing else -1
        stored[:, position] = [absent if value is None else code.get(value, -1) for value in cells]
        unknown = sorted({value for value in cells if value is not None and value not in code})
        if unknown:
            warnings.warn(
                f"column {column.name!r} has {', '.join(map(repr, unknown[:5]))}, which the table of the run did not have; "
                "such a row counts as having none of its categories",
                UserWarning,
                stacklevel=2,
            )
    return torch.from_numpy(stored)


def _describe_non_numbers(table: Any, name: str) -> str:
    """Returns a description of the content of a column that should hold numbers, and does not."""
    kind = column_as_arrow_array(table, name).type
    if not is_text_type(kind):
        return str(kind)
    cells = column_as_texts(table, name)
    odd = [row for row, value in enumerate(cells.tolist()) if value is not None and not is_numeric_text(value)]
    word, place = str(cells[odd[0]])[:40], format_row_numbers(np.array(odd))
    if any(map(str.isdigit, word)):  # a measurement of a patient, which is not shown
        return f"{kind}: a number in another form in {place}; write numbers as in 1234.5"
    return f"{kind}: {word!r} in {place}; leave cells without a value empty"


def warn_of_changed_constants(columns_by_owner: Mapping[str, Sequence[str]]) -> None:
    """Issues a warning about columns that were constant in the training rows and have other values in later rows.

    Args:
        columns_by_owner: names of such columns, by their owner, such as "site 'north'".
    """
    sentences = [
        f"{whose}: {_join_first(list(map(repr, names)))}" for whose, names in columns_by_owner.items() if names
    ]
    if not sentences:
        return
    warnings.warn(
        keep_advice_for_this_process(
            f"{CONSTANT_COLUMNS_WARNING} have other values now, for which networks get 0: "
            f"{_join_first(sentences, '; ')}. Give more rows to train on, leave the columns out (drop=..., --data.drop), "
            "or scale by the rows of all sites (preprocess='federated', --data.preprocess federated)"
        ),
        UserWarning,
        stacklevel=3,
    )


def _join_first(names: Sequence[str], between: str = ", ") -> str:
    more = f"{between}{len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more
