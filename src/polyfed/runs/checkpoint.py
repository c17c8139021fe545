"""Checkpoints that survive `kill -9` at any moment.

A checkpoint is a folder `round-000012` with the server's state, one file per client that keeps tensors, and
`complete.json` with the SHA-256 of each. It is written beside, synced and renamed, so that a folder of that name is whole;
what a disk damages later is found by the checksums, and then the checkpoint before it is used. Two are kept, and those of
the best round if a run keeps it; they share no file, so that one bad spot on the disk does not take two.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import quote

from polyfed.errors import UserError
from polyfed.tree import Nested, decode, encode, tensors_of

_SERVER = "server.safetensors"
_COMPLETE = "complete.json"
_PLAIN = re.compile(r"[a-z0-9_.-]{1,100}")
_LONGEST = 100  # file systems take 255 bytes, and something is put before and after


@final
@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on after `round`: the server's state and the private state of each client that has
    one. (In a deployment the latter stay at the sites; a simulation plays all parts.)"""

    round: int
    state: Nested
    minds: Mapping[str, Nested]


def file_name(client: str) -> str:
    """A client's id as a safe file name. Short lower-case ASCII ids keep theirs; the others get a hash, so that names stay
    different where a file system ignores case, and where they had to be cut.

    >>> file_name("client-007"), file_name("St. Mary's/north")
    ('client-007', 'St.%20Mary%27s%2Fnorth-582fa6f2')
    """
    if _PLAIN.fullmatch(client):
        return client
    return f"{quote(client, safe='')[:_LONGEST]}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"


def save(
    folder: Path, checkpoint: Checkpoint, changed: Collection[str], previous: int, keep: Collection[int] = ()
) -> None:
    """Writes a checkpoint below `folder` and removes all others but the previous one and those of the rounds `keep`.

    Args:
        changed: clients whose private state differs from that in the previous checkpoint.
        previous: the round of the checkpoint that was last loaded or saved; 0 if there is none. Others may lie in
            `folder`, damaged ones too, but are not relied on.
        keep: rounds whose checkpoints stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, base = _folder_of(folder, checkpoint.round), _folder_of(folder, previous)
    partial = folder / f".partial-{target.name}"
    for stale in folder.glob(".partial-*"):
        shutil.rmtree(stale)
    partial.mkdir()
    known = _checksums(base)
    # What is removed below, the checkpoint before the previous as a rule, may give away its files; what stays may not.
    staying = {target, base, *(_folder_of(folder, number) for number in keep)}
    spare = [old for old in _newest_first(folder) if old == target or old not in staying]
    with_tensors = {i for i, mine in checkpoint.minds.items() if any(True for _ in tensors_of(mine))}
    plain = {i: mine for i, mine in checkpoint.minds.items() if i not in with_tensors}
    server = {"round": checkpoint.round, "state": checkpoint.state, "minds": plain, "files": sorted(with_tensors)}
    sums = {_SERVER: _write(partial / _SERVER, encode(server))}
    for client in sorted(with_tensors):
        name = _client_file(client)
        wanted = None if client in changed else known.get(name)
        if wanted is not None and any(_take(old / name, partial / name, wanted) for old in spare):
            sums[name] = wanted
        else:
            sums[name] = _write(partial / name, encode(checkpoint.minds[client]))
    _write(partial / _COMPLETE, json.dumps(sums, indent=1).encode())
    sync_folder(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    sync_folder(folder)
    for old in list(_newest_first(folder)):
        if old not in staying:
            shutil.rmtree(old)


def load(
    folder: Path, covered: int | None = None, check: Callable[[Checkpoint], object] = lambda found: None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be used, or None, and a sentence about each newer one that cannot.

    Args:
        covered: the last round that the metrics hold; a checkpoint after it cannot be used. None asks for no metrics.
        check: raises a `UserError` for one that cannot be used for another reason.
    """
    notes: list[str] = []
    for candidate in _newest_first(folder):
        try:
            found = _read(candidate)
        except (UserError, OSError, ValueError, KeyError) as error:
            notes.append(f"checkpoint {candidate} is damaged ({error})")
            continue
        if covered is not None and found.round > covered:
            metrics = folder.parent / "metrics.jsonl"
            notes.append(f"{metrics} does not hold rounds 1 to {found.round}, which checkpoint {candidate} follows")
            continue
        try:
            check(found)
        except UserError as error:
            notes.append(str(error))
            continue
        return found, notes
    return None, notes


def load_round(folder: Path, round_number: int) -> Checkpoint:
    """The checkpoint of a round.

    Raises:
        UserError: it is missing or damaged.
    """
    wanted = _folder_of(folder, round_number)
    try:
        return _read(wanted)
    except (UserError, OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {wanted} is missing or damaged ({error})") from error


def drop_newer(folder: Path, round_number: int) -> None:
    """Removes the checkpoints after a round: the run goes on from that one, and they could not be used."""
    for candidate in list(_newest_first(folder)):
        if candidate.name > _folder_of(folder, round_number).name:
            shutil.rmtree(candidate)


def sync_folder(folder: Path) -> None:
    """Makes sure that files created or renamed in a folder are there after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_of(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:06d}"


def _client_file(client: str) -> str:
    return f"client-{file_name(client)}.safetensors"


def _read(folder: Path) -> Checkpoint:
    sums = _checksums(folder)
    if _SERVER not in sums:
        raise UserError(f"{_COMPLETE} is missing or not readable")
    content = {}
    for name, expected in sums.items():
        data = (folder / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != expected:
            raise UserError(f"{name} does not match its checksum")
        content[name] = data
    server = decode(content[_SERVER])
    if _folder_of(folder.parent, server["round"]) != folder:
        raise UserError(f"it is of round {server['round']}")
    minds = dict(server["minds"])
    for client in server["files"]:
        minds[client] = decode(content[_client_file(client)])
    return Checkpoint(server["round"], server["state"], minds)


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("round-*"), reverse=True)


def _checksums(folder: Path) -> dict[str, str]:
    try:
        sums = json.loads((folder / _COMPLETE).read_text())
    except (OSError, ValueError):
        return {}
    return sums if isinstance(sums, dict) else {}


def _take(source: Path, target: Path, checksum: str) -> bool:
    """Links a file to save writing it again, if its bytes are what they should be and the file system can."""
    try:
        if hashlib.sha256(source.read_bytes()).hexdigest() != checksum:
            return False
        os.link(source, target)
    except OSError:
        return False
    return True


def _write(path: Path, data: bytes) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()
