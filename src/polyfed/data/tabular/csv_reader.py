"""Reads CSV files as Arrow tables; error messages name columns and rows, and no cell."""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import advise_encoding, describe_undecodable_file, error_in_one_line
from polyfed.core.io.atomic_files import MAX_TEXT_BYTES, open_file
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.data.formats.files import Table

_DELIMITERS = (",", ";", "\t", "|")
_ENDS_WITH_ZEROS = r"^([+-]?\d+)\.0+$"  # a whole number as pandas writes it in a column with empty cells

_CONTROL_CHARACTERS = "[\x80-\x9f]"


@final
@dataclass(frozen=True)
class CSVFormat:
    """Describes how a CSV file is written.

    Args:
        missing: texts that stand for no value, in addition to the usual ones.
        delimiter: between cells; "auto" infers it from the first line.
        decimal: "." or ",".
        encoding: of the file.
        text_columns: columns whose cells stay texts, so that "010" and "10" differ.

    Raises:
        UserError: another decimal, or a delimiter that is not one character.
    """

    missing: tuple[str, ...] = ()
    delimiter: str = "auto"
    decimal: str = "."
    encoding: str = "utf-8"
    text_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise UserError(f"decimal must be '.' or ',', got {self.decimal!r}")
        if self.delimiter != "auto" and len(self.delimiter) != 1:
            raise UserError(f"delimiter must be one character or auto, got {self.delimiter!r}")


def parse_csv_file(file: Path, form: CSVFormat) -> Table:
    """Reads a CSV file, without spaces around column names, and without empty rows at its end, as spreadsheets write them.

    Args:
        file: its path.
        form: how it is written.

    Raises:
        UserError: the file is not text in this encoding, its rows have different numbers of cells, or a column has no name.
    """
    import pyarrow
    import pyarrow.compute as compute
    import pyarrow.csv

    try:
        with open_file(file) as stream, io.TextIOWrapper(stream, form.encoding) as text:
            first = text.readline(MAX_TEXT_BYTES)
    except (OSError, UnicodeDecodeError, LookupError) as error:
        raise UserError(describe_undecodable_file(file, form.encoding, error)) from error
    if "\0" in first or first.startswith("PK\x03\x04"):
        raise UserError(f"{str(file)!r} is not a CSV file: it holds bytes that are not text; save the sheet as CSV")
    separator = form.delimiter if form.delimiter != "auto" else max(_DELIMITERS, key=first.count)
    # One block: Arrow infers the types of columns from the first block, and a text in a later one would be an error.
    block_size = min(2**31 - 1, max(2**20, 2 * file.stat().st_size))
    default_words = pyarrow.csv.ConvertOptions().null_values
    try:
        table = pyarrow.csv.read_csv(
            file,
            read_options=pyarrow.csv.ReadOptions(block_size=block_size, encoding=form.encoding),
            parse_options=pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                null_values=[*default_words, *form.missing],
                strings_can_be_null=True,
                decimal_point=form.decimal,
                column_types=dict.fromkeys(form.text_columns, pyarrow.string()),
            ),
        )
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        is_encoding = "UTF8" in str(error) or "codec" in str(error)
        cure = (
            advise_encoding(file, form.encoding) if is_encoding else _locate_uneven_row(file, form.encoding, separator)
        )
        cure = cure or f"cells are separated by {separator!r}, rows by line"
        reason = re.sub(
            r"(Expected \d+ columns, got \d+).*", r"\1", error_in_one_line(error)
        )  # a row follows, with its cells
        raise UserError(f"{str(file)!r} cannot be read as CSV ({reason}); {cure}") from error
    table = _without_unnamed_empty_columns(table, file)
    if unreadable := [field.name for field in table.schema if pyarrow.types.is_binary(field.type)]:
        raise UserError(
            f"column {unreadable[0]!r} of {str(file)!r} has texts that are not in {form.encoding}; "
            f"{advise_encoding(file, form.encoding)}"
        )
    _check_no_control_characters(table, file, form.encoding)
    for name in set(form.text_columns) & set(table.column_names):
        if pyarrow.types.is_string(table.column(name).type):  # not if the file has spaces around the name
            trimmed = compute.utf8_trim_whitespace(table.column(name))
            names = compute.replace_substring_regex(trimmed, _ENDS_WITH_ZEROS, r"\1")
            table = table.set_column(table.column_names.index(name), name, names)
    return _without_empty_rows_at_the_end(table)


def _check_no_control_characters(table: Table, file: Path, encoding: str) -> None:
    """Raises a `UserError` for characters that latin-1 alone makes of bytes which are "€", "–" and "’" in cp1252."""
    import pyarrow
    import pyarrow.compute as compute

    if encoding.lower().startswith("utf"):
        return
    for position, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True), start=1):
        is_text = pyarrow.types.is_string(column.type)
        in_cells = is_text and compute.any(compute.match_substring_regex(column, _CONTROL_CHARACTERS)).as_py()
        if in_cells or re.search(_CONTROL_CHARACTERS, name):
            place = f"the texts of column {position}" if in_cells else f"the name of column {position}"
            raise UserError(
                f"{str(file)!r} is not in {encoding}: {place} would have control characters; "
                f"{advise_encoding(file, encoding)}"
            )


def _locate_uneven_row(file: Path, encoding: str, separator: str) -> str:
    """Says which row has another number of cells than the first line, and what to do; "" if that cannot be told."""
    start = width = 0
    try:
        with open_file(file) as stream, io.TextIOWrapper(stream, encoding, newline="") as text:
            rows = csv.reader(text, delimiter=separator)
            for cells in rows:
                line, start = start + 1, rows.line_num
                width = width or len(cells)
                if cells and len(cells) != width:
                    if rows.line_num > line:
                        closed = f"is closed in line {rows.line_num} or not at all"
                        return f"a quotation mark in line {line} {closed}: fix line {line}"
                    return (
                        f"line {line} has {count_with_noun(len(cells), 'cell')}, and the first line {width}: fix it, or "
                        f"quote a text that holds {separator!r}"
                    )
    except csv.Error:
        return f"the row from line {start + 1} on has no end: is a quotation mark there not closed?"
    except (OSError, UnicodeDecodeError):
        pass
    return ""


def _without_unnamed_empty_columns(table: Table, file: Path) -> Table:
    """Takes out columns without a name that are empty, or the first if it counts the rows, as R and pandas write it."""
    names = [name.strip() for name in table.column_names]
    for position in reversed(range(len(names))):
        if names[position]:
            continue
        column = table.column(position)
        count = len(column)
        counts_rows = position == 0 and column.to_pylist() in (list(range(count)), list(range(1, count + 1)))
        if column.null_count < table.num_rows and not counts_rows:
            titles = [name for name in names if name]
            raise UserError(
                f"{str(file)!r}: its first line must name the columns, and it holds {titles[0]!r} alone: take titles above "
                "the names out"
                if len(titles) == 1
                else f"{str(file)!r}: column {position + 1} has values and no name; give it one in the first line, or "
                "if it names the rows, write the file without them: to_csv(..., index=False) in pandas, row.names=FALSE in R"
            )
        table = table.remove_column(position)
    return table.rename_columns([name for name in names if name])


def _without_empty_rows_at_the_end(table: Table) -> Table:
    rows = table.num_rows
    while rows and all(not column[rows - 1].is_valid for column in table.columns):
        rows -= 1
    return table.slice(0, rows)
