"""Writes and reads checkpoints, which stay usable even if the process is killed (`kill -9`) at any moment.

A checkpoint is a folder `round-000012` with the server's state, one file for each client whose private state has
tensors, and `complete.json` with the SHA-256 of each file. It is written under another name, synced and renamed, so
that a folder of that name is complete. Later damage is found by the hashes, and the checkpoint before it is used. The
last two are kept, and those of the best round if the run keeps it; they share no file, so that one bad block on the
disk does not damage two.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import (
    create_private_folder_if_missing,
    flush_folder_to_disk,
    open_file_for_overwrite,
    read_file,
)
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.state_dict import PyTree, iter_tensors
from polyfed.simulation.storage.integrity import (
    COMPLETE_FILE,
    Binding,
    checkpoint_mismatch_error,
    hash_file,
    read_checkpoint_hashes,
)
from polyfed.simulation.storage.paths import safe_file_name

_SERVER = "server.safetensors"


class _ServerFile(TypedDict):
    """Describes the content of a checkpoint's file with the server's state."""

    round: int
    state: Any
    client_states: dict[str, Any]
    files: list[str]
    unfinished: NotRequired[str]


class UnevaluatedRecord(TypedDict):
    """Describes the record of a round that has not been evaluated yet: the fields that its complete record needs; other
    fields are passed on.
    """

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
    """Holds all that is needed to resume a run after a round: the server's state, the clients' private states, and
    more.

    Attributes:
        round: the last round.
        state: the server's state.
        client_states: client id -> private state, for clients that have one. (In a deployment these stay at the sites; a
            simulation plays all parts.)
        unevaluated_record: the record of `round` if that has not been evaluated yet, since it is evaluated together with
            the training of the next round, as between sites; else None.
    """

    round: int
    state: PyTree
    client_states: Mapping[str, PyTree]
    unevaluated_record: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Checkpoint(round {self.round}, {len(self.client_states)} client states)"

    @property
    def last_recorded_round(self) -> int:
        """Returns the last round whose record in `metrics.jsonl` is complete."""
        return self.round if self.unevaluated_record is None else self.round - 1


def save_checkpoint_and_remove_older(
    folder: Path,
    checkpoint: Checkpoint,
    changed_clients: Collection[str],
    previous_round: int,
    kept_rounds: Collection[int] = (),
    binding: Binding | None = None,
) -> None:
    """Writes a checkpoint to `folder`, and removes older ones, except the previous checkpoint and the checkpoints of
    the rounds in `kept_rounds`.

    Args:
        folder: of the checkpoints.
        checkpoint: to write.
        changed_clients: clients whose private state differs from that in the previous checkpoint.
        previous_round: the round of the checkpoint that was last loaded or saved; 0 if there is none. Other checkpoints
            may lie in `folder`, damaged ones too, but are not relied on.
        kept_rounds: rounds whose checkpoints stay.
        binding: what the checkpoint belongs to, see `polyfed.simulation.storage.integrity`.
    """
    create_private_folder_if_missing(folder)
    target, base_folder = _folder_of(folder, checkpoint.round), _folder_of(folder, previous_round)
    partial = folder / f".partial-{target.name}"
    for stale in folder.glob(".partial-*"):
        shutil.rmtree(stale)
    create_private_folder_if_missing(partial)
    base_checksums = _read_checksums(base_folder)
    # A checkpoint that is removed below, usually the one before the previous, may give its files away; others may not.
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
        checksum = None if client in changed_clients else base_checksums.get(name)
        if checksum is not None and any(_link_if_intact(old / name, partial / name, checksum) for old in expendable):
            sums[name] = checksum
        else:
            sums[name] = _write(partial / name, serialize_state(checkpoint.client_states[client]))
    _write(partial / COMPLETE_FILE, json.dumps({"bound": dict(binding or {}), "files": sums}, indent=1).encode())
    flush_folder_to_disk(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    flush_folder_to_disk(folder)
    for old in list(_newest_first(folder)):
        if old not in kept_folders:
            shutil.rmtree(old)


@final
class NewestCheckpoint(NamedTuple):
    """Holds the newest usable checkpoint of a run (None if there is none), and for each newer checkpoint the reason why
    it was not used.
    """

    checkpoint: Checkpoint | None
    reasons_against_newer: list[str]


def load_newest_checkpoint(
    folder: Path,
    last_metrics_round: int | None = None,
    check_usable: Callable[[Checkpoint], object] = lambda found: None,
    expected_binding_of_round: Callable[[int], Binding] | None = None,
) -> NewestCheckpoint:
    """Loads the newest checkpoint that is intact and belongs to the run; returns it with a sentence for each newer one
    that says why it was not used.

    Args:
        folder: of the checkpoints.
        last_metrics_round: the last round in the metrics; a later checkpoint is not usable. None needs no metrics.
        check_usable: raises a `UserError` for a checkpoint that is not usable for another reason.
        expected_binding_of_round: returns what a checkpoint after this round must be bound to; None does not check it.
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
        reason = expected_binding_of_round and checkpoint_mismatch_error(
            _read_binding(candidate), expected_binding_of_round(last), candidate, last
        )
        if reason:
            notes.append(reason)
            continue
        try:
            check_usable(checkpoint)
        except UserError as error:
            notes.append(str(error))
            continue
        return NewestCheckpoint(checkpoint, notes)
    return NewestCheckpoint(None, notes)


def load_round_checkpoint(
    folder: Path, round_number: int, expected_binding_of_round: Callable[[int], Binding] | None = None
) -> Checkpoint:
    """Loads the checkpoint of one round; raises a `UserError` if it is missing, damaged or from another run.

    Raises:
        UserError: it is missing, damaged, or of another run.
    """
    round_folder = _folder_of(folder, round_number)
    try:
        checkpoint = _read_checkpoint(round_folder)
    except (UserError, OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {round_folder} is missing or damaged ({error})") from error
    if expected_binding_of_round and (
        reason := checkpoint_mismatch_error(
            _read_binding(round_folder),
            expected_binding_of_round(checkpoint.last_recorded_round),
            round_folder,
            checkpoint.last_recorded_round,
        )
    ):
        raise UserError(reason)
    return checkpoint


def remove_newer_checkpoints(folder: Path, round_number: int) -> None:
    """Removes the checkpoints after a round, which are useless once the run resumes from that round."""
    for candidate in list(_newest_first(folder)):
        if candidate.name > _folder_of(folder, round_number).name:
            shutil.rmtree(candidate)


def _folder_of(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}"


def _client_file(client: str) -> str:
    return f"client-{safe_file_name(client)}.safetensors"


def _read_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint and checks the hashes of its files."""
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
    """Returns the record of a checkpoint's round if the checkpoint was saved before the round's evaluation; else
    None."""
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
    """Hard-links a file instead of writing it again, if its hash matches and the file system supports it; returns whether
    it did."""
    try:
        if hash_file(source) != checksum:
            return False
        os.link(source, target)
    except (OSError, UserError):
        return False
    return True


def _write(path: Path, data: bytes) -> str:
    with open_file_for_overwrite(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()
