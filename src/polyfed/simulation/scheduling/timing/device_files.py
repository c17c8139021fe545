"""Reads files that describe clients' devices and their availability: CSV files, and FedScale's traces as JSON."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path, read_file
from polyfed.core.io.values.number_checks import is_positive_number
from polyfed.core.io.values.validation import parse_json

T = TypeVar("T")
_TRAINING_FACTOR = 3.0  # FedScale's: forward and backward pass take three times the inference that it has measured
_BYTES_OF_KILOBIT = 128.0


def load_device_text(path: str, name: str) -> str:
    """Returns the text of a file.

    Raises:
        UserError: the file cannot be read, or is not text.
    """
    file = expand_user_path(path, name)
    try:
        return read_file(file).decode("utf-8-sig")  # Excel puts a mark before the first line
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot read {str(file)!r}: {getattr(error, 'strerror', None) or error}") from error


def read_csv_rows(text: str, columns: Sequence[str], place: str) -> list[tuple[int, dict[str, str]]]:
    """Returns the rows of a CSV text as (line number, {column: text}).

    Raises:
        UserError: a column is missing, or a row is not complete.
    """
    reader = csv.DictReader(io.StringIO(text))
    header = [name.strip() for name in reader.fieldnames or ()]
    if missing_columns := [column for column in columns if column not in header]:
        raise UserError(
            f"{place} has no column {missing_columns[0]!r}; it needs {', '.join(columns)} in its first line"
        )
    rows = []
    for row in reader:
        if row.get(None):
            raise UserError(
                f"{place}, line {reader.line_num} has more cells than the first line has columns; write numbers with a point"
            )
        cells = {str(key).strip(): (value or "").strip() for key, value in row.items() if isinstance(value, str | None)}
        if any(not cells.get(column) for column in columns):
            raise UserError(f"{place}, line {reader.line_num}: {', '.join(columns)} must all be given, got {cells}")
        rows.append((reader.line_num, cells))
    if not rows:
        raise UserError(f"{place} has no rows")
    return rows


def parse_number(text: str, place: str, column: str) -> float:
    """Returns a finite number of at least 0 from a cell.

    Raises:
        UserError: the text is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"{place}: {column} must be a number of at least 0, got {text!r}")
    return number


def read_device_file(path: str, column: str, name: str) -> dict[str, float]:
    """Reads each client's rate from a file; raises a `UserError` if the file has another form.

    Args:
        path: a CSV file with the columns `client` and `column`, or FedScale's device capacities as JSON:
            `{client: {"computation": milliseconds an example, "communication": kilobits a second}}`.
        column: "speed" (examples a second) or "bandwidth" (bytes a second).
        name: of the setting, for errors.

    Returns:
        Client -> rate.
    """
    text = load_device_text(path, name)
    if not path.endswith(".json"):
        rates = dict[str, float]()
        for line, row in read_csv_rows(text, ("client", column), f"{name}: {path!r}"):
            place = f"{name}: {path!r}, line {line}"
            if row["client"] in rates:
                raise UserError(f"{place}: client {row['client']!r} has a line before; leave one of them out")
            rates[row["client"]] = parse_number(row[column], place, column)
        return rates
    key = "computation" if column == "speed" else "communication"
    rates = {}
    for client, entry in read_json_mapping(text, path, name).items():
        value = entry.get(key) if isinstance(entry, Mapping) else None
        if not is_positive_number(value):
            raise UserError(f"{name}: {path!r}: {client!r} must have a positive {key!r}, got {json.dumps(entry)[:60]}")
        rates[client] = 1000.0 / (_TRAINING_FACTOR * value) if column == "speed" else value * _BYTES_OF_KILOBIT
    return rates


def read_json_mapping(text: str, path: str, name: str) -> dict[str, Any]:
    """Returns the mapping that a JSON text holds.

    Raises:
        UserError: the text is not JSON, or not a mapping with entries.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(f"{name}: {path!r} is not JSON ({error})") from error
    if not isinstance(value, dict) or not value:
        content = "nothing" if value == {} else type(value).__name__
        raise UserError(f"{name}: {path!r} must map clients to entries, got {content}")
    return value


def assign_entries_to_clients(entries: Mapping[str, T], client_ids: Sequence[str], name: str) -> Mapping[str, T]:
    """Returns the entry of each client.

    A public trace names its devices by numbers. If no client has such a name, the devices are assigned to the clients: the
    first client gets the first device, and after the last device the first follows again.

    Args:
        entries: entry by client, or by the number of a device.
        client_ids: sorted.
        name: of the setting, for errors.

    Raises:
        UserError: a client has no entry.

    >>> assign_entries_to_clients({"10": "slow", "9": "fast"}, ["north", "south", "west"], "speeds")
    {'north': 'fast', 'south': 'slow', 'west': 'fast'}
    """
    missing_ids = [client for client in client_ids if client not in entries]
    if not missing_ids:
        return entries
    if len(missing_ids) == len(client_ids) and all(key.isdecimal() for key in entries):
        devices = sorted(entries, key=int)
        return {client: entries[devices[k % len(devices)]] for k, client in enumerate(client_ids)}
    raise UserError(
        f"{name} has nothing for client {missing_ids[0]!r}; give an entry for every client "
        f"(it has {', '.join(map(repr, sorted(entries)[:3]))}{', ...' if len(entries) > 3 else ''})"
    )


def is_device_file(text: str) -> bool:
    """Returns True if a setting's text names a file.

    >>> is_device_file("devices.csv"), is_device_file("lognormal:1.0")
    (True, False)
    """
    return Path(text).suffix in (".csv", ".json")
