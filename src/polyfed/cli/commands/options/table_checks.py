"""Refuses files, columns and clients that are not there before torch is imported, which takes seconds.

Whatever these checks cannot read, such as Parquet files, is left to the library, which checks all of it again.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import MAX_TEXT_BYTES, UNLIMITED_BYTES, expand_user_path, open_file, read_file
from polyfed.core.io.validation import parse_json
from polyfed.simulation.storage.directory import read_config

_ROLES = ("site", "group", "time", "columns", "drop", "categorical")
_ROW_PER_EXAMPLE = "a CSV or Parquet file that has one row per example"


def check_table(data: Any) -> None:
    """Raises a `UserError` if the section `data` names a table or a column that does not exist."""
    if not isinstance(data, Mapping) or data.get("name") != "table":
        return
    if not data.get("path"):
        raise UserError(f"give path=... (--data.path) with {_ROW_PER_EXAMPLE}")
    header = _read_header(str(data["path"]), f"give path=... (--data.path) with {_ROW_PER_EXAMPLE}", data)
    if header is None:
        return
    names_by_role = {"target": [*_split_names(data.get("target"), header), *_split_names(data.get("event"), header)]}
    names_by_role |= {role: _split_names(data.get(role), header) for role in _ROLES}
    for role, names in names_by_role.items():
        _check_columns(header, names, role)


def check_prediction(folder: Path, client: str | None, file: str) -> None:
    """Raises a `UserError` if the file, a column that the network needs, or the network is missing."""
    models = folder / "models"
    prepared = sorted(models.glob("*.preprocessing.json")) or [folder / "preprocessing.json"]
    signatures = [_read_json(models / path.name.replace("preprocessing", "signature")) for path in prepared]
    clients = [str(signature.get("client") or "") for signature in signatures]
    if all(clients) and client is None and len(clients) > 1:
        raise UserError(f"{folder} has models of several clients; give --client with one of {', '.join(clients)}")
    if all(clients) and client is not None and client not in clients:
        raise UserError(f"{folder} has no model of client {client!r}; {did_you_mean(client, clients)}")
    reading = _read_json(folder / "signature.json").get("reading") or _read_run_options(folder)
    header = _read_header(file, f"give {_ROW_PER_EXAMPLE}", reading if isinstance(reading, dict) else {})
    columns = _read_json(prepared[0]).get("columns")
    if header is not None and isinstance(columns, list):
        _check_columns(header, [str(column.get("name")) for column in columns if isinstance(column, dict)], "features")


def _read_header(path: str, advice: str, options: Mapping[str, Any]) -> list[str] | None:
    """Reads the names of the columns in the first line of a CSV file; returns None if they cannot be told."""
    file = expand_user_path(path, f"a path of the data ({advice})")
    if not file.exists():
        raise UserError(f"{path!r} {'leads nowhere' if file.is_symlink() else 'does not exist'}; {advice}")
    if not file.is_file() or file.suffix.lower() in (".parquet", ".pq"):
        return None
    try:
        with io.TextIOWrapper(open_file(file, UNLIMITED_BYTES), encoding=options.get("encoding") or "utf-8") as stream:
            first = stream.readline(MAX_TEXT_BYTES).removeprefix("\ufeff")
        delimiter = options.get("delimiter") or "auto"
        separator = max((",", ";", "\t", "|"), key=first.count) if delimiter == "auto" else delimiter
        names = next(csv.reader([first], delimiter=separator), [])
    except (OSError, UnicodeDecodeError, LookupError, TypeError, csv.Error):
        return None
    return [name.strip() for name in names] if first.count('"') % 2 == 0 and "\0" not in first else None


def _check_columns(header: Sequence[str], names: Sequence[str], role: str) -> None:
    for name in names:
        if name not in header:
            raise UserError(f"{role}: the table has no column {name!r}; {did_you_mean(name, filter(None, header))}")


def _split_names(names: Any, header: Sequence[str]) -> list[str]:
    if isinstance(names, str):
        return [names] if names in header else [part.strip() for part in names.split(",") if part.strip()]
    return [str(name) for name in names or ()]


def _read_run_options(folder: Path) -> Any:
    return read_config(folder).get("data") if (folder / "config.yaml").is_file() else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(file))
    except (OSError, ValueError):  # a UserError, of a file that is no regular one, is a ValueError
        return {}
    return content if isinstance(content, dict) else {}
