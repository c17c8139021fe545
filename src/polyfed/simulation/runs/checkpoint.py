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
from polyfed.core.files import make_folder, new_file, read_file, sync_folder
from polyfed.core.tree import Nested, decode, encode, tensors_of
from polyfed.core.typed import conforms, from_json
from polyfed.simulation.runs.chain import COMPLETE, Binding, complete, differs, of_file
from polyfed.simulation.runs.paths import file_name

_SERVER = "server.safetensors"


class _Kept(TypedDict):
    """What the server's file holds."""

    round: int
    state: Any
    client_states: dict[str, Any]
    files: list[str]
    unfinished: NotRequired[str]


class Unfinished(TypedDict):
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
    one. (In a deployment the latter stay at the sites; a simulation plays all parts.) `unfinished` is the record of the
    round, where its evaluation is still to be made: with the training of the next, as between sites."""

    round: int
    state: Nested
    client_states: Mapping[str, Nested]
    unfinished: Mapping[str, Any] | None = None

    @property
    def recorded(self) -> int:
        """The last round whose record is finished."""
        return self.round if self.unfinished is None else self.round - 1


def save(
    folder: Path,
    checkpoint: Checkpoint,
    changed: Collection[str],
    previous: int,
    keep: Collection[int] = (),
    bound: Binding | None = None,
) -> None:
    """Writes a checkpoint below `folder` and removes all others but the previous one and those of the rounds `keep`.

    Args:
        changed: clients whose private state differs from that in the previous checkpoint.
        previous: the round of the checkpoint that was last loaded or saved; 0 if there is none. Others may lie in
            `folder`, damaged ones too, but are not relied on.
        keep: rounds whose checkpoints stay.
        bound: what the checkpoint belongs to, see `polyfed.simulation.runs.chain`.
    """
    make_folder(folder)
    target, base = _folder_of(folder, checkpoint.round), _folder_of(folder, previous)
    partial = folder / f".partial-{target.name}"
    for stale in folder.glob(".partial-*"):
        shutil.rmtree(stale)
    make_folder(partial)
    known = _checksums(base)
    # What is removed below, the checkpoint before the previous as a rule, may give away its files; what stays may not.
    staying = {target, base, *(_folder_of(folder, number) for number in keep)}
    spare = [old for old in _newest_first(folder) if old == target or old not in staying]
    with_tensors = {i for i, own in checkpoint.client_states.items() if any(True for _ in tensors_of(own))}
    plain = {i: own for i, own in checkpoint.client_states.items() if i not in with_tensors}
    server = {
        "round": checkpoint.round,
        "state": checkpoint.state,
        "client_states": plain,
        "files": sorted(with_tensors),
    }
    if checkpoint.unfinished is not None:
        server["unfinished"] = json.dumps(checkpoint.unfinished, allow_nan=False)
    sums = {_SERVER: _write(partial / _SERVER, encode(server))}
    for client in sorted(with_tensors):
        name = _client_file(client)
        wanted = None if client in changed else known.get(name)
        if wanted is not None and any(_take(old / name, partial / name, wanted) for old in spare):
            sums[name] = wanted
        else:
            sums[name] = _write(partial / name, encode(checkpoint.client_states[client]))
    _write(partial / COMPLETE, json.dumps({"bound": dict(bound or {}), "files": sums}, indent=1).encode())
    sync_folder(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    sync_folder(folder)
    for old in list(_newest_first(folder)):
        if old not in staying:
            shutil.rmtree(old)


def load(
    folder: Path,
    covered: int | None = None,
    check: Callable[[Checkpoint], object] = lambda found: None,
    expected: Callable[[int], Binding] | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be used, or None, and a sentence about each newer one that cannot.

    Args:
        covered: the last round that the metrics hold; a checkpoint after it cannot be used. None asks for no metrics.
        check: raises a `UserError` for one that cannot be used for another reason.
        expected: what a checkpoint after a round must be bound to; None asks for nothing.
    """
    notes: list[str] = []
    for candidate in _newest_first(folder):
        try:
            found = _read(candidate)
        except (UserError, OSError, ValueError, KeyError) as error:
            notes.append(f"checkpoint {candidate} is damaged ({error})")
            continue
        last = found.recorded
        if covered is not None and last > covered:
            metrics = folder.parent / "metrics.jsonl"
            notes.append(f"{metrics} does not hold rounds 1 to {last}, which checkpoint {candidate} follows")
            continue
        wrong = expected and differs(_bound(candidate), expected(last), candidate, last)
        if wrong:
            notes.append(wrong)
            continue
        try:
            check(found)
        except UserError as error:
            notes.append(str(error))
            continue
        return found, notes
    return None, notes


def load_round(folder: Path, round_number: int, expected: Callable[[int], Binding] | None = None) -> Checkpoint:
    """The checkpoint of a round.

    Raises:
        UserError: it is missing or damaged, or not of this run.
    """
    wanted = _folder_of(folder, round_number)
    try:
        found = _read(wanted)
    except (UserError, OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {wanted} is missing or damaged ({error})") from error
    if expected and (wrong := differs(_bound(wanted), expected(found.recorded), wanted, found.recorded)):
        raise UserError(wrong)
    return found


def drop_newer(folder: Path, round_number: int) -> None:
    """Removes the checkpoints after a round: the run goes on from that one, and they could not be used."""
    for candidate in list(_newest_first(folder)):
        if candidate.name > _folder_of(folder, round_number).name:
            shutil.rmtree(candidate)


def _folder_of(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}"


def _client_file(client: str) -> str:
    return f"client-{file_name(client)}.safetensors"


def _read(folder: Path) -> Checkpoint:
    sums = _checksums(folder)
    if _SERVER not in sums:
        raise UserError(f"{COMPLETE} is missing or not readable")
    content = {}
    for name, expected in sums.items():
        data = read_file(folder / name, None)
        if hashlib.sha256(data).hexdigest() != expected:
            raise UserError(f"{name} does not match its checksum")
        content[name] = data
    server = decode(content[_SERVER])
    if wrong := conforms(server, _Kept, "it"):
        raise UserError(wrong)
    if lost := [client for client in server["files"] if _client_file(client) not in content]:
        raise UserError(f"the state of client {lost[0]!r} is missing")
    if _folder_of(folder.parent, server["round"]) != folder:
        raise UserError(f"it is of round {server['round']}")
    client_states = dict(server["client_states"])
    for client in server["files"]:
        client_states[client] = decode(content[_client_file(client)])
    return Checkpoint(server["round"], server["state"], client_states, _unfinished(server))


def _unfinished(server: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record without its evaluation in the server's file, if there is one."""
    if "unfinished" not in server:
        return None
    record: Mapping[str, Any] = from_json(server["unfinished"])
    if wrong := conforms(record, Unfinished, "the record of its round"):
        raise UserError(wrong)
    if record["round"] != server["round"]:
        raise UserError(f"the record in it is of round {record['round']}")
    return record


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("round-*"), reverse=True)


def _checksums(folder: Path) -> dict[str, str]:
    return complete(folder, "files")


def _bound(folder: Path) -> dict[str, str]:
    return complete(folder, "bound")


def _take(source: Path, target: Path, checksum: str) -> bool:
    """Links a file to save writing it again, if its bytes are what they should be and the file system can."""
    try:
        if of_file(source) != checksum:
            return False
        os.link(source, target)
    except (OSError, UserError):
        return False
    return True


def _write(path: Path, data: bytes) -> str:
    with new_file(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()
