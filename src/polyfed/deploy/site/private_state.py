"""Stores on a site's disk what a run needs between messages: the client's identity, its private state, and its results.

Each private state is one file, `private/round-000012.state`: the SHA-256 of all that follows, a line that names its owner
(site, run, round, method), and the state. A file is written whole or not at all, so that a site that is killed between two
writes still has the states of earlier rounds. A file that is damaged, or belongs to another site, run, round or method, is
refused by name, since training would silently continue from it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, final

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import (
    append_line_and_flush,
    create_private_folder_if_missing,
    open_atomic_file,
    open_file,
    open_lock_file,
    read_file,
    write_file_atomically,
)
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.state_dict import PyTree
from polyfed.simulation.engines.base import TaskResult
from polyfed.simulation.storage.model_signature import write_model_with_signature
from polyfed.simulation.storage.paths import safe_file_name
from polyfed.simulation.storage.predictions import predictions_parquet

_MAX_LINE_BYTES = 2**20  # bytes of the line that names a state's owner, with the method's fields
_ADVICE = "put back a copy of it, or start another run"


class _StateOwner(TypedDict):
    """Describes to which site, run, round and method a stored private state belongs."""

    site: str
    run: str
    round: int
    method: dict[str, str]  # field -> its value as JSON, so that values that are not finite can be compared


class _ClientIdentity(TypedDict):
    """Describes the client with which a site began a run: its id and a fingerprint of its data."""

    client: str
    data_fingerprint: str


@final
class InvalidSiteStateError(Exception):
    """Raised when a file of the site's private state is missing or damaged, or belongs to another run.

    The sentence goes to the server, so it holds nothing of data or network, and no path outside the site's folder.
    """


def read_private_state(
    folder: Path, site: str, round_number: int | None, method_description: Mapping[str, Any]
) -> PyTree:
    """Reads the client's private state as it was stored after a round; None for the state before the first round.

    Args:
        folder: the run's folder at the site.
        site: the site's name.
        round_number: the round; None means before the first, and gives None.
        method_description: name and fields of the method, as the server sent them.

    Raises:
        InvalidSiteStateError: the state is lost or damaged, or belongs to another site, run, round or method.
    """
    if round_number is None:
        return None
    file = _state_file(folder, round_number)
    shown_path, description = file.relative_to(folder.parent), f"its private state after round {round_number}"
    try:
        with open_file(file) as stream:
            checksum_line = stream.readline(_MAX_LINE_BYTES)
            owner_line = stream.readline(_MAX_LINE_BYTES)
            state = stream.read()
    except OSError as error:
        raise InvalidSiteStateError(
            f"{description} is lost: {shown_path} cannot be read ({error.strerror}); {_ADVICE}"
        ) from error
    except UserError as error:  # its text has the whole path, which must not go to the server
        raise InvalidSiteStateError(
            f"{description} is lost: {shown_path} is not a file that can be read; {_ADVICE}"
        ) from error
    if checksum_line != f"{_compute_checksum(owner_line, state)}\n".encode():
        raise InvalidSiteStateError(
            f"{description} is damaged: {shown_path} was changed since it was written; {_ADVICE}"
        )
    try:
        owner = parse_json(owner_line)
        if validation_error(owner, _StateOwner):
            raise ValueError("nothing says whose it is")
        if difference := _owner_difference(owner, _describe_owner(folder, site, round_number, method_description)):
            raise InvalidSiteStateError(f"{description} is not its own: {shown_path} is of {difference}; {_ADVICE}")
        return deserialize_state(state)
    except (UserError, ValueError) as error:  # their text may show the file's content
        raise InvalidSiteStateError(f"{description} is damaged: {shown_path} holds no state; {_ADVICE}") from error


def write_private_state_and_delete_older(
    folder: Path,
    site: str,
    round_number: int,
    method_description: Mapping[str, Any],
    private_state: PyTree,
    rollback_round: int,
) -> None:
    """Stores a private state, and deletes those to which the server can no longer return.

    Those are the states older than the newest one up to round `rollback_round`. (Rounds after this one are overwritten when
    they are trained again.)

    Args:
        folder: the run's folder at the site.
        site: the site's name.
        round_number: the round.
        method_description: name and fields of the method, as the server sent them.
        private_state: the state.
        rollback_round: the round to which the server may still go back.

    Raises:
        OSError: the file cannot be written; the exception names it.
    """
    target = _state_file(folder, round_number)
    create_private_folder_if_missing(target.parent, parents=True)
    head = json.dumps(_describe_owner(folder, site, round_number, method_description)).encode() + b"\n"
    encoded = serialize_state(private_state)
    with open_atomic_file(target) as file:
        file.write(f"{_compute_checksum(head, encoded)}\n".encode())
        file.write(head)
        file.write(encoded)
    for stale in target.parent.glob(".partial-*"):  # of a process that was killed
        stale.unlink()
    round_texts = {file: file.stem.removeprefix("round-") for file in target.parent.glob("round-*.state")}
    files = {int(name): file for file, name in round_texts.items() if name.isdecimal()}
    oldest = max((n for n in files if n <= rollback_round), default=0)
    for n, old_file in files.items():
        if n < oldest:
            old_file.unlink()


def write_task_results(folder: Path, client: Client, result: TaskResult, record: Mapping[str, Any]) -> None:
    """Writes a task's model or predictions, and a line in `metrics.jsonl`, for the site alone.

    Args:
        folder: the run's folder at the site.
        client: the client that carried out the task.
        result: the task's result.
        record: fields of the line.

    Raises:
        OSError: a file cannot be written; the exception names it.
    """
    paths: dict[str, str] = {}
    if result.task.phase == "export":
        path = create_private_folder_if_missing(folder / "models") / f"{safe_file_name(client.id)}.safetensors"
        write_model_with_signature(path, result.weights or {}, result.description, client)
        paths["model"] = str(path)
    elif result.predictions:
        path = folder / "predictions" / f"{safe_file_name(client.id)}.parquet"
        predictions_parquet.write_outputs_of_client(path, client, {result.task.round: result.predictions})
        paths["predictions"] = str(path)
    append_line_and_flush(folder / "metrics.jsonl", json.dumps({**record, **paths}))


def check_or_record_client_identity(folder: Path, client: str, data_fingerprint: str) -> None:
    """Raises an error for another client or other data than in this run; records a new run's.

    Args:
        folder: the run's folder at the site.
        client: id of the client.
        data_fingerprint: hash of its data and network.

    Raises:
        InvalidSiteStateError: another client began the run, or the file is lost or damaged.
    """
    file, identity = folder / "run.json", {"client": client, "data_fingerprint": data_fingerprint}
    if not file.exists():
        if any(folder.glob("private/round-*")):
            raise InvalidSiteStateError(f"{folder.name}/run.json is missing, which identified its data; {_ADVICE}")
        create_private_folder_if_missing(folder, parents=True)
        write_file_atomically(file, json.dumps(identity).encode())
        return
    try:
        saved_identity = parse_json(read_file(file))
        error_text = validation_error(saved_identity, _ClientIdentity)
    except (OSError, UserError):  # their texts have the whole path, which must not go to the server
        error_text = "it cannot be read"
    except ValueError as error:
        error_text = str(error)
    if error_text:
        raise InvalidSiteStateError(f"{folder.name}/run.json is damaged ({error_text}); {_ADVICE}")
    if saved_identity != identity:
        raise InvalidSiteStateError(
            "its data or network are not those with which it began this run; start another run, or put back "
            f"{folder.name}/run.json if that was changed"
        )


def _state_file(folder: Path, round_number: int) -> Path:
    return folder / "private" / f"round-{round_number:06d}.state"


def _describe_owner(folder: Path, site: str, round_number: int, method: Mapping[str, Any]) -> _StateOwner:
    fields = {name: json.dumps(value, sort_keys=True) for name, value in method.items()}
    return {"site": site, "run": folder.name, "round": round_number, "method": fields}


def _owner_difference(file_owner: _StateOwner, expected_owner: _StateOwner) -> str:
    """Returns how the owner of a stored state differs from the expected owner; "" if it does not differ.

    The text goes to the server, so it names no other site or run. Fields that the method has got since the state was written
    are not compared.
    """
    if file_owner["site"] != expected_owner["site"]:
        return "another site"
    if file_owner["run"] != expected_owner["run"]:
        return "another run"
    if file_owner["round"] != expected_owner["round"]:
        return f"round {file_owner['round']}"
    method = file_owner["method"]
    changed = [name for name, value in method.items() if expected_owner["method"].get(name) != value]
    return f"a method with {changed[0]} = {method[changed[0]]}" if changed else ""


def _compute_checksum(head: bytes, state: bytes) -> str:
    digest = hashlib.sha256(head)
    digest.update(state)
    return digest.hexdigest()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks a site's folder for one process at a time; files written inside are the owner's alone."""
    create_private_folder_if_missing(folder.resolve(), parents=True)  # its owner may have put a link there
    old_umask = os.umask(0o077)  # files below are private, whatever umask the site's unit sets
    try:
        with open_lock_file(folder / ".lock") as file:
            try:
                import fcntl
            except ImportError:  # Windows has no advisory locks
                yield
                return
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    finally:
        os.umask(old_umask)
