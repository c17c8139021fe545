"""Checkpoints that survive `kill -9` at any moment.

A checkpoint is a folder `round-000012` with the server's state, one file per client that keeps tensors, and
`complete.json` with the SHA-256 of each. It is written beside, synced and renamed, so that a folder of that name is whole;
what a disk damages later is found by the checksums, and then the checkpoint before it is used. Two are kept.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import quote

from polyfed.errors import UserError
from polyfed.tree import Nested, decode, encode, tensors_of

_KEPT = 2
_SERVER = "server.safetensors"
_COMPLETE = "complete.json"


@final
@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on after `round`: the server's state and the private state of each client that has
    one. (In a deployment the latter stay at the sites; a simulation plays all parts.)"""

    round: int
    state: Nested
    minds: Mapping[str, Nested]


def file_name(client: str) -> str:
    """A client's id as a safe file name.

    >>> file_name("St. Mary's/north")
    'St.%20Mary%27s%2Fnorth'
    """
    return quote(client, safe="")


def save(folder: Path, checkpoint: Checkpoint, changed: Collection[str]) -> None:
    """Writes a checkpoint below `folder` and removes those that are too old.

    Args:
        changed: clients whose private state differs from the last saved checkpoint's; the files of the others are linked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final_name = folder / f"round-{checkpoint.round:06d}"
    partial = folder / f".partial-{final_name.name}"
    for stale in (*folder.glob(".partial-*"), *([final_name] if final_name.exists() else [])):
        shutil.rmtree(stale)
    partial.mkdir()
    previous = next(_newest_first(folder), None)
    known = _checksums(previous) if previous is not None else {}
    with_tensors = {i for i, mine in checkpoint.minds.items() if any(True for _ in tensors_of(mine))}
    plain = {i: mine for i, mine in checkpoint.minds.items() if i not in with_tensors}
    server = {"round": checkpoint.round, "state": checkpoint.state, "minds": plain, "files": sorted(with_tensors)}
    sums = {_SERVER: _write(partial / _SERVER, encode(server))}
    for client in sorted(with_tensors):
        name = f"client-{file_name(client)}.safetensors"
        if previous is not None and client not in changed and name in known:
            os.link(previous / name, partial / name)
            sums[name] = known[name]
        else:
            sums[name] = _write(partial / name, encode(checkpoint.minds[client]))
    _write(partial / _COMPLETE, json.dumps(sums, indent=1).encode())
    _sync_folder(partial)
    partial.rename(final_name)
    _sync_folder(folder)
    for old in list(_newest_first(folder))[_KEPT:]:
        shutil.rmtree(old)


def load(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, or None, and a sentence about each newer one that is damaged."""
    notes: list[str] = []
    for candidate in _newest_first(folder):
        try:
            return _read(candidate), notes
        except (UserError, OSError, ValueError, KeyError) as error:
            notes.append(f"checkpoint {candidate} is damaged ({error})")
    return None, notes


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
    minds = dict(server["minds"])
    for client in server["files"]:
        minds[client] = decode(content[f"client-{file_name(client)}.safetensors"])
    return Checkpoint(server["round"], server["state"], minds)


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("round-*"), reverse=True)


def _checksums(folder: Path) -> dict[str, str]:
    try:
        sums = json.loads((folder / _COMPLETE).read_text())
    except (OSError, ValueError):
        return {}
    return sums if isinstance(sums, dict) else {}


def _write(path: Path, data: bytes) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
