"""What a server has requested of a site in a run, task by task, and how often the site could not do it.

Whether training fails, or numbers fit a sum, may depend on the site's data. A server that could ask for one round again and
again, each time with another model or rate, would read a number of the site from the pattern of its refusals. So

- a task is written down before the site looks at its data. With secure sums it is bound to the inputs with which it came
  first, of which the outcome is a function: the round of a resumed run comes with the same, other inputs are refused;
- a refusal that may depend on data is counted, and after the last one allowed the task gets the same answer without a look
  at the data.

`requests.json` in the folder of the run holds this for good. The owner may take an entry out, once a fault is mended.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, final

import torch

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder, read_file, write_file_atomically
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.deploy.secure_aggregation import RefusalError
from polyfed.deploy.site.private_state import InvalidSiteStateError

FAILURE_TEXT = "it cannot do this task (the reason is in its log)"
"""What a server is told of each failure that may depend on data, where it is to learn one bit by it and no more."""
MAX_REFUSALS = 10
"""That may depend on data: of an introduction, and of a task whose reply goes up as it is. Of a task that masks or noise
hide, it is one."""
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
    """A task: the hash of its inputs; whether it is in the book and no noise was drawn for it since; refusals that may
    depend on data; letters with other inputs, which were refused."""

    inputs: str
    entered: bool
    refusals: int
    others: int


@final
@dataclass(frozen=True)
class TaskRequest:
    """A task as a server requests it.

    Args:
        name: such as "local 3".
        inputs_hash: their hash, see `hash_task_inputs`.
        max_refusals: how many refusals that may depend on data it has.
    """

    name: str
    inputs_hash: str
    max_refusals: int


@final
@dataclass(frozen=True)
class RequestLog:
    """The requests of a run.

    Args:
        folder: of the run, at the site.
    """

    folder: Path

    def check_allowed(self, task: "TaskRequest", *, same_inputs_only: bool) -> bool:
        """Checks that a task may be begun.

        Args:
            task: the task.
            same_inputs_only: whether it is bound to the inputs with which it came first.

        Returns:
            whether the task is in the book already, since an attempt ended before noise was drawn.

        Raises:
            RefusalError: it may not.
            InvalidSiteStateError: the file was changed.
        """
        if (entry := self._read_records().get(task.name)) is None:
            return False
        if same_inputs_only and entry["inputs"] != task.inputs_hash:
            self._write_record(task, {**entry, "others": entry["others"] + 1})
            _LOG.warning(
                "run %s: the server requests %r with other inputs than before, %d times by now; it learns nothing by that",
                self.folder.name, task.name, entry["others"] + 1,
            )  # fmt: skip
            raise RefusalError(_OTHER_INPUTS)
        if entry["refusals"] >= task.max_refusals:
            _LOG.warning(
                "run %s: %r was refused %d times, of at most %d, and is not begun again; once the reason is mended, take "
                "its entry out of %s",
                self.folder.name, task.name, entry["refusals"], task.max_refusals, self.folder / _FILE,
            )  # fmt: skip
            raise RefusalError(FAILURE_TEXT)
        return entry["entered"] and entry["inputs"] == task.inputs_hash

    def record_start(self, task: "TaskRequest", *, in_ledger: bool) -> None:
        """Writes down that the site is about to look at its data for a task, or to draw noise.

        Args:
            task: the task.
            in_ledger: whether the book has it, and no noise was drawn since.
        """
        self._write_record(task, {**self._read_record(task), "inputs": task.inputs_hash, "entered": in_ledger})

    def count_refusal(self, task: "TaskRequest") -> None:
        """Counts a refusal that may depend on data; the log says so."""
        entry = self._read_record(task)
        _LOG.warning(
            "run %s: %r is refused for a reason that may depend on data, %d times of at most %d; each tells one bit",
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
            wrong = validation_error(content, dict[str, _TaskRecord])
        except UserError:  # whose sentence says where the site keeps its files
            wrong = "it cannot be read"
        except (OSError, ValueError) as error:
            wrong = str(error)
        if wrong:
            raise InvalidSiteStateError(
                f"{self.folder.name}/{_FILE} is damaged ({wrong}); put back a copy of it, or start another run"
            )
        return dict(content)

    def _write_record(self, task: "TaskRequest", entry: _TaskRecord) -> None:
        create_private_folder(self.folder, parents=True)
        write_file_atomically(self.folder / _FILE, json.dumps({**self._read_records(), task.name: entry}).encode())


def hash_task_inputs(head: Mapping[str, Any], body: Message) -> str:
    """SHA-256 of all of a letter that the site computes with.

    >>> down, other = Message({"model": {"w": torch.zeros(2)}}), Message({"model": {"w": torch.zeros(1, 2)}})
    >>> hash_task_inputs({"round": 1}, down) == hash_task_inputs({"round": 1, "keep": 3}, down)
    True
    >>> hash_task_inputs({"round": 1}, down) == hash_task_inputs({"round": 1}, other)
    False
    """
    digest = hashlib.sha256()
    fields = [{word: head.get(word) for word in _INPUTS}, dict(body.scalars)]
    digest.update(json.dumps(fields, sort_keys=True).encode())
    for group, tree in body.tensors.items():
        for name, tensor in tree.items():
            digest.update(json.dumps([group, name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
