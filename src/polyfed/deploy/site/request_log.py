"""Records which tasks a server has requested of a site in a run, and limits repeated requests, from which the server
could learn about the data.

A site's data may decide whether training fails, or whether numbers fit a secure sum. A server that could request one round
again and again, each time with another model or learning rate, could read a number of the site from the pattern of its
refusals. So

- the site records a task before it looks at its data. In secure sums the task is bound to its first inputs, which determine
  the outcome: a resumed run repeats the round with the same inputs, and other inputs are refused;
- the site counts refusals that may depend on data. After the last one allowed, the task gets the same answer without a look
  at the data.

`requests.json` in the run's folder keeps this for good. The owner may remove an entry once a fault is fixed.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, final

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, read_file, write_file_atomically
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.state_dict import view_as_bytes
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.site.private_state import InvalidSiteStateError

FAILURE_TEXT = "it cannot do this task (the reason is in its log)"
"""The server's text for a failure that may depend on data, so that it learns one bit and no more."""
MAX_REFUSALS = 10
"""Refusals that may depend on data, of an introduction or of a task without masks and noise; with these the limit is 1."""
_OTHER_INPUTS = (
    "this task came with other inputs before, and both answers together could tell more than a sum; let the run go on from "
    "its checkpoint as it was, or start another run"
)
_FILE = "requests.json"
_INPUTS = (
    "algorithm", "architecture", "phase", "part", "round", "seed", "run_seed", "state", "metrics", "compress_down",
)  # fmt: skip
_LOG = logging.getLogger("polyfed.site")


class _TaskRecord(TypedDict):
    """Describes the entry of one task in the request log `requests.json`."""

    inputs: str  # hash of its inputs
    entered: bool  # whether the ledger has it, and no noise was drawn for it since
    refusals: int  # those that may depend on data
    others: int  # requests with other inputs, which were refused


@final
@dataclass(frozen=True)
class TaskRequest:
    """Identifies a requested task by its name and a hash of its inputs, and holds how often the site may refuse it.

    Args:
        name: phase and round, such as "local 3".
        inputs_hash: hash of the task's inputs, see `hash_task_inputs`.
        max_refusals: limit of refusals that may depend on data.
    """

    name: str
    inputs_hash: str
    max_refusals: int


@final
@dataclass(frozen=True)
class RequestLog:
    """Reads and writes the log of the tasks that the server has requested of this site in a run.

    Args:
        folder: the run's folder at the site.
    """

    folder: Path

    def check_allowed_and_find_in_ledger(self, task: "TaskRequest", *, same_inputs_only: bool) -> bool:
        """Returns whether the ledger counts the task; raises an error after refusals or for other inputs.

        Args:
            task: the task.
            same_inputs_only: whether the task must have the inputs of its first request.

        Returns:
            Whether the ledger has the task already, because an attempt ended before noise was drawn.

        Raises:
            RefusalError: the site may not begin the task.
            InvalidSiteStateError: the log is damaged.
        """
        if (entry := self._read_records().get(task.name)) is None:
            return False
        if same_inputs_only and entry["inputs"] != task.inputs_hash:
            self._write_record(task, {**entry, "others": entry["others"] + 1})
            _LOG.warning(
                "run %s: the server requests %r with other inputs than before, %d times so far; the site refuses, so the "
                "server learns nothing from it",
                self.folder.name, task.name, entry["others"] + 1,
            )  # fmt: skip
            raise RefusalError(_OTHER_INPUTS)
        if entry["refusals"] >= task.max_refusals:
            _LOG.warning(
                "run %s: %r was refused %d times, of at most %d, and is not started again; once the cause is fixed, remove "
                "its entry from %s",
                self.folder.name, task.name, entry["refusals"], task.max_refusals, self.folder / _FILE,
            )  # fmt: skip
            raise RefusalError(FAILURE_TEXT)
        return entry["entered"] and entry["inputs"] == task.inputs_hash

    def record_start(self, task: "TaskRequest", *, is_in_ledger: bool) -> None:
        """Records in the request log that the site is about to use its data for a task, or to draw noise for the reply.

        Args:
            task: the task.
            is_in_ledger: whether the ledger has it, and no noise was drawn since.
        """
        self._write_record(task, {**self._read_record(task), "inputs": task.inputs_hash, "entered": is_in_ledger})

    def count_refusal(self, task: "TaskRequest") -> None:
        """Records in the request log that the site refused a task for a reason that may depend on the data."""
        entry = self._read_record(task)
        _LOG.warning(
            "run %s: %r is refused for a reason that may depend on data, %d times of at most %d; each reveals one bit",
            self.folder.name, task.name, entry["refusals"] + 1, task.max_refusals,
        )  # fmt: skip
        self._write_record(task, {**entry, "entered": False, "refusals": entry["refusals"] + 1})

    def _read_record(self, task: "TaskRequest") -> _TaskRecord:
        fresh_record = _TaskRecord(inputs=task.inputs_hash, entered=False, refusals=0, others=0)
        return self._read_records().get(task.name, fresh_record)

    def _read_records(self) -> dict[str, _TaskRecord]:
        file = self.folder / _FILE
        if not file.exists():
            return {}
        try:
            content = parse_json(read_file(file))
            error_text = validation_error(content, dict[str, _TaskRecord])
        except UserError:  # its text has the site's paths, which must not go to the server
            error_text = "it cannot be read"
        except (OSError, ValueError) as error:
            error_text = str(error)
        if error_text:
            raise InvalidSiteStateError(
                f"{self.folder.name}/{_FILE} is damaged ({error_text}); put back a copy of it, or start another run"
            )
        return dict(content)

    def _write_record(self, task: "TaskRequest", entry: _TaskRecord) -> None:
        create_private_folder_if_missing(self.folder, parents=True)
        write_file_atomically(self.folder / _FILE, json.dumps({**self._read_records(), task.name: entry}).encode())


def hash_task_inputs(head: Mapping[str, Any], body: Message) -> str:
    """Returns a SHA-256 hash of the parts of a message that decide the result of its task.

    Args:
        head: the header.
        body: the payload.

    >>> import torch
    >>> message, other = Message({"model": {"w": torch.zeros(2)}}), Message({"model": {"w": torch.zeros(1, 2)}})
    >>> hash_task_inputs({"round": 1}, message) == hash_task_inputs({"round": 1, "keep": 3}, message)
    True
    >>> hash_task_inputs({"round": 1}, message) == hash_task_inputs({"round": 1}, other)
    False
    """
    digest = hashlib.sha256()
    fields = [{word: head.get(word) for word in _INPUTS}, dict(body.scalars)]
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for group, tensors in body.tensors.items():
        for name, tensor in tensors.items():
            digest.update(json.dumps([group, name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(view_as_bytes(tensor).numpy().data)
    return digest.hexdigest()
