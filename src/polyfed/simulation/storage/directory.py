"""Manages the run directory: configuration, manifest, metrics of each round, checkpoints and final models."""

import difflib
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import IO, TYPE_CHECKING, Any, TypedDict, final

import yaml

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import (
    MAX_ROUNDS_BYTES,
    append_line_and_flush,
    create_private_folder_if_missing,
    expand_user_path,
    read_file,
    read_text_file,
)
from polyfed.core.io.atomic_files import write_file_atomically as write_file_atomically  # deployments take it from here
from polyfed.core.io.values.plain_values import plainness_error
from polyfed.core.io.values.validation import parse_json, parse_yaml, validation_error
from polyfed.core.machine.package_versions import package_versions
from polyfed.simulation.storage.directory_lock import check_lock_in_place, lock_directory
from polyfed.simulation.storage.integrity import (
    RunningHash,
    describe_changed_files,
    hash_settings_that_affect_results,
    read_run_hashes_of_newest_checkpoint,
)
from polyfed.simulation.storage.paths import safe_file_name

if TYPE_CHECKING:
    from polyfed.simulation.storage.checkpoints.state_store import StateStore

BASELINES = "baselines"  # subfolder with a run directory for each baseline
RUN_FORMAT = 1  # of run directories: grows when an older polyfed could misread one


class CountsOfClasses(TypedDict):
    """Describes how many classes each client has, and by which word a table calls them."""

    name: str
    clients: dict[str, int]


class Manifest(TypedDict, total=False):
    """Describes the content of `manifest.json`: facts about a run, such as package versions and hashes of its files."""

    format: int
    started: str
    seed: int
    config_sha256: str
    rounds: list[int]
    data_fingerprint: str
    column_fingerprint: str
    partition_fingerprint: str
    class_names: list[str]
    decided: dict[str, str]
    deployment: str
    sites: list[str]
    score: dict[str, str | bool]
    task: str | dict[str, Any]
    evaluated: str
    predictions: str
    files: dict[str, str]
    stopped: dict[str, str | int]
    versions: dict[str, str]
    host: dict[str, Any]
    data_warnings: list[str]
    preparation: dict[str, Any]
    counted: CountsOfClasses
    unseen: list[str]


@final
@dataclass(frozen=True)
class RunDirectory:
    """Reads and writes the files in the directory of one run, and locks it against other processes."""

    path: Path
    _lock: IO[str]
    _metrics_hash: RunningHash = field(default_factory=RunningHash)

    @cached_property
    def state_store(self) -> "StateStore":
        """Returns the file with the states of clients."""
        from polyfed.simulation.storage.checkpoints.state_store import (  # late, since it imports torch
            STORE_FILE,
            StateStore,
        )

        return StateStore(self.checkpoint_folder / STORE_FILE, keeps_open=True)

    @classmethod
    def create(cls, path: str | Path) -> "RunDirectory":
        """Creates a run directory. A folder without `config.yaml`, left by an interrupted start, counts as empty.

        Raises:
            UserError: the folder exists and is not empty, or cannot be written.
        """
        folder = expand_user_path(path, "out")
        check_can_become_run_directory(folder)
        try:
            if not folder.exists():
                create_private_folder_if_missing(folder, parents=True)
            return cls(folder, lock_directory(folder))
        except OSError as error:
            raise _unwritable_error(folder, error) from error

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Opens an existing run directory to resume the run.

        Raises:
            UserError: the folder is not a run directory, or another process is writing to it.
        """
        folder = expand_user_path(path, "the run directory")
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder} is not a run directory: it has no config.yaml")
        try:
            return cls(folder, lock_directory(folder))
        except OSError as error:
            raise UserError(
                f"cannot write to the run directory {folder}: {error.strerror}; make it writable, or resume a copy of it"
            ) from error

    def close(self) -> None:
        """Releases the lock on the run directory, so that another process can open it."""
        if "state_store" in self.__dict__:
            self.state_store.close()
        self._lock.close()

    def check_in_place(self) -> None:
        """Raises a UserError if the directory was deleted or moved after it was opened."""
        check_lock_in_place(self.path, self._lock)

    @property
    def checkpoint_folder(self) -> Path:
        """Returns the path of the folder with the run's checkpoints."""
        return self.path / "checkpoint"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes `config.yaml`, which makes the folder a run directory, after all other first files."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        self.add_to_manifest({"config_sha256": hash_settings_that_affect_results(parse_yaml(text))})
        write_file_atomically(self.path / "config.yaml", text.encode())

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Writes `manifest.json` with the given facts, the time, package versions, and a description of this machine."""
        import platform

        host = {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        content = {"format": RUN_FORMAT, "started": started, **facts, "versions": package_versions(), "host": host}
        write_file_atomically(self.path / "manifest.json", json.dumps(content, indent=1).encode())

    def add_to_manifest(self, facts: Mapping[str, Any]) -> None:
        """Adds to `manifest.json` facts that became available only during the run."""
        self.check_in_place()
        write_file_atomically(
            self.path / "manifest.json", json.dumps({**self.read_manifest(), **facts}, indent=1).encode()
        )

    def read_manifest(self) -> dict[str, Any]:
        """Returns the content of `manifest.json`; an empty dict if it is missing or damaged."""
        return read_manifest(self.path)

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Appends a round's record to `metrics.jsonl`, on the disk before the next checkpoint."""
        self.check_in_place()
        line = json.dumps(record, allow_nan=False)
        append_line_and_flush(self.path / "metrics.jsonl", line)
        self._metrics_hash.add_line(f"{line}\n")

    @property
    def metrics_sha256(self) -> str:
        """Returns the SHA-256 hash of all lines of `metrics.jsonl` so far; each checkpoint stores it."""
        return self._metrics_hash.hexdigest()

    def write_plot_arrays(self, round_number: int, arrays: Mapping[str, Any]) -> None:
        """Writes the arrays that the method provides for plots after round N to `analysis/round-N.npz`."""
        import numpy as np

        folder = create_private_folder_if_missing(self.path / "analysis")
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
        write_file_atomically(folder / f"round-{round_number:06d}.npz", content.getvalue())

    def last_complete_round(self) -> int:
        """Returns the number of the last round up to which `metrics.jsonl` has a record of every round, without a gap."""
        numbers = [record["round"] for record in read_metrics(self.path / "metrics.jsonl")]
        return next((n for n, number in enumerate(numbers) if number != n + 1), len(numbers))

    def truncate_metrics_after(self, last_round: int) -> list[dict[str, Any]]:
        """Removes later rounds and a cut line from `metrics.jsonl`; returns the remaining records.

        Raises:
            UserError: a round up to `last_round` is missing or damaged.
        """
        path = self.path / "metrics.jsonl"
        records = read_metrics(path)[:last_round]
        if [r["round"] for r in records] != list(range(1, last_round + 1)):
            raise UserError(
                f"{path} does not hold rounds 1 to {last_round}, which the checkpoint follows; it was damaged"
            )
        # The lines stay unchanged, since checkpoints are bound to their hash.
        text = "".join(f"{line}\n" for line in read_metrics_text(path).split("\n")[:last_round])
        write_file_atomically(path, text.encode())
        self._metrics_hash.restart(text)
        for file in (self.path / "analysis").glob("round-*.npz"):
            if (number := file.stem.removeprefix("round-")).isdecimal() and int(number) > last_round:
                file.unlink()
        return records

    def model_path(self, client: str) -> Path:
        """Returns the path of the file in which a client's personal model is saved."""
        return create_private_folder_if_missing(self.path / "models") / f"{safe_file_name(client)}.safetensors"


def encode_json(content: Any) -> bytes:
    """Encodes a nested structure of plain values as JSON bytes."""
    return json.dumps(content, indent=1).encode()


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns the content of the `config.yaml` at this path or in this folder.

    Raises:
        UserError: the file is missing, or no YAML mapping.
    """
    place = expand_user_path(path, "the run directory")
    file = place / "config.yaml" if place.is_dir() else place
    try:
        data = read_file(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    try:
        content = parse_yaml(data)
    except ValueError as error:
        raise UserError(f"{file} is not valid YAML{', ' if str(error).startswith('line ') else ': '}{error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a mapping of settings, found {type(content).__name__}")
    if error_text := plainness_error(content):
        raise UserError(f"{file} is not a configuration: {error_text}")
    return content


def read_start_time(folder: Path) -> float:
    """Returns when a run began, in seconds since 1970; without a word in its manifest, when its folder last changed."""
    try:
        return datetime.fromisoformat(read_manifest(folder)["started"]).timestamp()
    except (KeyError, UserError, ValueError):
        return folder.stat().st_mtime


def check_directory_exists(folder: Path) -> None:
    """Raises a `UserError` with the nearest names beside it, or the newest runs, unless there is something at a path.

    >>> check_directory_exists(Path("no/such/folder"))
    Traceback (most recent call last):
    polyfed.core.errors.UserError: no/such/folder does not exist
    """
    if folder.exists():
        return
    with suppress(OSError):  # no folder above it, or none that may be listed
        if names := difflib.get_close_matches(folder.name, sorted(path.name for path in folder.parent.iterdir()), n=3):
            nearest = " or ".join(str(folder.parent / name) for name in names)
            raise UserError(f"{folder} does not exist; did you mean {nearest}?")
        if folder.parent in (Path(), Path("runs")):  # where the command line puts runs
            newest = sorted(Path("runs").iterdir(), key=read_start_time, reverse=True)[:3]
            raise UserError(f"{folder} does not exist; newest in runs: {', '.join(map(str, newest)) or 'nothing'}")
    raise UserError(f"{folder} does not exist")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Returns the content of `manifest.json` in a run directory; an empty dict if it is missing or damaged.

    Raises:
        UserError: the path is not a file, it cannot be read, or a newer polyfed wrote it.
    """
    try:
        data = read_file(Path(folder) / "manifest.json")
    except OSError:
        return {}
    try:
        content = parse_json(data)
    except ValueError:
        return {}
    if validation_error(content, Manifest):
        return {}
    if content.get("format", 1) > RUN_FORMAT:  # the first versions wrote none
        raise UserError(f"{folder} has format {content['format']}, and this polyfed reads {RUN_FORMAT}; update polyfed")
    return dict(content)


def describe_changed_files_of_run(folder: str | Path, *, include_outputs: bool = True) -> list[str]:
    """Returns a sentence for each file of a run directory that was changed after the run wrote it, or an empty list.

    Args:
        folder: the run directory.
        include_outputs: whether to check models and predictions too.

    Raises:
        UserError: its configuration cannot be read.
    """
    newest = read_run_hashes_of_newest_checkpoint(Path(folder) / "checkpoint")
    return describe_changed_files(Path(folder), read_config(folder), read_manifest(folder), newest, include_outputs)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the records of `metrics.jsonl` up to a damaged line; empty if it is missing.

    Raises:
        UserError: the file cannot be read.
    """
    records: list[dict[str, Any]] = []
    for line in read_metrics_text(path).rstrip().split("\n"):
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not isinstance(record.get("round"), int):
            break
        records.append(record)
    return records


def read_metrics_text(path: Path) -> str:
    """Returns `metrics.jsonl` or "" if missing; bytes that are no text make their line invalid."""
    try:
        return read_text_file(path, MAX_ROUNDS_BYTES, errors="replace")
    except FileNotFoundError:
        return ""


def call_to_resume(folder: Path, *, gives_rounds: bool = False) -> str:
    """Returns the command that continues a run and its baselines, or the call where its clients were made in Python."""
    with suppress(UserError):
        if read_config(folder).keys().isdisjoint(("data", "deployment")):
            return f"polyfed.resume({str(folder)!r}, clients=...{', rounds=N' * gives_rounds})"
    return f"polyfed resume {quote(str(find_main_run(folder)))}{' --rounds N' * gives_rounds}"


def find_main_run(folder: Path) -> Path:
    """Returns the directory of the run that a baseline belongs to; `folder` itself if its run is no baseline."""
    main = folder.parent.parent
    return main if folder.parent.name == BASELINES and (main / "config.yaml").exists() else folder


def check_is_in_memory(kind: str, folder: Path | None, out: str | Path) -> None:
    """Raises a `UserError` if the run or comparison (`kind`) that is to be saved in `out` is in a folder already."""
    if folder is not None:
        raise UserError(
            f"the {kind} is in {folder} already; load it, polyfed.load('{folder}'), or copy it, "
            f"shutil.copytree('{folder}', '{out}')"
        )


def check_can_become_run_directory(folder: Path) -> None:
    """Raises a `UserError` unless a folder can be read and is empty, or does not exist; creates nothing."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the run directory {folder} is a file; choose another out=... (--out)")
        if folder.exists() and not all(is_left_by_a_start(entry.name) for entry in folder.iterdir()):
            hint = f"continue it with `{call_to_resume(folder)}` or " if (folder / "config.yaml").exists() else ""
            if hint and all(read_manifest(run).get("files") for run in (folder, *(folder / BASELINES).glob("*/"))):
                more = call_to_resume(folder, gives_rounds=True)
                hint = f"its run is finished (polyfed show {folder}; more rounds: {more}); "
            raise UserError(f"{folder} is not empty; {hint}choose another out=... (--out), or remove it")
    except OSError as error:
        raise _unwritable_error(folder, error) from error


def _unwritable_error(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write to the run directory {folder}: {error.strerror}; choose another out=... (--out)")


def is_left_by_a_start(name: str) -> bool:
    """Returns whether a start interrupted before it wrote `config.yaml` can have left a file of this name."""
    return name in (".lock", "manifest.json", BASELINES) or name.startswith(".partial-")
