"""The run directory: configuration, manifest, metrics of each round, checkpoints and the models at the end."""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict, final

import yaml

from polyfed.core.errors import UserError
from polyfed.core.files import MOST_ROUNDS, append_line, make_folder, open_lock, read_file, read_text_file, user_path
from polyfed.core.files import replace_file as replace_file  # deployments take it from here
from polyfed.core.typed import conforms, from_json, from_yaml
from polyfed.simulation.runs.chain import changes as changes_of
from polyfed.simulation.runs.chain import newest_binding, of_config
from polyfed.simulation.runs.paths import file_name

if TYPE_CHECKING:
    from polyfed.core.tree import Tree

BASELINES = "baselines"  # folder of a run directory, with a run directory of each baseline
_PACKAGES = ("polyfed", "torch", "numpy", "safetensors")
_PLAIN = (str, int, float, bool, type(None))


class Manifest(TypedDict, total=False):
    """What `manifest.json` holds."""

    seed: int
    config_sha256: str
    data_fingerprint: str
    partition_fingerprint: str
    class_names: list[str]
    decided: dict[str, str]
    deployment: str
    sites: list[str]
    score: dict[str, str | bool]
    evaluated: str
    predictions: str
    files: dict[str, str]
    versions: dict[str, str]


@final
@dataclass(frozen=True)
class RunDirectory:
    """A folder that belongs to one run; the process that writes to it holds a lock."""

    path: Path
    _lock: IO[str]
    _metrics: "_Running" = field(default_factory=lambda: _Running())

    @classmethod
    def create(cls, path: str | Path) -> "RunDirectory":
        """A new run directory. One that was stopped before it had a `config.yaml` counts as empty.

        Raises:
            UserError: it exists and is not empty, or cannot be written.
        """
        folder = user_path(path, "out")
        refuse_taken(folder)
        try:
            if not folder.exists():
                make_folder(folder, parents=True)
            return cls(folder, _locked(folder))
        except OSError as error:
            raise _unwritable(folder, error) from error

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """An existing run directory, to go on with.

        Raises:
            UserError: it is not a run directory, or another process is writing to it.
        """
        folder = user_path(path, "the run directory")
        if not (folder / "config.yaml").exists():
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
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        self.add_to_manifest({"config_sha256": of_config(from_yaml(text))})
        replace_file(self.path / "config.yaml", text.encode())

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Writes `manifest.json`: `facts`, and the versions and machine of this process."""
        import platform

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
        line = json.dumps(record, allow_nan=False)
        append_line(self.path / "metrics.jsonl", line)
        self._metrics.add(f"{line}\n")

    @property
    def metrics_sha256(self) -> str:
        """The running hash of the lines of `metrics.jsonl`, which checkpoints are bound to."""
        return self._metrics.value()

    def write_analysis(self, round_number: int, arrays: Mapping[str, Any]) -> None:
        """Writes what a method keeps of a round for plots, `analysis/round-N.npz`: tensors, and lists of names."""
        import numpy as np

        folder = make_folder(self.path / "analysis")
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
        kept = read_metrics(path)[:last]
        if [r["round"] for r in kept] != list(range(1, last + 1)):
            raise UserError(f"{path} does not hold rounds 1 to {last}, which the checkpoint follows; it was damaged")
        text = "".join(f"{line}\n" for line in read_text(path).split("\n")[:last])  # as they are, since they are bound
        replace_file(path, text.encode())
        self._metrics.begin(text)
        for file in (self.path / "analysis").glob("round-*.npz"):
            if (number := file.stem.removeprefix("round-")).isdecimal() and int(number) > last:
                file.unlink()
        return kept

    def model_path(self, client: str) -> Path:
        """Where the personal model of a client is kept."""
        return make_folder(self.path / "models") / f"{file_name(client)}.safetensors"


@final
class _Running:
    """A hash of lines that come one by one."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def begin(self, text: str) -> None:
        """Begins again, with these lines."""
        self._hash = hashlib.sha256(text.encode())

    def add(self, line: str) -> None:
        """Takes in another line."""
        self._hash.update(line.encode())

    def value(self) -> str:
        """Of all so far."""
        return self._hash.hexdigest()


def write_weights(path: Path, weights: "Tree", description: Mapping[str, Any] | None = None) -> None:
    """Weights as a safetensors file and, where there is one, the description beside it."""
    import safetensors.torch  # which imports torch, and reading a configuration should not

    files = {path: safetensors.torch.save({n: t.contiguous() for n, t in weights.items()})}
    if description is not None:
        files[path.with_suffix(".json")] = json.dumps(description, indent=1).encode()
    for file, content in files.items():
        replace_file(file, content)


def as_json(content: Any) -> bytes:
    """Plain values as a JSON file holds them."""
    return json.dumps(content, indent=1).encode()


def plain(value: Any, name: str) -> Any:
    """A value as YAML and JSON can write it: NumPy's scalars as Python's, tuples as lists.

    Raises:
        UserError: something that cannot be written, with its place.

    >>> import numpy as np
    >>> plain({"lr": np.float64(0.1), "milestones": (3, np.int64(6))}, "algorithm")
    {'lr': 0.1, 'milestones': [3, 6]}
    """
    import numpy as np

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
    place = user_path(path, "the run directory")
    file = place / "config.yaml" if place.is_dir() else place
    try:
        data = read_file(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    try:
        content = from_yaml(data)
    except ValueError as error:
        raise UserError(f"{file} is not valid YAML{', ' if str(error).startswith('line ') else ': '}{error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a mapping of settings, found {type(content).__name__}")
    if wrong := _not_plain(content):
        raise UserError(f"{file} is no configuration: {wrong}")
    return content


def _not_plain(value: Any, place: str = "") -> str:
    """What in a YAML file is neither text, a number, true, false, null, a list nor a mapping; empty if nothing is."""
    if isinstance(value, dict):
        if wrong := [key for key in value if type(key) not in _PLAIN]:
            return f"a key of {place or 'it'} is a {type(wrong[0]).__name__}"
        return next(filter(None, (_not_plain(item, f"{place}.{key}".lstrip(".")) for key, item in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_not_plain(item, f"{place}[{k}]") for k, item in enumerate(value))), "")
    return "" if type(value) in _PLAIN else f"{place} is a {type(value).__name__}"


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What `write_manifest` wrote in a run directory; empty if it is missing or damaged.

    Raises:
        UserError: there is something else than a file, or it cannot be read.
    """
    try:
        data = read_file(Path(folder) / "manifest.json")
    except OSError:
        return {}
    try:
        content = from_json(data)
    except ValueError:
        return {}
    return {} if conforms(content, Manifest) else dict(content)


def changes(folder: str | Path, *, made: bool = True) -> list[str]:
    """What was changed in a run directory since it was written, a sentence for each file; see `chain`. Models and
    predictions count if `made`.

    Raises:
        UserError: its configuration cannot be read.
    """
    newest = newest_binding(Path(folder) / "checkpoint")
    return changes_of(Path(folder), read_config(folder), read_manifest(folder), newest, made)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds in a `metrics.jsonl`, up to the first damaged line."""
    records: list[dict[str, Any]] = []
    if path.exists() or path.is_symlink():
        for line in read_text(path).rstrip("\n").split("\n"):
            try:
                record = from_json(line)
            except ValueError:
                break
            if not isinstance(record, dict) or not isinstance(record.get("round"), int):
                break
            records.append(record)
    return records


def read_text(path: Path) -> str:
    """The text of a `metrics.jsonl`; empty if it is missing. What is no text is marked, so that its line is no JSON."""
    try:
        return read_text_file(path, MOST_ROUNDS, errors="replace")
    except FileNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def refuse_taken(folder: Path) -> None:
    """Refuses what cannot become a new run directory; makes nothing.

    Raises:
        UserError: it exists and is not empty, or is a file, or cannot be read.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"the run directory {folder} is a file; choose another --out")
        if folder.exists() and not all(_from_a_start(entry.name) for entry in folder.iterdir()):
            hint = f"continue it with `polyfed resume {folder}` or " if (folder / "config.yaml").exists() else ""
            raise UserError(f"the run directory {folder} is not empty; {hint}choose another --out")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write to the run directory {folder}: {error.strerror}; choose another --out")


def _from_a_start(name: str) -> bool:
    return name in (".lock", "manifest.json", BASELINES) or name.startswith(".partial-")


def _locked(folder: Path) -> IO[str]:
    file = open_lock(folder / ".lock")
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
