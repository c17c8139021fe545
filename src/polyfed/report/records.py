"""The rounds in a `metrics.jsonl`, checked, so that a damaged file is told and not taken for a run that has not begun."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import UserError
from polyfed.evaluation import SCORE

_TOTALS = ("bytes_down_total", "bytes_up_total")
_SECONDS = ("seconds_clients", "seconds_server")  # runs of early versions have none


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The rounds; none if there is no file yet. A last line that was cut off while it was written does not count.

    Raises:
        UserError: the file cannot be read, or a line of it is not a round.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    lines = text.rstrip().split("\n") if text.strip() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # Half a round, or the zeros that some file systems leave after a power cut.
            if number == len(lines) and not text.endswith("\n") and line.startswith(("{", "\0")):
                break
            wrong = "it is not JSON"
        else:
            wrong = _wrong(record)
        if wrong:
            raise UserError(
                f"{path}, line {number}, is damaged: {wrong}; put back a copy of the file from before, or make the run again"
            )
        records.append(record)
    return records


def _wrong(record: Any) -> str:
    """What is wrong with a round; empty for a sound one."""
    if not isinstance(record, Mapping):
        return "it is no round"
    number = record.get("round")
    if not isinstance(number, int) or isinstance(number, bool):
        return f"its round is {_short(number)}" if "round" in record else "it has no round"
    for name in (*_TOTALS, *_SECONDS):
        if name not in record and name in _TOTALS:
            return f"round {number} has no {name}"
        if not _is_number(record.get(name, 0)):
            return f"{name} of round {number} is {_short(record[name])}, which is no number"
    if "clients" not in record:
        return f"round {number} has no clients"
    clients = record["clients"]
    if not isinstance(clients, Mapping) or not all(isinstance(row, Mapping) for row in clients.values()):
        return f"the clients of round {number} are no mapping from ids to values"
    for client, row in clients.items():
        for score in SCORE.values():
            if row.get(score) is not None and not _is_number(row[score]):
                return f"{score} of client {client!r} in round {number} is {_short(row[score])}, which is no number"
    return "" if isinstance(record.get("failures", []), list) else f"the failures of round {number} are no list"


def _is_number(value: Any) -> bool:
    """Whether it is a number that fits a float; JSON has no infinities, and true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
