"""The run directory: configuration, manifest, metrics of each round, checkpoints and the models at the end."""

import io
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import safetensors.torch
import yaml

from polyfed.errors import UserError
from polyfed.runs.checkpoint import file_name, sync_folder
from polyfed.tree import Tree

_PACKAGES = ("polyfed", "torch", "numpy", "safetensors", "datasets", "torch-geometric")
_PLAIN = (str, int, float, bool, type(None))


@final
@dataclass(frozen=True)
class RunDirectory:
    """A folder that belongs to one run; the process that writes to it holds a lock."""

    path: Path
    _lock: IO[str]

    @classmethod
    def create(cls, path: str | Path) -> "RunDirectory":
        """A new run directory. One that was stopped before it had a `config.yaml` counts as empty.

        Raises:
            UserError: it exists and is not empty, or cannot be written.
        """
        folder = Path(path)
        try:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"the run directory {folder} is a file; choose another --out")
            if folder.exists() and not all(_from_a_start(entry.name) for entry in folder.iterdir()):
                hint = f"continue it with `polyfed resume {folder}` or " if (folder / "config.yaml").exists() else ""
                raise UserError(f"the run directory {folder} is not empty; {hint}choose another --out")
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, _locked(folder))
        except OSError as error:
            raise UserError(
                f"cannot write to the run directory {folder}: {error.strerror}; choose another --out"
            ) from error

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """An existing run directory, to go on with.

        Raises:
            UserError: it is not a run directory, or another process is writing to it.
        """
        folder = Path(path)
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is not a run directory: it has no config.yaml")
        try:
            return cls(folder, _locked(folder))
        except OSError as error:
            raise UserError(f"cannot write to the run directory {folder}: {error.strerror}") from error

    def close(self) -> None:
        """Gives the lock back."""
        self._lock.close()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoint"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes `config.yaml`, which makes the folder a run directory: everything before the first round comes before."""
        replace_file(
            self.path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode()
        )

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Writes `manifest.json`: `facts`, and the versions and machine of this process."""
        host = {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()}
        content = {**facts, "versions": versions(), "host": host}
        replace_file(self.path / "manifest.json", json.dumps(content, indent=1).encode())

    def add_to_manifest(self, facts: Mapping[str, Any]) -> None:
        """Adds what became known while the run went on."""
        replace_file(self.path / "manifest.json", json.dumps({**self.manifest(), **facts}, indent=1).encode())

    def manifest(self) -> dict[str, Any]:
        """What `write_manifest` wrote; empty if it is missing or damaged."""
        return read_manifest(self.path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one round to `metrics.jsonl`; it is on the disk before a checkpoint that follows it."""
        path = self.path / "metrics.jsonl"
        new = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.path)

    def write_analysis(self, round_number: int, arrays: Mapping[str, Any]) -> None:
        """Writes what a method keeps of a round for plots, `analysis/round-N.npz`: tensors, and lists of names."""
        folder = self.path / "analysis"
        folder.mkdir(exist_ok=True)
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
        replace_file(folder / f"round-{round_number:06d}.npz", content.getvalue())

    def rounds_told(self) -> int:
        """The last round up to which `metrics.jsonl` holds every round."""
        numbers = [record["round"] for record in read_metrics(self.path / "metrics.jsonl")]
        return next((n for n, found in enumerate(numbers) if found != n + 1), len(numbers))

    def keep_rounds(self, last: int) -> list[dict[str, Any]]:
        """Drops what `metrics.jsonl` holds after round `last` (rounds that no checkpoint covers, or half a line) and
        returns the rest.

        Raises:
            UserError: a round up to `last` is missing or damaged.
        """
        path = self.path / "metrics.jsonl"
        kept = [r for r in read_metrics(path) if r["round"] <= last]
        if [r["round"] for r in kept] != list(range(1, last + 1)):
            raise UserError(f"{path} does not hold rounds 1 to {last}, which the checkpoint follows; it was damaged")
        replace_file(path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in kept).encode())
        for file in (self.path / "analysis").glob("round-*.npz"):
            if (number := file.stem.removeprefix("round-")).isdecimal() and int(number) > last:
                file.unlink()
        return kept

    def model_path(self, client: str) -> Path:
        """Where the personal model of a client is kept."""
        folder = self.path / "models"
        folder.mkdir(exist_ok=True)
        return folder / f"{file_name(client)}.safetensors"

    def write_model(self, client: str, weights: Tree, description: Mapping[str, Any] | None = None) -> None:
        """A personal model: its weights and, where there is one, the description with which it can be built (`ID.json`)."""
        write_weights(self.model_path(client), weights, description)


def write_weights(path: Path, weights: Tree, description: Mapping[str, Any] | None = None) -> None:
    """Weights as a safetensors file and, where there is one, the description beside it."""
    files = {path: safetensors.torch.save({n: t.contiguous() for n, t in weights.items()})}
    if description is not None:
        files[path.with_suffix(".json")] = json.dumps(description, indent=1).encode()
    for file, content in files.items():
        partial = file.with_name(f".partial-{file.name}")
        partial.write_bytes(content)
        partial.rename(file)


def plain(value: Any, name: str) -> Any:
    """A value as YAML and JSON can write it: NumPy's scalars as Python's, tuples as lists.

    Raises:
        UserError: something that cannot be written, with its place.

    >>> plain({"lr": np.float64(0.1), "milestones": (3, np.int64(6))}, "algorithm")
    {'lr': 0.1, 'milestones': [3, 6]}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {k if type(k) in _PLAIN else str(k): plain(item, f"{name}.{k}") for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{position}]") for position, item in enumerate(value)]
    if type(value) not in _PLAIN:
        raise UserError(
            f"{name} is a {type(value).__name__}, which config.yaml cannot hold: {value!r}; give numbers, strings, lists or "
            "mappings, or run without out="
        )
    return value


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of a `config.yaml`, or of a folder's.

    Raises:
        UserError: it is missing, or no YAML mapping.
    """
    file = Path(path) / "config.yaml" if Path(path).is_dir() else Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise UserError(f"{file} is not valid YAML{where}: {problem or str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a mapping of settings, found {type(content).__name__}")
    return content


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What `write_manifest` wrote in a run directory; empty if it is missing or damaged."""
    try:
        content = json.loads((Path(folder) / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds in a `metrics.jsonl`, up to the first damaged line."""
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not isinstance(record, dict) or not isinstance(record.get("round"), int):
                break
            records.append(record)
    return records


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _from_a_start(name: str) -> bool:
    return name in (".lock", "manifest.json") or name.startswith(".partial-")


def _locked(folder: Path) -> IO[str]:
    file = (folder / ".lock").open("a")
    try:
        import fcntl
    except ImportError:  # Windows has no advisory locks; two writers are then the user's to avoid
        return file
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, and forked workers do not inherit it
    except OSError as error:
        file.close()
        raise UserError(f"another process is writing to the run directory {folder}; wait for it or stop it") from error
    return file


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file, durably, so that it is the old one or the new one at any moment."""
    partial = path.with_name(f".partial-{path.name}")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)
