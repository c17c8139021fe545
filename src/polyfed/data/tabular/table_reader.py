"""Reads users' tables (CSV and Parquet files, pandas frames and others) as Arrow tables; error messages name columns
and rows.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import (
    DECIMAL_COMMA,
    MAX_MISSING_WORDS,
    check_names_of_columns,
    check_no_empty_cells,
    describe_missing_rows,
    error_in_one_line,
    is_numeric_text,
)
from polyfed.core.examples.times import times_as_numbers
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.data.formats.files import Table, read_parquet_splits, resolve_existing_path
from polyfed.data.tabular.csv_reader import CSVFormat, parse_csv_file

PATH_ADVICE = "give path=... (--data.path) with a CSV or Parquet file that has one row per example"
FRAME_MARK = b"frame"
"""Marks the schema of a table that was a frame, whose rows have no lines in a file."""
_LARGEST = float(np.finfo(np.float32).max)


def read_table(
    source: Any,
    *,
    missing: Sequence[str] = (),
    delimiter: str = "auto",
    decimal: str = ".",
    encoding: str = "utf-8",
    text_columns: Sequence[str] = (),
) -> Table:
    """Reads a CSV or Parquet file, a pandas frame, a mapping of columns, or a list of rows as a `pyarrow.Table`.

    Args:
        source: one of these, or an Arrow table; a file by its path.
        missing: texts that stand for no value, in addition to the usual ones (an empty cell, NA, NaN, null), and numbers
            that do so in columns of numbers; "chol=0" is for the column "chol" alone.
        delimiter: between the cells of a CSV file; "auto" infers it from the first line.
        decimal: "." or ",", also of numbers that are texts.
        encoding: of the CSV file.
        text_columns: columns of the CSV file that hold names, not numbers: "010" and "10" differ.

    Raises:
        UserError: the source cannot be read, has no rows, has a column name twice, or lacks one that `missing` names.

    >>> read_table({"chol": [0, 233], "sex": [0, 1]}, missing=["chol=0"]).to_pydict()
    {'chol': [None, 233], 'sex': [0, 1]}
    """
    import pyarrow

    by_column = [entry.rpartition("=") for entry in map(str, missing) if entry.find("=") > 0]
    missing = tuple(entry for entry in map(str, missing) if entry.find("=") <= 0)
    if isinstance(source, str | Path):
        form = CSVFormat(missing, delimiter, decimal, encoding, tuple(text_columns))
        table = _read_table_file(str(source), form)
        name = repr(str(source))
    else:
        name = f"the {type(source).__name__}"
        source = _check_column_names(_as_rows(source))
        try:
            if isinstance(source, pyarrow.Table):
                table = source
            elif hasattr(source, "iloc"):  # a pandas frame, without an import of pandas
                table = pyarrow.Table.from_pandas(_mixed_columns_as_texts(source, missing), preserve_index=False)
                table = table.replace_schema_metadata({FRAME_MARK: b""})
            elif isinstance(source, Mapping):
                table = pyarrow.table({key: _arrow_array(values, missing) for key, values in source.items()})
            elif isinstance(source, Sequence) and source and all(isinstance(row, Mapping) for row in source):
                keys = dict.fromkeys(name for row in source for name in row)
                table = pyarrow.table({name: _arrow_array([row.get(name) for row in source], missing) for name in keys})
            else:
                raise UserError(
                    f"a table must be a pandas frame, a mapping from names to columns, a list of rows {{name: value}}, or "
                    f"the path of a CSV or Parquet file, got {type(source).__name__}"
                )
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{name} cannot be read as a table ({error_in_one_line(error)}); each column needs values of one kind, and "
                "texts that mean no value are given as missing=[...] (--data.missing)"
            ) from error
        table = _blank_missing_values(table, missing, decimal)
    names = list(table.column_names)
    if twice := [column_name for column_name in names if names.count(column_name) > 1]:
        raise UserError(f"{name} has two columns {twice[0]!r}; rename one")
    if not table.num_rows:
        raise UserError(describe_missing_rows(name))
    for place, field in enumerate(table.schema):
        if pyarrow.types.is_string_view(field.type):  # of which Arrow cannot form groups
            table = table.set_column(place, field.name, table.column(place).cast(pyarrow.large_string()))
    check_columns_exist(table, [column_name for column_name, _, _ in by_column], "missing")
    for column_name, _, sign in by_column:
        cleaned = _blank_missing_values(table.select([column_name]), (sign,), ".").column(0)
        table = table.set_column(names.index(column_name), column_name, cleaned)
    return table


def _as_rows(source: Any) -> Any:
    """Returns a list of one row if the source is one row: a pandas series, or a mapping from names to cells."""
    if hasattr(source, "iloc") and not hasattr(source, "columns"):
        source = source.to_dict()
    is_row = isinstance(source, Mapping) and all(isinstance(v, str | Number | None) for v in source.values())
    return [source] if is_row and source else source


def _check_column_names(frame: Any) -> Any:
    names = list(getattr(frame, "columns", ())) if hasattr(frame, "iloc") else []
    if strange := [name for name in names if not isinstance(name, str)]:
        raise UserError(f"a column of the frame is called {strange[0]!r}; names must be texts: frame.columns = [...]")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"the {type(frame).__name__} has two columns {twice[0]!r}; rename one")
    return frame


def _mixed_columns_as_texts(frame: Any, missing: Sequence[str]) -> Any:
    """Returns the frame with strings in each column that mixes strings and numbers, or has intervals as categories."""
    mixed = {name: _as_texts(frame[name].tolist(), missing) for name in frame.columns if frame[name].dtype.kind == "O"}
    changed = {name: texts_ for name, texts_ in mixed.items() if texts_ is not None}
    for name in frame.columns:
        categories = getattr(frame[name].dtype, "categories", None)
        if getattr(categories, "dtype", None) == "object" or hasattr(categories, "closed"):
            texts = [] if categories is None else [str(category) for category in categories]  # intervals of pandas.cut
            changed[name] = frame[name].cat.rename_categories(texts)
    return frame.assign(**changed) if changed else frame


def _as_texts(cells: Sequence[Any], missing: Sequence[str]) -> list[str | None] | None:
    """Converts a column's cells to strings if they are numbers and a few strings that may mean no value; else None."""
    present = [cell for cell in cells if not _is_absent(cell)]
    if not all(isinstance(cell, str | int | float | np.number) for cell in present):
        return None
    amounts = {cell for cell in present if not isinstance(cell, str)}
    words = {cell.strip() for cell in present if isinstance(cell, str) and not is_numeric_text(cell)} - set(missing)
    few = len(words) <= MAX_MISSING_WORDS and (len(words) < len(amounts) or all(map(has_no_letter_or_digit, words)))
    if not amounts or not few or len(amounts) == len(set(present)):
        return None
    return [
        None if _is_absent(cell) else cell if isinstance(cell, str) else _cell_text(_python_number(cell))
        for cell in cells
    ]


def _is_absent(cell: Any) -> bool:
    """Returns whether a cell has no value: None, NaN, or pandas' NA or NaT."""
    return cell is None or type(cell).__name__ in ("NAType", "NaTType") or (isinstance(cell, float) and cell != cell)


def _python_number(number: Any) -> Any:
    return number.item() if isinstance(number, np.number) else number


def _arrow_array(values: Any, missing: Sequence[str]) -> Any:
    import pyarrow

    cells = values if isinstance(values, np.ndarray) else list(values)
    if not isinstance(values, np.ndarray) or values.dtype.kind == "O":
        cells = _as_texts(list(cells), missing) or cells
    return pyarrow.array(cells, from_pandas=True)  # NaN is not a value


def _blank_missing_values(table: Table, missing: Sequence[str], decimal: str) -> Table:
    """Blanks cells that mean "missing", as text or number, and replaces decimal commas, as `parse_csv_file` does."""
    import pyarrow
    import pyarrow.compute as compute

    is_changed = bool(missing) or decimal != "."
    if not is_changed or len(set(table.column_names)) < table.num_columns:  # `read_table` refuses a name twice
        return table
    amounts = [float(text) for text in missing if is_numeric_text(text)]
    for place, name in enumerate(table.column_names):
        column = column_as_arrow_array(table, name)
        if is_text_type(column.type):
            cells = column_as_texts(table, name)
            cleaned = [None if cell in missing else cell for cell in cells.tolist()]
            present = [cell for cell in cleaned if cell is not None]
            if (
                decimal == ","
                and present
                and all(DECIMAL_COMMA.fullmatch(cell) or is_numeric_text(cell) for cell in present)
            ):
                cleaned = [None if cell is None else cell.replace(",", ".") for cell in cleaned]
            if cleaned != cells.tolist():
                table = table.set_column(place, name, pyarrow.array(cleaned, pyarrow.string()))
        elif amounts and is_numeric_type(column.type) and not pyarrow.types.is_boolean(column.type):
            strange = compute.is_in(column.cast(pyarrow.float64(), safe=False), pyarrow.array(amounts))
            if compute.any(strange).as_py():
                cleaned = compute.if_else(strange, pyarrow.scalar(None, column.type), column)
                table = table.set_column(place, name, cleaned)
    return table


def _read_table_file(path: str, form: CSVFormat) -> Table:
    file = resolve_existing_path(path, PATH_ADVICE)
    if file.is_dir() or file.suffix.lower() in (".parquet", ".pq"):
        tables = read_parquet_splits(file)
        if "train" not in tables:
            raise UserError(f"{path!r} holds no Parquet file; {PATH_ADVICE}")
        return _blank_missing_values(tables["train"], form.missing, form.decimal)
    # Words are gone by now, and of a number "-9" its other spellings are not, such as "-9.0".
    return _blank_missing_values(parse_csv_file(file, form), form.missing, ".")


def check_columns_exist(table: Table, names: Sequence[str], role: str) -> None:
    """Raises a `UserError` unless the table has a column of each of these names.

    Raises:
        UserError: the table lacks one; the message has the nearest names.

    >>> check_columns_exist(read_table({"age": [1]}), ["agee"], "target")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: target: the table has no column 'agee'; did you mean age? Choices: age
    """
    check_names_of_columns(table.column_names, names, role)


def column_as_arrow_array(table: Table, name: str) -> Any:
    """Returns a table's column as one `pyarrow.Array`, with dictionary-encoded categories as plain values."""
    import pyarrow
    import pyarrow.types as kinds

    column = table.column(name)
    if kinds.is_dictionary(column.type):
        decoded = [chunk.dictionary_decode() for chunk in column.chunks]  # a cast fails for values that are lists
        column = pyarrow.chunked_array(decoded, column.type.value_type)
    return column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column


def is_numeric_type(kind: Any) -> bool:
    """Returns whether an Arrow type holds numbers or truth values."""
    import pyarrow.types as kinds

    tests = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal)
    return any(test(kind) for test in tests)


def is_text_type(kind: Any) -> bool:
    """Returns whether an Arrow type holds strings."""
    import pyarrow.types as kinds

    return any(test(kind) for test in (kinds.is_string, kinds.is_large_string, kinds.is_string_view))


def is_empty_non_numeric_column(table: Table, name: str) -> bool:
    """Returns whether a column without a numeric type has no value in any row; False for every numeric column."""
    import pyarrow.types as kinds

    column = column_as_arrow_array(table, name)
    return kinds.is_null(column.type) or (is_text_type(column.type) and column.null_count == len(column))


def is_numeric_column(table: Table, name: str) -> bool:
    """Returns whether a column holds numbers, or strings that all represent numbers, as in a CSV file.

    Categories of a frame that are texts are not numbers.

    >>> rows = read_table({"age": ["61.5", None, "70"], "ward": ["1", "b", "2"]})
    >>> is_numeric_column(rows, "age"), is_numeric_column(rows, "ward")
    (True, False)
    """
    import pyarrow.types as kinds

    if is_numeric_type(column_as_arrow_array(table, name).type):
        return True
    if kinds.is_dictionary(table.column(name).type) or not is_text_type(column_as_arrow_array(table, name).type):
        return False
    present = [value for value in column_as_texts(table, name).tolist() if value is not None]
    return bool(present) and all(map(is_numeric_text, present))


def column_as_numbers(table: Table, name: str) -> NDArray[np.float64]:
    """Returns a table's column as numbers, with NaN for missing values.

    Args:
        table: that has the column.
        name: of a column of numbers, or of texts that are numbers.

    Raises:
        UserError: an infinite value, or one beyond 32-bit numbers.
    """
    import pyarrow

    column = column_as_arrow_array(table, name)
    if is_text_type(column.type):
        column = pyarrow.array(
            [None if value is None else float(value) for value in column_as_texts(table, name).tolist()], "float64"
        )
    as_floats = (
        column.cast(pyarrow.float64(), safe=False) if not pyarrow.types.is_boolean(column.type) else column.cast("int8")
    )
    content = np.asarray(as_floats.to_numpy(zero_copy_only=False), dtype=np.float64)
    if len(large_rows := np.flatnonzero(np.abs(content) > _LARGEST)):
        raise UserError(
            f"column {name!r} has an infinite value, or one beyond {_LARGEST:.0e}, in {format_row_numbers(large_rows)}; "
            "correct it, or leave the cell empty"
        )
    return content


def column_as_times(table: Table, name: str) -> NDArray[np.float64]:
    """Converts a column of numbers, or of dates such as 2026-01-31, to numbers in the same order.

    Raises:
        UserError: other values, or a row without one.

    >>> column_as_times(read_table({"day": ["2026-01-31", "2026-01-30"]}), "day").argsort().tolist()
    [1, 0]
    """
    if is_numeric_column(table, name):
        return times_as_numbers(column_as_numbers(table, name), f"time: column {name!r}")
    return times_as_numbers(column_as_arrow_array(table, name).to_pylist(), f"time: column {name!r}")


def column_as_texts(table: Table, name: str) -> NDArray[Any]:
    """Returns a column as strings, None for missing; whole numbers have no decimal point.

    >>> column_as_texts(read_table({"a": [1.0, None, 2.5]}), "a").tolist()
    ['1', None, '2.5']
    """
    return np.array([_cell_text(value) for value in column_as_arrow_array(table, name).to_pylist()], dtype=object)


def _cell_text(value: Any) -> str | None:
    if value is None or value != value:
        return None
    if isinstance(value, Decimal):  # of a database, where a CSV file has numbers
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return (str(value).strip() or None) if isinstance(value, str) else str(value)


def check_no_missing_values(column: NDArray[Any], name: str, role: str, *, may_drop: bool = True) -> None:
    """Raises a `UserError` if a row of the column has no value.

    Args:
        may_drop: whether the source can leave out rows without a target or a site.

    Raises:
        UserError: a row has none; the message has the numbers of such rows, the first being 1.

    >>> check_no_missing_values(np.array(["a", None], dtype=object), "patient", "group")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: group: column 'patient' has no value in row 2 (the first row below the names is 1);
    fill it in, or drop the row
    """
    absent = [row for row, value in enumerate(column.tolist()) if value is None or value != value]
    check_no_empty_cells(absent, name, role, may_drop=may_drop)


def has_no_letter_or_digit(text: str) -> bool:
    """Returns whether a text, such as "?" or "-", has neither letters nor digits and so denotes a missing value."""
    return not any(map(str.isalnum, text))
