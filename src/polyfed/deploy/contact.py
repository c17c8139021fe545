"""Records in a site's state folder when its SuperNode last reached the server, for `polyfed flower health`."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, expand_user_path, open_atomic_file, read_file
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.simulation.storage.paths import safe_file_name

_LOG = logging.getLogger("polyfed.supernode")
_WRITE_SECONDS = 10.0  # between two records of an idle SuperNode


class ContactRecord(TypedDict):
    """Describes `contact-SITE.json`: how a SuperNode stands with the server; times in seconds since 1970."""

    site: str
    superlink: str
    authority: str  # file of trusted certificates; empty for those of the system
    process: int
    started: float
    reached: float | None  # last answer of the server; None before the first
    busy_since: float | None  # start of the task that the site is at; None if it waits for one


@final
class ContactRecorder:
    """Writes `contact-SITE.json` when the server is reached and when a task begins or ends.

    A record that cannot be written is logged once and ends nothing.

    Args:
        node_config: the node configuration; without `state-dir` nothing is written.
        superlink: HOST:PORT of the server.
        authority: file of the trusted certificates; None for those of the system.
        clock: returns the time in seconds since 1970.
    """

    def __init__(
        self,
        node_config: Mapping[str, Any],
        superlink: str,
        authority: Path | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        site, folder = str(node_config.get("client-id", "")), node_config.get("state-dir")
        self._file = Path(str(folder)) / f"contact-{safe_file_name(site)}.json" if folder else None
        self._clock, self._written_at = clock, 0.0
        self._contact: ContactRecord = {
            "site": site, "superlink": superlink, "authority": "" if authority is None else str(authority.absolute()),
            "process": os.getpid(), "started": clock(), "reached": None, "busy_since": None,
        }  # fmt: skip
        self._write()

    def record_answer(self) -> None:
        """Records that the server has answered now; writes this at most every 10 s."""
        self._contact["reached"] = now = self._clock()
        if not 0.0 <= now - self._written_at < _WRITE_SECONDS:
            self._write()

    def record_start_or_end_of_task(self, begins: bool) -> None:
        """Records that the site begins, or has ended, a task of the server."""
        self._contact["busy_since"] = self._clock() if begins else None
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        self._written_at = self._clock()
        try:
            file = expand_user_path(self._file, "node-config: state-dir")
            create_private_folder_if_missing(file.parent, parents=True)
            with open_atomic_file(file, sync=False) as output:
                output.write(json.dumps(self._contact).encode())
        except (OSError, UserError) as error:
            _LOG.warning(
                "polyfed flower health will know nothing of this site: %s cannot be written (%s)", self._file, error
            )
            self._file = None


def read_contacts(state_folder: Path) -> list[ContactRecord]:
    """Reads the contact files of all sites that share a state folder; leaves out damaged ones."""
    contacts = []
    for file in sorted(state_folder.glob("contact-*.json")):
        try:
            content = parse_json(read_file(file))
        except (OSError, ValueError):
            continue
        if not validation_error(content, ContactRecord):
            contacts.append(cast(ContactRecord, content))
    return contacts
