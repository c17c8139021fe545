"""Writes and reads checkpoints, which stay usable even if the process is killed (`kill -9`) at any moment.

A checkpoint is a folder `round-000012` with the server's state and `complete.json`, which has the SHA-256 of that file,
and the number and the sum of the hashes of the clients' states. These are rows of `states.sqlite`, next to the folders,
which all checkpoints share. First the rows that changed are written, then the folder, under another name; it is synced and
renamed, so that a folder of that name is complete. Later damage is found by the hashes, and the checkpoint before it is
used. The last two are kept, and those of the best round if the run keeps it. They share the rows of clients that did not
take part between them: damage to such a row makes all of them unusable.

The first versions wrote a file for each client into the folder. Such checkpoints are read as well.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import (
    create_private_folder_if_missing,
    flush_folder_to_disk,
    open_file_for_overwrite,
    read_file,
    remove_file_or_folder,
)
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.state_dict import PyTree
from polyfed.simulation.storage.checkpoints.client_states import (
    ClientStates,
    groups_by_client,
    lists_of_clients,
    load_states,
    without_groups,
    write_states,
)
from polyfed.simulation.storage.checkpoints.state_rows import PRIVATE_PART
from polyfed.simulation.storage.checkpoints.state_store import STORE_FILE, StateStore
from polyfed.simulation.storage.integrity import (
    COMPLETE_FILE,
    RunHashes,
    checkpoint_mismatch_error,
    read_checkpoint_hashes,
)
from polyfed.simulation.storage.paths import safe_file_name

_SERVER = "server.safetensors"


class _ServerFile(TypedDict):
    """Describes the content of a checkpoint's file with the server's state."""

    round: int
    state: Any
    groups: NotRequired[list[str]]  # of the state, whose entries are in the store
    lists: NotRequired[dict[str, str]]  # parts of the state that list the clients of a group
    client_states: NotRequired[dict[str, Any]]  # of the first versions: states without tensors
    files: NotRequired[list[str]]  # of the first versions: clients with a file
    unfinished: NotRequired[str]
    schedule: NotRequired[dict[str, Any]]


class UnevaluatedRecord(TypedDict):
    """Describes the record of a round before its evaluation; further fields are passed on."""

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
    """Holds all that resuming a run after a round needs: server state, private states, and more.

    Attributes:
        round: the last round.
        state: the server's state.
        client_states: client id -> private state, for clients that have one; any mapping is taken. (In a deployment these
            stay at the sites; a simulation plays all parts.)
        unevaluated_record: the record of `round` if that has not been evaluated yet, since it is evaluated together with
            the training of the next round, as between sites; else None.
        schedule: what the sampler remembers, the simulated time, and the clients at work in an asynchronous run; None if
            the run has none of these (`polyfed.simulation.rounds.planning.round_scheduler`).
    """

    round: int
    state: PyTree
    client_states: ClientStates
    unevaluated_record: Mapping[str, Any] | None = None
    schedule: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "client_states", ClientStates.wrap(self.client_states))

    def __repr__(self) -> str:
        return f"Checkpoint(round {self.round}, {len(self.client_states)} client states)"

    @property
    def last_recorded_round(self) -> int:
        """Returns the last round whose record in `metrics.jsonl` is complete."""
        return self.round if self.unevaluated_record is None else self.round - 1


def save_checkpoint_and_remove_older(
    folder: Path,
    checkpoint: Checkpoint,
    previous_round: int,
    kept_rounds: Collection[int] = (),
    binding: RunHashes | None = None,
    store: StateStore | None = None,
) -> None:
    """Writes a checkpoint, and removes all older ones but the previous and those of `kept_rounds`.

    Args:
        folder: of the checkpoints.
        checkpoint: to write, with those clients' states that changed since the previous checkpoint.
        previous_round: the round of the checkpoint that was last loaded or saved; 0 if there is none. Other checkpoints
            may lie in `folder`, damaged ones too, but are not relied on.
        kept_rounds: rounds whose checkpoints stay.
        binding: what the checkpoint belongs to, see `polyfed.simulation.storage.integrity`.
        store: the run's store of states; None opens and closes the one in `folder`.
    """
    if store is None:
        with closing(StateStore(folder / STORE_FILE)) as own_store:
            save_checkpoint_and_remove_older(folder, checkpoint, previous_round, kept_rounds, binding, own_store)
        return
    create_private_folder_if_missing(folder)
    target = _folder_of(folder, checkpoint.round)
    partial = folder / f".partial-{target.name}"
    for stale in folder.glob(".partial-*"):
        remove_file_or_folder(stale)
    create_private_folder_if_missing(partial)
    rounds_on_disk = [number for number in map(_round_of, _newest_first(folder)) if 0 < number <= previous_round]
    groups = groups_by_client(checkpoint.state)
    state_hashes = write_states(
        store, checkpoint.client_states, groups, checkpoint.round, previous_round, rounds_on_disk
    )
    server = {
        "round": checkpoint.round,
        "state": without_groups(checkpoint.state),
        "groups": list(groups),
        "lists": lists_of_clients(checkpoint.state, groups) if groups else {},
    }
    if checkpoint.unevaluated_record is not None:
        server["unfinished"] = json.dumps(checkpoint.unevaluated_record, allow_nan=False)
    if checkpoint.schedule is not None:
        server["schedule"] = checkpoint.schedule
    sums = {_SERVER: _write_and_hash(partial / _SERVER, serialize_state(server))}
    content = {"bound": dict(binding or {}), "files": sums, "states": state_hashes}
    _write_and_hash(partial / COMPLETE_FILE, json.dumps(content, indent=1).encode())
    flush_folder_to_disk(partial)
    if target.exists():
        remove_file_or_folder(target)
    partial.rename(target)
    flush_folder_to_disk(folder)
    for part, states in {PRIVATE_PART: checkpoint.client_states, **groups}.items():
        states.mark_saved(store, part, checkpoint.round)
    kept_folders = {_folder_of(folder, number) for number in (checkpoint.round, previous_round, *kept_rounds)}
    for old in list(_newest_first(folder)):
        if old not in kept_folders:
            remove_file_or_folder(old)


@final
class NewestCheckpoint(NamedTuple):
    """Holds a run's newest usable checkpoint or None, and why newer ones were not used."""

    checkpoint: Checkpoint | None
    reasons_against_newer: list[str]


def load_newest_checkpoint(
    folder: Path,
    last_metrics_round: int | None = None,
    check_usable: Callable[[Checkpoint], object] = lambda checkpoint: None,
    expected_run_hashes_of_round: Callable[[int], RunHashes] | None = None,
    store: StateStore | None = None,
    server_only: bool = False,
) -> NewestCheckpoint:
    """Loads a run's newest intact checkpoint, and says of each newer one why it was not used.

    Args:
        folder: of the checkpoints.
        last_metrics_round: the last round in the metrics; a later checkpoint is not usable. None needs no metrics.
        check_usable: raises a `UserError` for a checkpoint that is not usable for another reason.
        expected_run_hashes_of_round: returns what a checkpoint after this round must be bound to; None does not check it.
        store: the run's store of states; None takes the one in `folder`.
        server_only: leaves the store out, which a run may be writing to: the checkpoint has no clients' states, and None for
            the groups of the server's state that have an entry for each client.
    """
    notes: list[str] = []
    state_store = None if server_only else store or StateStore(folder / STORE_FILE)
    for candidate in _newest_first(folder):
        try:
            checkpoint = _read_checkpoint(candidate, state_store)
        except (UserError, OSError, ValueError, KeyError) as error:
            notes.append(f"checkpoint {candidate} is damaged ({error})")
            continue
        last = checkpoint.last_recorded_round
        if last_metrics_round is not None and last > last_metrics_round:
            metrics = folder.parent / "metrics.jsonl"
            notes.append(f"{metrics} does not hold rounds 1 to {last}, which checkpoint {candidate} follows")
            continue
        reason = expected_run_hashes_of_round and checkpoint_mismatch_error(
            _read_binding(candidate), expected_run_hashes_of_round(last), candidate, last
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
    folder: Path,
    round_number: int,
    expected_run_hashes_of_round: Callable[[int], RunHashes] | None = None,
    store: StateStore | None = None,
) -> Checkpoint:
    """Loads the checkpoint of one round.

    Raises:
        UserError: the checkpoint is missing, damaged, or of another run.
    """
    round_folder = _folder_of(folder, round_number)
    try:
        checkpoint = _read_checkpoint(round_folder, store or StateStore(folder / STORE_FILE))
    except (UserError, OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {round_folder} is missing or damaged ({error})") from error
    if expected_run_hashes_of_round and (
        reason := checkpoint_mismatch_error(
            _read_binding(round_folder),
            expected_run_hashes_of_round(checkpoint.last_recorded_round),
            round_folder,
            checkpoint.last_recorded_round,
        )
    ):
        raise UserError(reason)
    return checkpoint


def remove_newer_checkpoints(folder: Path, round_number: int, store: StateStore | None = None) -> None:
    """Removes the checkpoints and states after the round from which the run resumes."""
    for candidate in list(_newest_first(folder)):
        if candidate.name > _folder_of(folder, round_number).name:
            remove_file_or_folder(candidate)
    if store is None:
        with closing(StateStore(folder / STORE_FILE)) as own_store:
            own_store.roll_back(round_number)
    else:
        store.roll_back(round_number)


def _folder_of(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}"


def _read_checkpoint(folder: Path, store: StateStore | None) -> Checkpoint:
    """Reads a checkpoint, and checks the hashes of its files and, with a store, of the clients' states."""
    checksums = read_checkpoint_hashes(folder, "files")
    if _SERVER not in checksums:
        raise UserError(f"{COMPLETE_FILE} is missing or not readable")
    server = deserialize_state(_read_if_intact(folder / _SERVER, checksums[_SERVER]))
    if reason := validation_error(server, _ServerFile, "it"):
        raise UserError(reason)
    number = server["round"]
    if _folder_of(folder.parent, number) != folder:
        raise UserError(f"it is of round {number}")
    state, states = server["state"], ClientStates()
    if "groups" not in server:
        states = _read_client_files(folder, checksums, server)
    elif store is not None:
        store.check(number, read_checkpoint_hashes(folder, "states"))
        states = load_states(store, PRIVATE_PART, number)
        if groups := {name: load_states(store, name, number) for name in server["groups"]}:
            if not isinstance(state, dict):
                raise UserError(f"the server's state is a {type(state).__name__}, not a mapping")
            initials = {key: groups[name].initial for key, name in server.get("lists", {}).items() if name in groups}
            lists = {key: list(initial.clients) for key, initial in initials.items() if initial is not None}
            state = {**state, **lists, **groups}
    return Checkpoint(number, state, states, _read_unevaluated_record(server), server.get("schedule"))


def _read_client_files(folder: Path, checksums: Mapping[str, str], server: Mapping[str, Any]) -> ClientStates:
    """Reads the clients' states as the first versions wrote them: a file for each client whose state has tensors."""
    client_states = dict(server.get("client_states", {}))
    for client in server.get("files", []):
        name = f"client-{safe_file_name(client)}.safetensors"
        if name not in checksums:
            raise UserError(f"the state of client {client!r} is missing")
        client_states[client] = deserialize_state(_read_if_intact(folder / name, checksums[name]))
    return ClientStates(client_states)


def _read_if_intact(path: Path, checksum: str) -> bytes:
    """Returns the bytes of a file; raises a `UserError` if they do not have this hash."""
    data = read_file(path, None)
    if hashlib.sha256(data).hexdigest() != checksum:
        raise UserError(f"{path.name} does not match its checksum")
    return data


def _round_of(folder: Path) -> int:
    name = folder.name.removeprefix("round-")
    return int(name) if name.isdecimal() else 0


def _read_unevaluated_record(server: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the round's record if the checkpoint was saved before its evaluation; else None."""
    if "unfinished" not in server:
        return None
    record: Mapping[str, Any] = parse_json(server["unfinished"])
    if error_text := validation_error(record, UnevaluatedRecord, "the record of its round"):
        raise UserError(error_text)
    if record["round"] != server["round"]:
        raise UserError(f"the record in it is of round {record['round']}")
    return record


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("round-*"), reverse=True)


def _read_binding(folder: Path) -> dict[str, str]:
    return read_checkpoint_hashes(folder, "bound")


def _write_and_hash(path: Path, data: bytes) -> str:
    with open_file_for_overwrite(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()
