"""Writes the result of an audit into the run's directory, and reads what the page shows of it."""

import json
import warnings
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file, write_file_atomically
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.report.audit.audit_report import JSON_FORMAT, AuditReport

FILE = "audit.json"
"""Names the file of a run directory with the result of its last audit."""


class RateEntry(TypedDict):
    """Describes a rate with its interval in `audit.json`."""

    value: float
    low: float
    high: float


class ClientEntry(TypedDict):
    """Describes how well a client's training examples were found, in `audit.json`."""

    client: str
    examples: int
    auc: RateEntry
    tpr_at_1_percent: RateEntry
    tpr_at_10_percent: RateEntry
    epsilon: float | None


class MessageEntry(TypedDict):
    """Describes what was reconstructed from a client's message, in `audit.json`."""

    client: str
    round: int
    senders: int
    images: int
    steps: int
    candidates: int
    best_psnr: float | None
    mean_psnr: float | None
    other_best_psnr: float | None
    other_mean_psnr: float | None
    label_source: str
    labels_right: float | None
    labels_right_by_guess: float
    note: str


class AuditEntry(TypedDict):
    """Describes the content of `audit.json`."""

    format: int
    method: str
    shadow_runs: int
    clients: list[ClientEntry]
    overall: ClientEntry
    sentences: list[str]
    messages: NotRequired[list[MessageEntry]]


def write_audit(folder: Path, report: AuditReport) -> None:
    """Writes the report to `audit.json` in a run directory, for the page; warns if it cannot be written."""
    text = json.dumps(report.to_json_dict(), indent=1, ensure_ascii=False) + "\n"
    try:
        write_file_atomically(folder / FILE, text.encode())
    except OSError as error:
        warnings.warn(f"{folder / FILE} cannot be written ({error.strerror}); the page will not show this audit",
                      RuntimeWarning, stacklevel=3)  # fmt: skip


def read_audit(folder: Path) -> AuditEntry | None:
    """Returns the content of `audit.json` in a run directory; None if the run was not audited.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content: Any = parse_json(read_file(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); audit the run again, or delete it") from error
    if flaw := validation_error(content, AuditEntry):
        raise UserError(f"{path} is damaged ({flaw}); audit the run again, or delete it")
    if content["format"] != JSON_FORMAT:
        raise UserError(f"{path} has format {content['format']!r}, and this version reads {JSON_FORMAT}; audit again")
    entry: AuditEntry = content
    return entry
