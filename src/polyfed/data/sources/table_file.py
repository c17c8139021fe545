"""Reads a data set from a user's table: a CSV or Parquet file with target columns and, optionally, a column that names
each row's site.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.text_columns import check_targets_are_named, split_column_and_cuts
from polyfed.core.examples.text_labels import warn_of_names_that_look_alike
from polyfed.core.io.values.validation import check_field_types
from polyfed.data.formats.files import Table
from polyfed.data.pooled_dataset import PooledDataset, Source
from polyfed.data.tabular.columns import (
    check_task_option,
    drop_rows_without,
    find_feature_refusal,
    has_few_values,
    infer_feature_columns,
    read_targets,
    to_float32_unless_precision_lost,
    warn_of_duplicate_rows,
)
from polyfed.data.tabular.csv_reader import CSVFormat
from polyfed.data.tabular.positive_class import is_condition_or_value_list
from polyfed.data.tabular.preprocessing import Column, Scope, TablePreprocessor, encode_table
from polyfed.data.tabular.schema import read_schema, recode_targets_to_schema
from polyfed.data.tabular.subgroups import divide_columns_into_subgroups
from polyfed.data.tabular.suspicious_columns import warn_of_suspicious_columns, warn_of_unlikely_sites
from polyfed.data.tabular.table_reader import (
    PATH_ADVICE,
    check_columns_exist,
    check_no_missing_values,
    column_as_texts,
    column_as_times,
    read_table,
)
from polyfed.tasks.table_targets import TASK_WITH_EVENTS


@final
@dataclass(frozen=True)
class TableFile(Source):
    """Reads a data set from a table with one row per example and one column per feature: a CSV or Parquet file.

    Numbers are scaled and missing ones filled in with the mean, both by the training rows of each site, and marked by an
    extra feature; texts become categories, with one feature each. Dates and free text are refused.

    Args:
        path: CSV (.csv, .tsv, .txt) or Parquet file.
        target: column to predict; several with commas between are several labels of 0 and 1, or several numbers.
        event: column that is 1 where the event happened at the time in `target`, and 0 where the patient was censored then;
            the task is survival. `target` may name both columns instead.
        site: column that says which client a row belongs to; its values are the clients' names.
        task: "auto" infers it from the target: texts, true and false, and up to 20 different whole numbers are classes,
            numbers with a fraction are regression; several targets of 0 and 1 are labels. A mapping has options, too:
            {name: survival, ties: breslow}.
        group: column whose equal values never come into both training and test sets, such as the patient.
        time: column of numbers or dates by which rows are split into earlier ones to train and later ones to test (see
            `split`).
        columns: features; none takes all columns but target, event, site, group and time.
        drop: columns that are not features. Those with few values are kept for scores of subgroups.
        categorical: columns of numbers that are categories, such as codes; and texts to take as categories in any case.
        positive: value of the target that is class 1 of two; null for the last in alphabetical order. A condition
            (">0", ">=2", "=yes") or several values ("1,2,3") make two classes of a target with more values, or of
            numbers. Of `event`, the value that means that the event happened.
        missing: texts or numbers that stand for no value, in addition to an empty cell, NA, NaN and null; chol=0 is for the
            column chol alone.
        preprocess: "site" by each site's own training rows; "federated" by means and variances over the training rows of all
            sites, from sums that the sites send.
        delimiter: between the cells of a CSV file; "auto" infers it from the first line.
        decimal: "." or ",".
        encoding: of a CSV file, such as utf-8 or cp1252.
        missing_target: what becomes of rows without a target (a label, a time or an event): "refuse" the table, or "drop"
            these rows, with a warning that has their number at each site.
        missing_site: the same for rows without a site.
        subgroups: columns of numbers whose groups are kept with predictions, not their values: "age=50:65" with the numbers
            that begin a new group, "age" for quartiles of all rows.
        schema: JSON file of columns, categories and classes that tables in different places have agreed on
            (`polyfed.data.merge_schemas`), in place of those of this table.

    Raises:
        UserError: a value that is none of the choices; on `load` a column that does not exist or cannot be used.
    """

    path: str = ""
    target: list[str] | str = ""
    site: str | None = None
    task: str | dict[str, Any] = "auto"
    event: str | None = None
    group: str | None = None
    time: str | None = None
    columns: list[str] | str = ""
    drop: list[str] | str = ""
    categorical: list[str] | str = ""
    positive: str | None = None
    missing: list[str] | str = ""
    preprocess: Scope = "site"
    delimiter: str = "auto"
    decimal: str = "."
    encoding: str = "utf-8"
    missing_target: Literal["refuse", "drop"] = "refuse"
    missing_site: Literal["refuse", "drop"] = "refuse"
    subgroups: list[str] | str = ""
    schema: str | None = None

    def __post_init__(self) -> None:
        check_field_types(self, "preprocess", "missing_target", "missing_site")
        check_task_option(self.task)
        self._form()
        conflicting = [name for name in ("columns", "drop", "categorical", "positive") if getattr(self, name)]
        if is_condition_or_value_list(self.positive):  # a schema has the classes that it makes, and not how
            conflicting = [name for name in conflicting if name != "positive"]
        if self.schema is not None and conflicting:
            raise UserError(
                f"the schema already sets {conflicting[0]}; leave {conflicting[0]}={getattr(self, conflicting[0])!r} out"
            )

    def load(self) -> PooledDataset:
        """Reads the data set from the file; raises a `UserError` if the file or a column cannot be used."""
        if not self.path:
            raise UserError(PATH_ADVICE)
        return self.build_dataset(self.read(self.path))

    def read(self, rows: Any) -> Table:
        """Reads a table with these options: the names of sites and groups in a CSV file stay as they are written.

        Args:
            rows: a file by its path, or what else `read_table` takes.

        Raises:
            UserError: the table is unreadable or empty.
        """
        form = self._form(tuple(name for name in (self.site, self.group) if name is not None))
        return read_table(rows, **asdict(form))

    def leave_out_refused(self, table: Table) -> tuple["TableFile", list[str]]:
        """Returns options that leave out rows and columns which training refuses, for a look, and what is said of each."""
        changes: dict[str, Any] = {}
        refusals = []
        names_by_role = {"site": (self.site,) if self.site is not None else ()}
        names_by_role["target"] = (*parse_column_names(self.target, table), *((self.event,) if self.event else ()))
        for role, names in names_by_role.items():
            for name in names if getattr(self, f"missing_{role}") == "refuse" else ():
                try:
                    check_no_missing_values(column_as_texts(table, name), name, role)
                except UserError as error:
                    changes[f"missing_{role}"] = "drop"
                    refusals.append(str(error))
        if self.schema is None:
            categorical = parse_column_names(self.categorical, table)
            features = self._feature_names(table, names_by_role["target"])
            refused = {name: r for name in features if (r := find_feature_refusal(table, name, name in categorical))}
            refusals += map(str, refused.values())
            if refused and self.columns:
                changes["columns"] = [name for name in features if name not in refused]
            elif refused:
                changes["drop"] = [*parse_column_names(self.drop, table), *refused]
        return replace(self, **changes), refusals

    def _form(self, text_columns: tuple[str, ...] = ()) -> CSVFormat:
        return CSVFormat(parse_column_names(self.missing), self.delimiter, self.decimal, self.encoding, text_columns)

    def build_dataset(self, table: Table, *, warn: bool = True) -> PooledDataset:
        """Builds the data set from a table that has already been read.

        Args:
            table: the rows.
            warn: of copies of rows and of suspicious columns; not for a published table, which is known.

        Raises:
            UserError: a column does not exist or cannot be used.
        """
        roles = {"site": self.site, "group": self.group, "time": self.time}
        target_names = parse_column_names(self.target, table)
        check_targets_are_named(table.column_names, target_names, {"event": self.event} | roles)
        if self.event is not None:
            target_names = (*target_names, self.event)
        names_by_role = {"target": target_names} | {role: (name,) for role, name in roles.items() if name is not None}
        for role in ("columns", "drop", "categorical"):
            names_by_role[role] = parse_column_names(getattr(self, role), table)
        subgroups = parse_column_names(self.subgroups, table)
        names_by_role["subgroups"] = tuple(split_column_and_cuts(entry, table.column_names)[0] for entry in subgroups)
        for role, role_names in names_by_role.items():
            check_columns_exist(table, role_names, role)
        for role in (*roles, "target"):
            for name in names_by_role.get(role, ()) if getattr(self, f"missing_{role}", "refuse") == "refuse" else ():
                check_no_missing_values(column_as_texts(table, name), name, role)
        choice = TASK_WITH_EVENTS if self.event is not None and self.task == "auto" else self.task
        complete = table
        if self.missing_site == "drop" and self.site is not None:
            complete = drop_rows_without("site", table, [self.site])
        if self.missing_target == "drop":
            complete = drop_rows_without("target", complete, target_names, self.site)
        y, classes, task = read_targets(complete, target_names, choice, self.positive)
        if self.event is not None and not task.target_columns:
            raise UserError(f"event={self.event!r} is for survival, and the task is {task}; leave one of the two out")
        if self.schema is None and complete is not table:
            self._feature_columns(table, target_names)  # which names rows by their place in the whole table
        has_all_rows, table = complete is table, complete
        if self.schema is None:
            features = self._feature_columns(table, target_names)
        else:
            schema = read_schema(self.schema)
            y, classes, features = recode_targets_to_schema(y, classes, schema, task), schema.classes, schema.columns
        num_numeric = sum(column.categories is None for column in features)
        preprocessor = TablePreprocessor(
            features,
            (0.0,) * num_numeric,
            (1.0,) * num_numeric,
            (),
            self.preprocess,
            classes,
            task,
            self._form(),
            self.site,
        )
        x = encode_table(table, features)
        if self.preprocess == "site":  # otherwise the type would depend on the rows at this site
            x = to_float32_unless_precision_lost(x, features)
        if warn:
            self._warn_of_columns(table, features, target_names, y, classes, has_all_rows=has_all_rows)
        if unusable := {*names_by_role["subgroups"]} & {*target_names, *roles.values()}:
            raise UserError(
                f"subgroups names {min(unusable)!r} (--data.subgroups), which is the target, the site, the group or the "
                "time; name other columns"
            )
        columns = self._subgroup_columns(table, target_names) | divide_columns_into_subgroups(table, subgroups)
        if self.time is not None:
            columns[self.time] = column_as_times(table, self.time)
        return PooledDataset(
            Examples(x, y), None, classes, task, columns, preprocessor=preprocessor, group=self.group, time=self.time
        )

    def _warn_of_columns(
        self, table: Table, features: Sequence[Column], target_names: Sequence[str], y: Tensor, classes: tuple[str, ...],
        *, has_all_rows: bool,
    ) -> None:  # fmt: skip
        spellings = {column.name: column.categories for column in features if column.categories is not None}
        if len(target_names) == 1:
            spellings[target_names[0]] = classes
        if self.site is not None:
            warn_of_unlikely_sites(table, self.site, target_names)
            spellings[self.site] = tuple(dict.fromkeys(column_as_texts(table, self.site).tolist()))
        warn_of_names_that_look_alike({f"column {name!r} has": names for name, names in spellings.items()})
        for name, column in zip(target_names, y.T, strict=True) if y.dim() == 2 else ():
            if name != self.event and column.min() == column.max():
                warn_of_data(f"target {name!r} is the same in every row, so that there is nothing to learn about it")
        if self.event is not None and not y[:, -1].any():
            warn_of_data(
                f"event {self.event!r} is 0 in every row: without an event no risk can be learnt; if 0 means that it "
                "happened, give positive='0' (--data.positive 0)"
            )
        left_out = [n for n in (self.site, *parse_column_names(self.drop, table)) if n is not None]
        warn_of_duplicate_rows(table, left_out, has_all_rows=has_all_rows)
        feature_names, own_roles = [c.name for c in features], [n for n in (self.group, self.time) if n is not None]
        warn_of_suspicious_columns(table, y, target_names, feature_names, self.site, own_roles)

    def _feature_columns(self, table: Table, targets: Sequence[str]) -> tuple[Column, ...]:
        names, categorical = self._feature_names(table, targets), parse_column_names(self.categorical, table)
        if not names:
            raise UserError(
                "no column is left for features: leave out less (drop=..., --data.drop), or name some (columns=..., "
                "--data.columns)"
            )
        return infer_feature_columns(table, names, categorical)

    def _feature_names(self, table: Table, targets: Sequence[str]) -> tuple[str, ...]:
        left_out = {
            *targets,
            *parse_column_names(self.drop, table),
            *(name for name in (self.site, self.group, self.time) if name is not None),
        }
        names = parse_column_names(self.columns, table) or tuple(
            name for name in table.column_names if name not in left_out
        )
        if overlap := sorted(set(names) & left_out):
            raise UserError(
                f"column {overlap[0]!r} cannot be a feature: it is the target, the site, the group or the time, or dropped"
            )
        return names

    def _subgroup_columns(self, table: Table, targets: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Returns the columns of sites, groups and few values, by which subgroups can be scored."""
        columns = {}
        for name in table.column_names:
            if name in targets:
                continue
            column = (
                column_as_texts(table, name) if has_few_values(table, name) or name in (self.site, self.group) else None
            )
            if column is not None:
                columns[name] = np.array(["" if value is None else value for value in column.tolist()])
        return columns


def parse_column_names(names: Sequence[str] | str, table: Table | None = None) -> tuple[str, ...]:
    """Splits a text at commas into column names, unless it is a column; a list becomes a tuple.

    >>> parse_column_names("age, sex"), parse_column_names(["a"]), parse_column_names("")
    (('age', 'sex'), ('a',), ())
    """
    if not isinstance(names, str):
        return tuple(names)
    if table is not None and names in table.column_names:
        return (names,)
    return tuple(part.strip() for part in names.split(",") if part.strip())
