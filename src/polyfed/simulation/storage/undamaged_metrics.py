"""Reads the records of the rounds from a file `metrics.jsonl`, and raises an error if one of its lines is damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError
from polyfed.simulation.storage.directory import read_metrics_text


def read_undamaged_metrics(path: Path, find_record_error: Callable[[Any], str | None]) -> list[dict[str, Any]]:
    """Reads the records of a run's rounds from `metrics.jsonl`; returns an empty list if the file is missing, and
    raises a `UserError` if a line is damaged.

    A last line that was cut off while it was written is left out.

    Args:
        path: the file.
        find_record_error: returns why a record is not valid; None if it is.

    Raises:
        UserError: the file cannot be read, or a line is damaged.
    """
    text = read_metrics_text(path)
    lines = text.rstrip().split("\n") if text.strip() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # Half a record, or the zeros that some file systems leave after a power cut.
            is_cut_off = number == len(lines) and not text.endswith("\n") and line.startswith(("{", "\0"))
            if is_cut_off:
                break
            error: str | None = "it is not JSON"
        else:
            error = find_record_error(record)
        if error:
            raise UserError(
                f"{path}, line {number}, is damaged: {error}; put back a copy of the file from before, or make the run "
                "again"
            )
        records.append(record)
    return records
