"""Refuses files, columns and clients that are not there before torch is imported, which takes seconds.

Whatever these checks cannot read, such as Parquet files, is left to the library, which checks all of it again.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.examples.split_sizes import check_split_sizes
from polyfed.core.examples.text_columns import (
    DECIMAL_COMMA,
    check_names_of_columns,
    check_no_empty_cells,
    check_targets_are_named,
    check_texts_are_classes,
    check_texts_are_no_dates,
    check_whole_numbers_are_classes,
    describe_missing_rows,
    describe_undecodable_file,
    find_text_refusal,
    is_numeric_text,
    refuse_columns,
    split_column_and_cuts,
)
from polyfed.core.io.atomic_files import MAX_TEXT_BYTES, UNLIMITED_BYTES, expand_user_path, open_file, read_file
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.io.values.validation import parse_json
from polyfed.simulation.storage.paths import choose_stored_model

_ROLES = ("site", "group", "time", "columns", "drop", "categorical")
_MOST_BYTES_READ_EARLY = 8 * 2**20
_ARROW_NULLS = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL", "NaN",
     "n/a", "nan", "null")
)  # fmt: skip
_TRUTH_VALUES = frozenset(("true", "false", "0", "1"))
_ROW_PER_EXAMPLE = "a CSV or Parquet file that has one row per example"


def check_data_section(data: Any, *, is_for_training: bool = True) -> None:
    """Raises a `UserError` if the section `data` has sizes of sets out of their range, or `check_table` refuses it."""
    if isinstance(data, Mapping):
        check_split_sizes(data)
    check_table(data, is_for_training=is_for_training)


def check_table(data: Any, *, is_for_training: bool = True) -> None:
    """Raises a `UserError` if the section `data` names a table or a column that does not exist.

    Args:
        data: a section of a configuration.
        is_for_training: whether cells are checked, too, and not the names alone.
    """
    if not isinstance(data, Mapping) or data.get("name") != "table":
        return
    if not data.get("path"):
        raise UserError(f"give path=... (--data.path) with {_ROW_PER_EXAMPLE}")
    header = _read_header(str(data["path"]), f"give path=... (--data.path) with {_ROW_PER_EXAMPLE}", data)
    if header is None:
        return
    targets = _split_names(data.get("target"), header)
    roles = {role: None if data.get(role) is None else str(data[role]) for role in ("event", "site", "group", "time")}
    check_targets_are_named(header, targets, roles)
    names_by_role = {"target": [*targets, *_split_names(data.get("event"), header)]}
    names_by_role |= {role: _split_names(data.get(role), header) for role in _ROLES}
    names_by_role["subgroups"] = [
        split_column_and_cuts(entry, header)[0] for entry in _split_names(data.get("subgroups"), header)
    ]
    for role, names in names_by_role.items():
        check_names_of_columns(header, names, role)
    cells = _read_cells(expand_user_path(str(data["path"]), "the table"), header, data) if is_for_training else {}
    if cells:
        _check_cells(cells, names_by_role, data)


def count_clients_at_most(data: Mapping[str, Any]) -> int | None:
    """Returns how many clients the section `data` has at most; None if it cannot be told before the data are loaded."""
    number, site = data.get("clients"), data.get("site")
    if number is None and data.get("name") == "table" and isinstance(site, str):
        header = _read_header(str(data.get("path")), "", data) or []
        cells = _read_cells(expand_user_path(str(data["path"]), "the table"), header, data)
        number = len({*cells[site]} - {None}) if site in cells else None
    return number if is_whole_number(number, 1) else None


def describe_columns_of_table(data: Mapping[str, Any]) -> str:
    """Returns words for the columns of the CSV file that the section `data` names, or "" if they cannot be told.

    Raises:
        UserError: the file does not exist.
    """
    path = str(data.get("path") or "")
    header = _read_header(path, f"give path=... (--data.path) with {_ROW_PER_EXAMPLE}", data) if path else None
    return f"the columns: {', '.join(filter(None, header))}" if header else ""


def check_prediction(folder: Path, client: str | None, file: str) -> None:
    """Raises a `UserError` if the file, a column that the network needs, or the network is missing."""
    prepared = sorted((folder / "models").glob("*.preprocessing.json")) or [folder / "preprocessing.json"]
    preprocessing = _read_json(prepared[0])
    reading, columns, site = (preprocessing.get(key) for key in ("reading", "columns", "site"))
    try:
        header = _read_header(file, f"give {_ROW_PER_EXAMPLE}", reading if isinstance(reading, dict) else {})
    except UserError as error:  # new rows have the encoding of the run's
        raise UserError(re.sub(r"give (\S+ \()?--data.encoding \S+, or ", "", str(error))) from error
    if client is not None or site is None or (header is not None and site not in header):
        more = "" if site is None else f", or a table with the column {site!r}, for the network of each row's site"
        check_client_of_models(folder, client, more)
    if header is not None and isinstance(columns, list):
        names = [str(column.get("name")) for column in columns if isinstance(column, dict)]
        check_names_of_columns(header, names, "features")


def check_client_of_models(folder: Path, client: str | None, remedy: str = "") -> None:
    """Raises a `UserError` if a run directory has no network of a client, or several and none is named.

    The message ends with `remedy`, what to give in place of a client.
    """
    files = sorted((folder / "models").glob("*.signature.json"))
    clients = {file.name.removesuffix(".signature.json"): str(_read_json(file).get("client") or "") for file in files}
    if clients and all(clients.values()):
        choose_stored_model(folder, clients, client, remedy)


def check_table_exists(path: str, advice: str = f"give {_ROW_PER_EXAMPLE}") -> Path:
    """Returns the path of a table; raises a `UserError` that ends with the advice if nothing is there."""
    file = expand_user_path(path, f"a path of the data ({advice})")
    if not file.exists():
        raise UserError(f"{path!r} {'leads nowhere' if file.is_symlink() else 'does not exist'}; {advice}")
    return file


def _read_header(path: str, advice: str, options: Mapping[str, Any]) -> list[str] | None:
    """Reads the names of the columns in the first line of a CSV file; returns None if they cannot be told."""
    file = check_table_exists(path, advice)
    if not file.is_file() or file.suffix.lower() in (".parquet", ".pq"):
        return None
    try:
        encoding = options.get("encoding") or "utf-8"
        with io.TextIOWrapper(open_file(file, UNLIMITED_BYTES), encoding) as stream:
            first = stream.readline(MAX_TEXT_BYTES).removeprefix("\ufeff")
            has_rows = "\0" in first or any(map(str.strip, iter(lambda: stream.readline(MAX_TEXT_BYTES), "")))
        names = next(csv.reader([first], delimiter=_find_delimiter(first, options)), [])
    except (UnicodeDecodeError, LookupError) as error:
        raise UserError(describe_undecodable_file(file, encoding, error)) from error
    except (OSError, TypeError, csv.Error):
        return None
    if first.count('"') % 2 or "\0" in first:
        return None
    if not has_rows and first.strip() and all(map(str.isprintable, first.split())):
        raise UserError(describe_missing_rows(repr(path)))
    return [name.strip() for name in names]


def _find_delimiter(first_line: str, options: Mapping[str, Any]) -> str:
    delimiter = str(options.get("delimiter") or "auto")
    return max((",", ";", "\t", "|"), key=first_line.count) if delimiter == "auto" else delimiter


def _read_cells(file: Path, header: Sequence[str], options: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Reads the columns of a small CSV file, None where a cell is empty; {} if the library has to judge the file."""
    if file.stat().st_size > _MOST_BYTES_READ_EARLY or len(set(header)) < len(header):
        return {}
    encoding = options.get("encoding") or "utf-8"
    try:
        with io.TextIOWrapper(open_file(file, _MOST_BYTES_READ_EARLY), encoding, newline="") as stream:
            text = stream.read().removeprefix("\ufeff")
        separator = _find_delimiter(text.partition("\n")[0], options)
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row][1:]
    except UnicodeDecodeError as error:
        raise UserError(describe_undecodable_file(file, encoding, error)) from error
    except (OSError, TypeError, csv.Error):
        return {}
    if any(len(row) != len(header) for row in rows):
        return {}
    sign_of_column = [entry.rpartition("=") for entry in _split_names(options.get("missing"), ())]
    empty = {*_ARROW_NULLS, *(sign for name, equals, sign in sign_of_column if not (name and equals))}
    cells: dict[str, list[str | None]] = {}
    for place, name in enumerate(header):
        signs = empty | {sign for column, equals, sign in sign_of_column if equals and column == name}
        cells[name] = [None if row[place] in signs else row[place].strip() or None for row in rows]
    while rows and all(column[-1] is None for column in cells.values()):  # empty rows at the end, as spreadsheets write
        rows.pop()
        for column in cells.values():
            column.pop()
    return cells if rows else {}


def _check_cells(
    cells: Mapping[str, Sequence[str | None]], names_by_role: Mapping[str, Sequence[str]], data: Mapping[str, Any]
) -> None:
    """Raises the library's errors about columns that cannot be used, if the library would for certain; all in one."""
    if errors := list(_find_errors(cells, names_by_role, data)):
        raise UserError("; besides, ".join(errors))


def _find_errors(
    cells: Mapping[str, Sequence[str | None]], names_by_role: Mapping[str, Sequence[str]], data: Mapping[str, Any]
) -> Iterator[str]:
    used = {role: names_by_role[role] for role in ("site", "group", "time", "target")}
    for role, names in used.items():
        for name in names if data.get(f"missing_{role}") != "drop" else ():
            empty_rows = [row for row, cell in enumerate(cells[name]) if cell is None]
            yield from _list_errors(check_no_empty_cells, empty_rows, name, role)
    targets = names_by_role["target"]
    if len(targets) == 1 and data.get("task", "auto") == "auto" and data.get("positive") is None:
        sites = cells[used["site"][0]] if used["site"] else cells[targets[0]]
        labels = [cell for cell, site in zip(cells[targets[0]], sites, strict=True) if cell and site]
        numbers = {float(cell) for cell in labels if is_numeric_text(cell)}
        if all(map(float.is_integer, numbers)) and all(map(is_numeric_text, labels)):
            yield from _list_errors(check_whole_numbers_are_classes, len(numbers), targets[0])
        elif data.get("decimal") != "," and not all(map(is_numeric_text, labels)):
            for check in (check_texts_are_no_dates, check_texts_are_classes):
                if errors := _list_errors(check, cells[targets[0]], targets[0]):
                    yield from errors
                    break
    if data.get("schema") is not None:
        return
    left_out = {name for names in used.values() for name in names} | {*names_by_role["drop"]}
    features = names_by_role["columns"] or [name for name in cells if name and name not in left_out]
    refusals = []
    for name in features:
        present = [cell for cell in cells[name] if cell is not None]
        has_commas = data.get("decimal") == "," and all(
            DECIMAL_COMMA.fullmatch(cell) or is_numeric_text(cell) for cell in present
        )
        is_usable = has_commas or all(map(is_numeric_text, present)) or {*map(str.lower, present)} <= _TRUTH_VALUES
        if not present or not (is_usable or name in names_by_role["categorical"]):
            refusals.append(find_text_refusal(cells[name], name))
    yield from _list_errors(refuse_columns, [refusal for refusal in refusals if refusal is not None])


def _list_errors(check: Callable[..., None], *arguments: Any) -> list[str]:
    """Returns a list of the `UserError` that a check raises; [] if it raises none."""
    try:
        check(*arguments)
    except UserError as error:
        return [str(error)]
    return []


def _split_names(names: Any, header: Sequence[str]) -> list[str]:
    if isinstance(names, str):
        return [names] if names in header else [part.strip() for part in names.split(",") if part.strip()]
    return [str(name) for name in names or ()]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(file))
    except (OSError, ValueError):  # a UserError, of a file that is no regular one, is a ValueError
        return {}
    return content if isinstance(content, dict) else {}
