"""Checkpoints that survive `kill -9` at any moment.

A checkpoint is a folder `round-000012` with the server's state, one file per client that keeps tensors, and
`complete.json` with the SHA-256 of each. It is written beside, synced and renamed, so that a folder of that name is whole;
what a disk damages later is found by the checksums, and then the checkpoint before it is used. Two are kept, and those of
the best round if a run keeps it; they share no file, so that one bad spot on the disk does not take two.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder, open_new_file, read_file, sync_folder
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.state_dict import PyTree, iter_tensors
from polyfed.simulation.storage.integrity import (
    COMPLETE_FILE,
    Binding,
    binding_error,
    hash_file,
    read_checkpoint_hashes,
)
from polyfed.simulation.storage.paths import safe_file_name

_SERVER = "server.safetensors"


class _ServerFile(TypedDict):
    """What the server's file holds."""

    round: int
    state: Any
    client_states: dict[str, Any]
    files: list[str]
    unfinished: NotRequired[str]


class UnevaluatedRecord(TypedDict):
    """The record of a round before it has been evaluated: what counts in the records after it, and all else as it came."""

    round: int
    seconds: float
    bytes_down_total: int
    bytes_up_total: int
    clients: dict[str, dict[str, Any]]
    summary: dict[str, Any]
    failures: list[dict[str, Any]]
    replied: list[str]


@final
@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on after `round`: the server's state and the private state of each client that has
    one. (In a deployment the latter stay at the sites; a simulation plays all parts.) `unevaluated_record` is the
    record of the round, where its evaluation is still to be made: with the training of the next, as between sites."""

    round: int
    state: PyTree
    client_states: Mapping[str, PyTree]
    unevaluated_record: Mapping[str, Any] | None = None

    @property
    def last_recorded_round(self) -> int:
        """The last round whose record is finished."""
        return self.round if self.unevaluated_record is None else self.round - 1


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    changed: Collection[str],
    previous_round: int,
    kept_rounds: Collection[int] = (),
    binding: Binding | None = None,
) -> None:
    """Writes a checkpoint below `folder` and removes all others but the previous one and those of the rounds `kept_rounds`.

    Args:
        changed: clients whose private state differs from that in the previous checkpoint.
        previous_round: the round of the checkpoint that was last loaded or saved; 0 if there is none. Others may lie in
            `folder`, damaged ones too, but are not relied on.
        kept_rounds: rounds whose checkpoints stay.
        binding: what the checkpoint belongs to, see `polyfed.simulation.storage.integrity`.
    """
    create_private_folder(folder)
    target, base_folder = _folder_of(folder, checkpoint.round), _folder_of(folder, previous_round)
    partial = folder / f".partial-{target.name}"
    for stale in folder.glob(".partial-*"):
        shutil.rmtree(stale)
    create_private_folder(partial)
    base_checksums = _read_checksums(base_folder)
    # What is removed below, the checkpoint before the previous as a rule, may give away its files; what stays may not.
    kept_folders = {target, base_folder, *(_folder_of(folder, number) for number in kept_rounds)}
    expendable = [old for old in _newest_first(folder) if old == target or old not in kept_folders]
    with_tensors = {
        i for i, client_state in checkpoint.client_states.items() if any(True for _ in iter_tensors(client_state))
    }
    states_without_tensors = {
        i: client_state for i, client_state in checkpoint.client_states.items() if i not in with_tensors
    }
    server = {
        "round": checkpoint.round,
        "state": checkpoint.state,
        "client_states": states_without_tensors,
        "files": sorted(with_tensors),
    }
    if checkpoint.unevaluated_record is not None:
        server["unfinished"] = json.dumps(checkpoint.unevaluated_record, allow_nan=False)
    sums = {_SERVER: _write(partial / _SERVER, serialize_state(server))}
    for client in sorted(with_tensors):
        name = _client_file(client)
        checksum = None if client in changed else base_checksums.get(name)
        if checksum is not None and any(_link_if_intact(old / name, partial / name, checksum) for old in expendable):
            sums[name] = checksum
        else:
            sums[name] = _write(partial / name, serialize_state(checkpoint.client_states[client]))
    _write(partial / COMPLETE_FILE, json.dumps({"bound": dict(binding or {}), "files": sums}, indent=1).encode())
    sync_folder(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    sync_folder(folder)
    for old in list(_newest_first(folder)):
        if old not in kept_folders:
            shutil.rmtree(old)


def load_newest_checkpoint(
    folder: Path,
    last_metrics_round: int | None = None,
    check: Callable[[Checkpoint], object] = lambda found: None,
    expected: Callable[[int], Binding] | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be used, or None, and a sentence about each newer one that cannot.

    Args:
        last_metrics_round: the last round that the metrics hold; a checkpoint after it cannot be used. None asks for
            no metrics. check: raises a `UserError` for one that cannot be used for another reason.
        expected: what a checkpoint after a round must be bound to; None asks for nothing.
    """
    notes: list[str] = []
    for candidate in _newest_first(folder):
        try:
            checkpoint = _read_checkpoint(candidate)
        except (UserError, OSError, ValueError, KeyError) as error:
            notes.append(f"checkpoint {candidate} is damaged ({error})")
            continue
        last = checkpoint.last_recorded_round
        if last_metrics_round is not None and last > last_metrics_round:
            metrics = folder.parent / "metrics.jsonl"
            notes.append(f"{metrics} does not hold rounds 1 to {last}, which checkpoint {candidate} follows")
            continue
        reason = expected and binding_error(_read_binding(candidate), expected(last), candidate, last)
        if reason:
            notes.append(reason)
            continue
        try:
            check(checkpoint)
        except UserError as error:
            notes.append(str(error))
            continue
        return checkpoint, notes
    return None, notes


def load_round_checkpoint(
    folder: Path, round_number: int, expected: Callable[[int], Binding] | None = None
) -> Checkpoint:
    """The checkpoint of a round.

    Raises:
        UserError: it is missing or damaged, or not of this run.
    """
    round_folder = _folder_of(folder, round_number)
    try:
        checkpoint = _read_checkpoint(round_folder)
    except (UserError, OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {round_folder} is missing or damaged ({error})") from error
    if expected and (
        reason := binding_error(
            _read_binding(round_folder),
            expected(checkpoint.last_recorded_round),
            round_folder,
            checkpoint.last_recorded_round,
        )
    ):
        raise UserError(reason)
    return checkpoint


def remove_newer_checkpoints(folder: Path, round_number: int) -> None:
    """Removes the checkpoints after a round: the run goes on from that one, and they could not be used."""
    for candidate in list(_newest_first(folder)):
        if candidate.name > _folder_of(folder, round_number).name:
            shutil.rmtree(candidate)


def _folder_of(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}"


def _client_file(client: str) -> str:
    return f"client-{safe_file_name(client)}.safetensors"


def _read_checkpoint(folder: Path) -> Checkpoint:
    checksums = _read_checksums(folder)
    if _SERVER not in checksums:
        raise UserError(f"{COMPLETE_FILE} is missing or not readable")
    content = {}
    for name, expected in checksums.items():
        data = read_file(folder / name, None)
        if hashlib.sha256(data).hexdigest() != expected:
            raise UserError(f"{name} does not match its checksum")
        content[name] = data
    server = deserialize_state(content[_SERVER])
    if reason := validation_error(server, _ServerFile, "it"):
        raise UserError(reason)
    if missing_clients := [client for client in server["files"] if _client_file(client) not in content]:
        raise UserError(f"the state of client {missing_clients[0]!r} is missing")
    if _folder_of(folder.parent, server["round"]) != folder:
        raise UserError(f"it is of round {server['round']}")
    client_states = dict(server["client_states"])
    for client in server["files"]:
        client_states[client] = deserialize_state(content[_client_file(client)])
    return Checkpoint(server["round"], server["state"], client_states, _read_unevaluated_record(server))


def _read_unevaluated_record(server: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record without its evaluation in the server's file, if there is one."""
    if "unfinished" not in server:
        return None
    record: Mapping[str, Any] = parse_json(server["unfinished"])
    if wrong := validation_error(record, UnevaluatedRecord, "the record of its round"):
        raise UserError(wrong)
    if record["round"] != server["round"]:
        raise UserError(f"the record in it is of round {record['round']}")
    return record


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("round-*"), reverse=True)


def _read_checksums(folder: Path) -> dict[str, str]:
    return read_checkpoint_hashes(folder, "files")


def _read_binding(folder: Path) -> dict[str, str]:
    return read_checkpoint_hashes(folder, "bound")


def _link_if_intact(source: Path, target: Path, checksum: str) -> bool:
    """Links a file to save writing it again, if its bytes are what they should be and the file system can."""
    try:
        if hash_file(source) != checksum:
            return False
        os.link(source, target)
    except (OSError, UserError):
        return False
    return True


def _write(path: Path, data: bytes) -> str:
    with open_new_file(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()
