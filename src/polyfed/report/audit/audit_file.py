"""Writes the result of an audit into the run's directory, and reads what the page shows of it."""

import json
import warnings
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.values.validation import build_dataclass, field_types, parse_json
from polyfed.report.audit.audit_report import JSON_FORMAT, AuditReport

FILE = "audit.json"
"""Names the file of a run directory with the result of its last audit."""


def write_audit(folder: Path, report: AuditReport) -> None:
    """Writes the report to `audit.json` in a run directory, for the page; warns if it cannot be written."""
    text = json.dumps(report.to_json_dict(), indent=1, ensure_ascii=False) + "\n"
    try:
        write_file_atomically(folder / FILE, text.encode())
    except OSError as error:
        warnings.warn(f"{folder / FILE} cannot be written ({error.strerror}); the page will not show this audit",
                      RuntimeWarning, stacklevel=3)  # fmt: skip


def read_audit(folder: Path) -> AuditReport | None:
    """Returns the content of `audit.json` in a run directory; None if the run was not audited.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content: Any = parse_json(read_file(path))
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise ValueError("it has no format")
        if content["format"] == JSON_FORMAT:
            report: AuditReport = _restore_dataclass(AuditReport, content, "it")
            return report
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); audit the run again, or delete it") from error
    raise UserError(f"{path} has format {content['format']!r}, and this version reads {JSON_FORMAT}; audit again")


def _restore_dataclass(cls: Any, content: Any, label: str) -> Any:
    """Builds a dataclass and those in its fields from JSON; ignores fields of a later version."""
    if not isinstance(content, dict):
        raise UserError(f"{label} must be a mapping, got {type(content).__name__}")
    values = {name: content[name] for name in field_types(cls) if name in content}
    for name, value in values.items():
        kind, items = field_types(cls)[name], get_args(field_types(cls)[name])
        if is_dataclass(kind):
            values[name] = _restore_dataclass(kind, value, f"{label}.{name}")
        elif get_origin(kind) is tuple and isinstance(value, list):
            inner = items[0]
            values[name] = tuple(
                _restore_dataclass(inner, item, f"{label}.{name}[{k}]") if is_dataclass(inner) else item
                for k, item in enumerate(value)
            )
    return build_dataclass(cls, values, label)
