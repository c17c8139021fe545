"""Reads and writes a site's privacy ledger (`privacy.json`), which counts all that the site has released of each data set.

It has the messages by the noise on them and, for training with `privacy`, the optimiser steps by sampling rate and noise.
A second file (`privacy-count.json`) has the number of entries, by which an outdated copy of the ledger is detected.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, NotRequired, TypedDict, TypeVar, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import MAX_ROUNDS_BYTES, read_file, write_file_atomically
from polyfed.core.io.text.terminal_text import fold_spelling
from polyfed.core.io.values.validation import parse_json, validation_error

Kind = TypeVar("Kind")


class _LedgerContent(TypedDict):
    """Describes the ledger by data set: messages by noise multiplier, and steps by kind ("group 0.05 1.2")."""

    version: Literal[1]
    data_sets: dict[str, dict[str, int]]
    private_steps: NotRequired[dict[str, dict[str, int]]]


@final
class StepKind(NamedTuple):
    """Names steps of equal cost: the unit ("example" or "group"), its probability, and the noise multiplier."""

    unit: str
    sampling_rate: float
    noise_multiplier: float


@final
@dataclass(frozen=True)
class Ledger:
    """Holds the content of a privacy ledger.

    Args:
        messages: by data set, the number of messages sent with each noise multiplier; 0 for those without noise.
        private_steps: by data set, the number of steps of each kind. A data set that a run with `privacy` has begun to use
            is there, with or without steps.
    """

    messages: dict[str, dict[float, int]] = field(default_factory=dict)
    private_steps: dict[str, dict[StepKind, int]] = field(default_factory=dict)

    def count_entries(self) -> dict[str, int]:
        """Returns the number of messages and steps by data set."""
        names = [*self.messages, *(name for name in self.private_steps if name not in self.messages)]
        pages = {name: (self.messages.get(name, {}), self.private_steps.get(name, {})) for name in names}
        return {name: sum(messages.values()) + sum(steps.values()) for name, (messages, steps) in pages.items()}


def read_ledger(file: Path) -> Ledger:
    """Reads the ledger; returns an empty one if nothing was ever sent.

    Raises:
        UserError: the ledger is damaged, older than what was sent, or missing although something was sent.
    """
    advice = "put back a copy of it; without one, nobody knows what has been spent, and nothing is sent"
    if not file.exists():
        if _count_file(file).exists() or any(
            b'"epsilon"' in read_file(metrics, MAX_ROUNDS_BYTES) for metrics in file.parent.glob("*/metrics.jsonl")
        ):
            raise UserError(f"{file} is missing, and runs beside it have sent messages; {advice}")
        return Ledger()
    try:
        content = parse_json(read_file(file))
        if error_text := validation_error(content, _LedgerContent):
            raise ValueError(error_text)
        ledger = Ledger(
            {name: _add_up(map(_parse_messages, page.items())) for name, page in content["data_sets"].items()},
            {name: _add_up(map(_parse_steps, page.items())) for name, page in content.get("private_steps", {}).items()},
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); {advice}") from error
    _check_not_older(file, ledger)
    return ledger


def write_ledger(file: Path, ledger: Ledger) -> None:
    """Writes the ledger, and then its number of entries, so that the ledger is never behind its count.

    Raises:
        UserError: two data sets have names that look alike, each of which would have a budget.
    """
    name_by_spelling: dict[str, str] = {}
    for name in ledger.count_entries():
        if (earlier_name := name_by_spelling.setdefault(fold_spelling(name), name)) != name:
            raise UserError(
                f"{file} has the data set {earlier_name!r}, and {name!r} would have another budget; write data-set as "
                "before, or give other data a name that does not look like it"
            )
    content: _LedgerContent = {
        "version": 1,
        "data_sets": {name: {str(z): n for z, n in page.items()} for name, page in ledger.messages.items()},
    }
    if ledger.private_steps:
        content["private_steps"] = {
            name: {" ".join(map(str, kind)): number for kind, number in page.items()}
            for name, page in ledger.private_steps.items()
        }
    write_file_atomically(file, json.dumps(content).encode())
    write_file_atomically(_count_file(file), json.dumps(ledger.count_entries()).encode())


def _count_file(file: Path) -> Path:
    return file.with_name(f"{file.stem}-count.json")


def _check_not_older(file: Path, ledger: Ledger) -> None:
    """Raises a `UserError` if the ledger counts less than was sent, so that it must be an outdated copy."""
    count_file = _count_file(file)
    if not count_file.exists():  # before the first message
        return
    try:
        entry_counts = parse_json(read_file(count_file))
        if error_text := validation_error(entry_counts, dict[str, int]):
            raise ValueError(error_text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{count_file} is damaged ({error}); it shows whether {file.name} is an older copy. Remove it if that ledger is "
            "the newest"
        ) from error
    recorded = ledger.count_entries()
    for data_set, number in entry_counts.items():
        if recorded.get(data_set, 0) < number:
            entries = "messages and private steps" if data_set in ledger.private_steps else "messages"
            raise UserError(
                f"{file} has {recorded.get(data_set, 0)} {entries} about the data set {data_set!r}, and {number} were sent: "
                f"it is an older copy or was changed. Put back the newest, or add the missing {entries} by hand; nothing is "
                "sent until then"
            )


def _add_up(entries: Iterable[tuple[Kind, int]]) -> dict[Kind, int]:
    """Returns the number of each kind; an owner who adds messages by hand may write 1 beside 1.0."""
    numbers: dict[Kind, int] = {}
    for kind, number in entries:
        numbers[kind] = numbers.get(kind, 0) + number
    return numbers


def _parse_messages(entry: tuple[str, int]) -> tuple[float, int]:
    multiplier, number = entry
    z = float(multiplier)
    if not 0 <= z < math.inf or number < 1:
        raise ValueError(f"it has the entry {multiplier!r}: {number!r}")
    return z, number


def _parse_steps(entry: tuple[str, int]) -> tuple[StepKind, int]:
    text, number = entry
    unit, rate, multiplier, *rest = [*text.split(" "), "", ""]
    kind = StepKind(unit, float(rate), float(multiplier))
    if any(rest) or unit not in ("example", "group") or not 0 < kind.sampling_rate <= 1 or number < 1:
        raise ValueError(f"it has the entry {text!r}: {number!r}")
    if not 0 < kind.noise_multiplier < math.inf:
        raise ValueError(f"it has the entry {text!r}, whose noise is not positive")
    return kind, number
