"""What a site keeps of a run from message to message: who it was when the run began, its private state, and its results.

Each private state is one file, `private/round-000012.state`: the SHA-256 of all that follows, a line that says whose it is
(site, run, round, method), and the state. One file is there or not, so that a site that is killed between two writes has
the states of the rounds before; and one that was damaged, or is of another site, run, round or method, is refused and
named, since training would silently go on from it.
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
from polyfed.core.files import append_line, make_folder, open_file, open_lock, read_file, replace_file, replaced
from polyfed.core.tree import Nested, decode, encode
from polyfed.core.typed import conforms, from_json
from polyfed.simulation.engines.work import Result
from polyfed.simulation.runs import parquet
from polyfed.simulation.runs.paths import file_name
from polyfed.simulation.runs.signature import write_model

_MOST = 2**20  # of the line that says whose a state is, which has a method's fields
_ADVICE = "put back a copy of it, or start another run"


class _Owner(TypedDict):
    """Whose a private state is."""

    site: str
    run: str
    round: int
    method: dict[str, str]  # field -> its value as JSON, which a number that is not finite has too


class _Marks(TypedDict):
    """By what a run knows its client again."""

    client: str
    data_fingerprint: str


@final
class NotItsOwnError(Exception):
    """A file of the site is not what the site wrote for this run; the sentence holds nothing of data or network, nor where
    the site keeps its files."""


def read_state(folder: Path, site: str, number: int | None, method: Mapping[str, Any]) -> Nested:
    """The private state as it was after a round.

    Args:
        folder: of the run, at the site.
        site: its name.
        number: of the round; None is before the first.
        method: name and fields, as the server tells them.

    Raises:
        NotItsOwnError: it is lost or damaged, or another's.
    """
    if number is None:
        return None
    file = _file(folder, number)
    where, what = file.relative_to(folder.parent), f"its private state after round {number}"
    try:
        with open_file(file) as opened:
            told, head, state = opened.readline(_MOST), opened.readline(_MOST), opened.read()
    except OSError as error:
        raise NotItsOwnError(f"{what} is lost: {where} cannot be read ({error.strerror}); {_ADVICE}") from error
    except UserError as error:  # which tells the whole path
        raise NotItsOwnError(f"{what} is lost: {where} is no file that can be read; {_ADVICE}") from error
    if told != f"{_hash(head, state)}\n".encode():
        raise NotItsOwnError(f"{what} is damaged: {where} was changed since it was written; {_ADVICE}")
    try:
        owner = from_json(head)
        if conforms(owner, _Owner):
            raise ValueError("nothing says whose it is")
        if other := _other(owner, _owner(folder, site, number, method)):
            raise NotItsOwnError(f"{what} is not its own: {where} is of {other}; {_ADVICE}")
        return decode(state)
    except (UserError, ValueError) as error:  # what they say may show what the file holds
        raise NotItsOwnError(f"{what} is damaged: {where} holds no state; {_ADVICE}") from error


def write_state(folder: Path, site: str, number: int, method: Mapping[str, Any], own: Nested, keep: int) -> None:
    """Writes the private state after a round; removes what the server cannot come back to, what is older than the newest
    state up to round `keep`. (Rounds after this one are overwritten when they come again.)

    Args:
        folder, site, number, method: as for `read_state`.
        own: the state.
        keep: the round to which the server may still go back.

    Raises:
        OSError: it cannot be written; the exception names it.
    """
    target = _file(folder, number)
    make_folder(target.parent, parents=True)
    head, state = json.dumps(_owner(folder, site, number, method)).encode() + b"\n", encode(own)
    with replaced(target) as file:
        file.write(f"{_hash(head, state)}\n".encode())
        file.write(head)
        file.write(state)
    names = {file: file.stem.removeprefix("round-") for file in target.parent.glob("round-*.state")}
    files = {int(name): file for file, name in names.items() if name.isdecimal()}
    oldest = max((n for n in files if n <= keep), default=0)
    for n, old in files.items():
        if n < oldest:
            old.unlink()


def write_results(folder: Path, client: Client, result: Result, record: Mapping[str, Any]) -> None:
    """Writes what a site has of a task for its own eyes: the personal model or the predictions, if there are any, and a line
    of `metrics.jsonl`.

    Args:
        folder: of the run, at the site.
        client: whose task it was.
        result: of the task.
        record: what the line says.

    Raises:
        OSError: it cannot be written; the exception names it.
    """
    more: dict[str, str] = {}
    if result.task.phase == "export":
        path = make_folder(folder / "models") / f"{file_name(client.id)}.safetensors"
        write_model(path, result.weights or {}, result.description, client)
        more["model"] = str(path)
    elif result.predictions:
        path = folder / "predictions" / f"{file_name(client.id)}.parquet"
        parquet.write(path, client, {result.task.round: result.predictions})
        more["predictions"] = str(path)
    append_line(folder / "metrics.jsonl", json.dumps({**record, **more}))


def check_marks(folder: Path, client: str, data_fingerprint: str) -> None:
    """Checks that a run knows its client again; the first time what it knows it by is written down.

    Raises:
        NotItsOwnError: it was another, or what was written is damaged.
    """
    file, marks = folder / "run.json", {"client": client, "data_fingerprint": data_fingerprint}
    if not file.exists():
        if any(folder.glob("private/round-*")):
            raise NotItsOwnError(f"{folder.name}/run.json is missing, by which it knew its data again; {_ADVICE}")
        make_folder(folder, parents=True)
        replace_file(file, json.dumps(marks).encode())
        return
    try:
        known = from_json(read_file(file))
    except (OSError, ValueError) as error:
        raise NotItsOwnError(f"{folder.name}/run.json is damaged ({error}); {_ADVICE}") from error
    if wrong := conforms(known, _Marks):
        raise NotItsOwnError(f"{folder.name}/run.json is damaged ({wrong}); {_ADVICE}")
    if known != marks:
        raise NotItsOwnError(
            "its data or network are not those with which it began this run; start another run, or put back "
            f"{folder.name}/run.json if that was changed"
        )


def _file(folder: Path, number: int) -> Path:
    return folder / "private" / f"round-{number:06d}.state"


def _owner(folder: Path, site: str, number: int, method: Mapping[str, Any]) -> _Owner:
    fields = {name: json.dumps(value, sort_keys=True) for name, value in method.items()}
    return {"site": site, "run": folder.name, "round": number, "method": fields}


def _other(found: _Owner, wanted: _Owner) -> str:
    """Of which other site, run, round or method a state is; empty if of none. The server is told neither the names of other
    sites nor of other runs. A field that the method did not have when the state was written says nothing."""
    if found["site"] != wanted["site"]:
        return "another site"
    if found["run"] != wanted["run"]:
        return "another run"
    if found["round"] != wanted["round"]:
        return f"round {found['round']}"
    changed = [name for name, value in found["method"].items() if wanted["method"].get(name) != value]
    return f"a method with {changed[0]} = {found['method'][changed[0]]}" if changed else ""


def _hash(head: bytes, state: bytes) -> str:
    digest = hashlib.sha256(head)
    digest.update(state)
    return digest.hexdigest()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One message at a time, should a process of an earlier one still be at work; files are closed to other users."""
    make_folder(folder.resolve(), parents=True)  # its owner may have put a link there
    before = os.umask(0o077)  # what is written below is for the site's own eyes, whatever its unit says
    try:
        with open_lock(folder / ".lock") as file:
            try:
                import fcntl
            except ImportError:  # Windows has no advisory locks
                yield
                return
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    finally:
        os.umask(before)
