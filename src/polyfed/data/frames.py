"""Tables of users: CSV and Parquet files, pandas frames and the like, as one Arrow table, with errors that name columns and
rows."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError, nearest
from polyfed.core.files import MOST_TEXT, open_file
from polyfed.data.files import Table, existing, parquet_tables

ADVICE = "give --data.path with a CSV or Parquet file that has one row per example"
_DELIMITERS = (",", ";", "\t", "|")
_SHOWN = 5  # rows or values in a sentence
_WORDS = 3  # different words among numbers that may all mean no value
_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}([ T]\d{1,2}:\d{2}.*)?")
_COMMA = re.compile(r"[+-]?\d+,\d+")


def read_table(
    source: Any, *, missing: Sequence[str] = (), delimiter: str = "auto", decimal: str = ".", encoding: str = "utf-8"
) -> Table:
    """A `pyarrow.Table` of a CSV or Parquet file, a pandas frame, a mapping of columns, a list of rows, or an Arrow table.

    Args:
        source: one of these; a file by its path.
        missing: texts that stand for no value, beside the usual ones (an empty cell, NA, NaN, null); numbers among them are
            looked for in columns of numbers too.
        delimiter: between the cells of a CSV file; "auto" finds out from its first line.
        decimal: "." or ",", also of numbers that are texts.
        encoding: of the CSV file.

    Raises:
        UserError: it cannot be read, has no rows, or a name twice.

    >>> read_table({"age": [50, None], "sex": ["f", "m"]}).column_names
    ['age', 'sex']
    """
    import pyarrow

    missing = tuple(map(str, missing))
    if isinstance(source, str | Path):
        table = _of_file(str(source), missing, delimiter, decimal, encoding)
        name = repr(str(source))
    else:
        name = f"the {type(source).__name__}"
        try:
            if isinstance(source, pyarrow.Table):
                table = source
            elif hasattr(source, "iloc"):  # a pandas frame, without an import of pandas
                table = pyarrow.Table.from_pandas(_with_texts(_named_columns(source), missing), preserve_index=False)
            elif isinstance(source, Mapping):
                table = pyarrow.table({key: _array(values, missing) for key, values in source.items()})
            elif isinstance(source, Sequence) and source and all(isinstance(row, Mapping) for row in source):
                known = dict.fromkeys(name for row in source for name in row)
                table = pyarrow.table({name: _array([row.get(name) for row in source], missing) for name in known})
            else:
                raise UserError(
                    f"a table must be a pandas frame, a mapping from names to columns, a list of rows {{name: value}}, or "
                    f"the path of a CSV or Parquet file, got {type(source).__name__}"
                )
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise UserError(
                f"{name} cannot be read as a table ({_short(error)}); each column needs values of one kind, and texts that "
                "mean no value are given as missing=[...] (--data.missing)"
            ) from error
        table = _without(table, missing, decimal)
    names = list(table.column_names)
    if twice := [one for one in names if names.count(one) > 1]:
        raise UserError(f"{name} has two columns {twice[0]!r}; rename one")
    if not table.num_rows:
        raise UserError(f"{name} has no rows; {ADVICE}")
    return table


def _named_columns(frame: Any) -> Any:
    strange = [name for name in frame.columns if not isinstance(name, str)]
    if strange:
        raise UserError(f"a column of the frame is called {strange[0]!r}; names must be texts: frame.columns = [...]")
    return frame


def _with_texts(frame: Any, missing: Sequence[str]) -> Any:
    """The frame, columns of texts and numbers as texts."""
    if len(set(frame.columns)) < len(frame.columns):
        return frame  # which is refused, with the name
    mixed = {name: _as_texts(frame[name].tolist(), missing) for name in frame.columns if frame[name].dtype.kind == "O"}
    changed = {name: texts_ for name, texts_ in mixed.items() if texts_ is not None}
    return frame.assign(**changed) if changed else frame


def _as_texts(cells: Sequence[Any], missing: Sequence[str]) -> list[str | None] | None:
    """Cells as a CSV file has them, if they are numbers, and a few texts that may stand for no value; None if not."""
    known = [cell for cell in cells if not _is_absent(cell)]
    if not all(isinstance(cell, str | int | float | np.number) for cell in known):
        return None
    amounts = {cell for cell in known if not isinstance(cell, str)}
    words = {cell.strip() for cell in known if isinstance(cell, str) and not is_number_text(cell)} - set(missing)
    few = len(words) <= _WORDS and (len(words) < len(amounts) or all(map(is_sign, words)))
    if not amounts or not few or len(amounts) == len(set(known)):
        return None
    return [None if _is_absent(cell) else cell if isinstance(cell, str) else _text(_plain(cell)) for cell in cells]


def _is_absent(cell: Any) -> bool:
    """None, NaN, and the NA and NaT of pandas."""
    return cell is None or type(cell).__name__ in ("NAType", "NaTType") or (isinstance(cell, float) and cell != cell)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.number) else number


def _array(values: Any, missing: Sequence[str]) -> Any:
    import pyarrow

    cells = values if isinstance(values, np.ndarray) else list(values)
    if not isinstance(values, np.ndarray) or values.dtype.kind == "O":
        cells = _as_texts(list(cells), missing) or cells
    return pyarrow.array(cells, from_pandas=True)  # NaN is no value


def _without(table: Table, missing: Sequence[str], decimal: str) -> Table:
    """The table with no value where a cell is one of these texts, or the number that one of them is; and texts of numbers
    with a decimal comma with a point. A CSV file is read so at once."""
    import pyarrow
    import pyarrow.compute as compute

    if not missing and decimal == ".":
        return table
    amounts = [float(text) for text in missing if is_number_text(text)]
    for place, name in enumerate(table.column_names):
        column = values(table, name)
        if is_text(column.type):
            cells = texts(table, name)
            kept = [None if cell in missing else cell for cell in cells.tolist()]
            known = [cell for cell in kept if cell is not None]
            if decimal == "," and known and all(_COMMA.fullmatch(cell) or is_number_text(cell) for cell in known):
                kept = [None if cell is None else cell.replace(",", ".") for cell in kept]
            if kept != cells.tolist():
                table = table.set_column(place, name, pyarrow.array(kept, pyarrow.string()))
        elif amounts and is_number(column.type) and not pyarrow.types.is_boolean(column.type):
            strange = compute.is_in(column.cast(pyarrow.float64(), safe=False), pyarrow.array(amounts))
            if compute.any(strange).as_py():
                kept_numbers = compute.if_else(strange, pyarrow.scalar(None, column.type), column)
                table = table.set_column(place, name, kept_numbers)
    return table


def _of_file(path: str, missing: Sequence[str], delimiter: str, decimal: str, encoding: str) -> Table:
    file = existing(path, ADVICE)
    if file.is_dir() or file.suffix.lower() in (".parquet", ".pq"):
        tables = parquet_tables(file)
        if "train" not in tables:
            raise UserError(f"{path!r} holds no Parquet file; {ADVICE}")
        return _without(tables["train"], missing, decimal)
    return _of_csv(file, missing, delimiter, decimal, encoding)


def _of_csv(file: Path, missing: Sequence[str], delimiter: str, decimal: str, encoding: str) -> Table:
    import pyarrow
    import pyarrow.csv

    try:
        with open_file(file) as stream:
            first = stream.readline(MOST_TEXT).decode(encoding)
    except (OSError, UnicodeDecodeError, LookupError) as error:
        raise UserError(f"{str(file)!r} cannot be read as text in {encoding} ({_short(error)}); {_ENCODING}") from error
    if "\0" in first:
        raise UserError(f"{str(file)!r} is no CSV file: it holds bytes that are no text; save the sheet as CSV")
    cut = delimiter if delimiter != "auto" else max(_DELIMITERS, key=first.count)
    convert = pyarrow.csv.ConvertOptions(
        null_values=[*pyarrow.csv.ConvertOptions().null_values, *missing],
        strings_can_be_null=True,
        decimal_point=decimal,
    )
    # One block: the types of columns are inferred from the first, and a text in a later one would be an error.
    reading = pyarrow.csv.ReadOptions(block_size=min(2**31 - 1, max(2**20, 2 * file.stat().st_size)), encoding=encoding)
    parsing = pyarrow.csv.ParseOptions(delimiter=cut, newlines_in_values=True)
    try:
        return pyarrow.csv.read_csv(file, read_options=reading, parse_options=parsing, convert_options=convert)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        cure = (
            _ENCODING
            if "UTF8" in str(error) or "codec" in str(error)
            else f"cells are separated by {cut!r}, rows by line"
        )
        raise UserError(f"{str(file)!r} cannot be read as CSV ({_short(error)}); {cure}") from error


_ENCODING = "give --data.encoding latin-1, or save the file as UTF-8"


def check_columns(table: Table, names: Sequence[str], what: str) -> None:
    """Raises unless the table has columns of these names.

    Raises:
        UserError: with the nearest names.

    >>> check_columns(read_table({"age": [1]}), ["agee"], "target")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: target: the table has no column 'agee'; did you mean age? Choices: age
    """
    for name in names:
        if name not in table.column_names:
            raise UserError(f"{what}: the table has no column {name!r}; {nearest(name, table.column_names)}")


def values(table: Table, name: str) -> Any:
    """A column as one `pyarrow.Array`, with categories as their values."""
    import pyarrow
    import pyarrow.types as kinds

    found = table.column(name)
    if kinds.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    return found.combine_chunks() if isinstance(found, pyarrow.ChunkedArray) else found


def is_number(kind: Any) -> bool:
    """Whether an Arrow type is one of numbers, true and false included."""
    import pyarrow.types as kinds

    tests = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal)
    return any(test(kind) for test in tests)


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is one of texts."""
    import pyarrow.types as kinds

    return any(test(kind) for test in (kinds.is_string, kinds.is_large_string, kinds.is_string_view))


def is_empty(table: Table, name: str) -> bool:
    """Whether no row has a value in a column that is not one of numbers."""
    import pyarrow.types as kinds

    found = values(table, name)
    return kinds.is_null(found.type) or (is_text(found.type) and found.null_count == len(found))


def holds_numbers(table: Table, name: str) -> bool:
    """Whether a column has numbers, be they written as texts, as the cells of a CSV file are. Categories of a frame that are
    texts are none.

    >>> rows = read_table({"age": ["61.5", None, "70"], "ward": ["1", "b", "2"]})
    >>> holds_numbers(rows, "age"), holds_numbers(rows, "ward")
    (True, False)
    """
    import pyarrow.types as kinds

    if is_number(values(table, name).type):
        return True
    if kinds.is_dictionary(table.column(name).type) or not is_text(values(table, name).type):
        return False
    known = [value for value in texts(table, name).tolist() if value is not None]
    return bool(known) and all(map(is_number_text, known))


def numbers(table: Table, name: str) -> NDArray[np.float64]:
    """A column of numbers; NaN where there is no value.

    Args:
        table: that has it.
        name: of a column of numbers, or of texts that are numbers.

    Raises:
        UserError: an infinite value.
    """
    import pyarrow

    found = values(table, name)
    if is_text(found.type):
        found = pyarrow.array(
            [None if value is None else float(value) for value in texts(table, name).tolist()], "float64"
        )
    plain = (
        found.cast(pyarrow.float64(), safe=False) if not pyarrow.types.is_boolean(found.type) else found.cast("int8")
    )
    content = np.asarray(plain.to_numpy(zero_copy_only=False), dtype=np.float64)
    if len(wrong := np.flatnonzero(np.isinf(content))):
        raise UserError(
            f"column {name!r} has an infinite value in {rows_of(wrong)}; correct it, or leave the cell empty"
        )
    return content


def texts(table: Table, name: str) -> NDArray[Any]:
    """A column as texts, None where there is no value. Whole numbers are written without a point, whatever their type.

    >>> texts(read_table({"a": [1.0, None, 2.5]}), "a").tolist()
    ['1', None, '2.5']
    """
    return np.array([_text(value) for value in values(table, name).to_pylist()], dtype=object)


def _text(value: Any) -> str | None:
    if value is None or value != value:
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return (str(value).strip() or None) if isinstance(value, str) else str(value)


def check_present(column: NDArray[Any], name: str, what: str) -> None:
    """Raises if a row has no value.

    Raises:
        UserError: with the numbers of the rows, the first being 1.

    >>> check_present(np.array(["a", None], dtype=object), "hospital", "site")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: site: column 'hospital' has no value in row 2 (the first row below the names is 1);
    fill it in, or drop the row
    """
    absent = np.array([value is None or value != value for value in column.tolist()], bool)
    if absent.any():
        rows = np.flatnonzero(absent)
        which = "row" if len(rows) == 1 else "rows"
        raise UserError(
            f"{what}: column {name!r} has no value in {rows_of(rows)} (the first row below the names is 1); fill it in, or "
            f"drop the {which}"
        )


def rows_of(found: NDArray[Any]) -> str:
    """Rows for a sentence, counted from 1.

    >>> rows_of(np.array([0])), rows_of(np.array([1, 4])), rows_of(np.arange(10))
    ('row 1', 'rows 2 and 5', 'rows 1, 2, 3, 4, 5 and 5 more')
    """
    shown = [str(int(row) + 1) for row in found[:_SHOWN]]
    if len(found) > _SHOWN:
        return f"rows {', '.join(shown)} and {len(found) - _SHOWN} more"
    return f"row {shown[0]}" if len(shown) == 1 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def why_no_category(column: NDArray[Any], name: str, most: int) -> str:
    """What makes a column of texts no column of categories, as a sentence; empty if nothing does.

    Args:
        column: texts, None where there is no value.
        name: of the column.
        most: different texts that categories may have.
    """
    rows = [row for row, value in enumerate(column.tolist()) if value is not None]
    known = [str(column[row]) for row in rows]
    cure = f"leave it out (--data.drop {name}), or make numbers of it before"
    if all(_DATE.fullmatch(value) for value in known[:100]):
        return f"column {name!r} holds dates, such as {known[0]!r}: {cure}, such as an age or days since admission"
    odd = [row for row, value in zip(rows, known, strict=True) if not is_number_text(value)]
    if odd and all(_COMMA.fullmatch(str(column[row])) for row in odd):
        return (
            f"column {name!r} has numbers with a comma, such as {str(column[odd[0]])!r}: give --data.decimal , (in Python "
            "decimal=',')"
        )
    different, words = len(set(known)), sorted({str(column[row]) for row in odd})
    many = different > most or (different > 10 and 2 * different > len(known))
    if odd and (len(odd) <= 0.2 * len(known) or (many and len(words) <= _WORDS and different > len(words))):
        strange, words = str(column[odd[0]]), words[:_WORDS]
        return (
            f"column {name!r} holds numbers, and {strange!r} in {rows_of(np.array(odd))}: if that means no value, give "
            f"--data.missing {','.join(words)} (in Python missing={words}); otherwise correct it, or take all as categories "
            f"(--data.categorical {name})"
        )
    if many:
        return (
            f"column {name!r} has {different} different texts in {len(known)} rows, such as {known[0][:40]!r}: that is free "
            f"text or an identifier; {cure}, or take it as categories (--data.categorical {name})"
        )
    return ""


def is_sign(text: str) -> bool:
    """Whether a text has no letter and no digit, as one that stands for no value: "?", "-"."""
    return not any(map(str.isalnum, text))


def is_number_text(value: str) -> bool:
    """Whether a text is a number."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
