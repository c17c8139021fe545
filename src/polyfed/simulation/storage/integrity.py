"""Detects damaged or exchanged files in a run directory by SHA-256 hashes, which its files store of one another.

- `manifest.json` binds the configuration (`config_sha256`) and, at the end, the models and predictions (`files`).
- `complete.json` of each checkpoint binds the configuration, the data, the metrics of the rounds up to it (a running hash of
  the lines of `metrics.jsonl`; of the first `records` lines, where its own round has not been evaluated) and its own files.

This finds accidents: a copied checkpoint, an edited file, a bad disk. Somebody who wants to deceive can write the hashes
anew, since they are not signatures.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import MAX_ROUNDS_BYTES, UNLIMITED_BYTES, open_file, read_file
from polyfed.core.io.values.validation import parse_json
from polyfed.simulation.settings import EXECUTION_FIELDS

COMPLETE_FILE = "complete.json"  # of a checkpoint
# Where a run computes does not change its results.
_WHERE = set(EXECUTION_FIELDS)
_MOST_BYTES = 2**31  # most bytes of models and predictions whose hashes are checked
COLUMNS_CHANGED = "columns or categories of the table have other names, or another order,"
"""Begins the sentence on data whose column fingerprint changed."""
RunHashes = Mapping[str, str]  # "config", "data" and, of a checkpoint, "metrics" -> SHA-256 or fingerprint


def hash_settings_that_affect_results(config: Mapping[str, Any]) -> str:
    """Hashes the settings that affect results, without the number of workers, for example.

    >>> digests = [hash_settings_that_affect_results(config) for config in ({"rounds": 3}, {"workers": 8, "rounds": 3})]
    >>> digests[0] == digests[1] != hash_settings_that_affect_results({"rounds": 4})
    True
    """
    deciding_fields = {str(key): value for key, value in config.items() if key not in _WHERE}
    return hashlib.sha256(json.dumps(deciding_fields, sort_keys=True, default=str).encode()).hexdigest()


def hash_config_of_run(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Hashes the configuration of a run as it began: of one that got more rounds later, with the rounds of its beginning.

    Args:
        config: the content of `config.yaml`.
        manifest: its `rounds` are those that the run had, in order; without them it has those of its beginning.
    """
    rounds = manifest.get("rounds")
    is_one_of_run = isinstance(rounds, list) and config.get("rounds") in rounds
    return hash_settings_that_affect_results({**config, "rounds": rounds[0]} if is_one_of_run and rounds else config)


def hash_line_prefixes(text: str) -> list[str]:
    """Returns a list of hashes of the text of `metrics.jsonl`: entry n is the hash of its first n lines, from n = 0.

    >>> hash_line_prefixes("")[0] == hashlib.sha256().hexdigest(), len(hash_line_prefixes("a\\nb\\n"))
    (True, 3)
    """
    running = hashlib.sha256()
    hashes = [running.hexdigest()]
    for line in text.split("\n")[:-1]:
        running.update(f"{line}\n".encode(errors="surrogatepass"))
        hashes.append(running.hexdigest())
    return hashes


def hash_file(path: Path) -> str:
    """Returns the SHA-256 hash of a file's content.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path, UNLIMITED_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it supports readinto


def compute_run_hashes(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> RunHashes:
    """Returns `{"config": hash, "data": hash}` of a run; a deployment's id replaces the data's hash."""
    data = manifest.get("data_fingerprint") or manifest.get("deployment") or ""
    return {"config": hash_config_of_run(config, manifest), "data": str(data)}


def checkpoint_mismatch_error(bound: RunHashes, expected: RunHashes, checkpoint: Path, round_number: int) -> str | None:
    """Returns a sentence on why a checkpoint's hashes are not those of the run; None if they are."""
    folder = checkpoint.parent.parent
    if bound.get("config") != expected["config"]:
        return (
            f"checkpoint {checkpoint} is of a run with another configuration than {folder / 'config.yaml'}: one of the two "
            "was replaced"
        )
    if bound.get("data") != expected["data"]:
        return f"checkpoint {checkpoint} is of a run with other data or clients"
    if "metrics" in expected and bound.get("metrics") != expected["metrics"]:
        return (
            f"{folder / 'metrics.jsonl'} was changed in rounds 1 to {round_number} since checkpoint {checkpoint} was "
            "written, or is of another run"
        )
    return None


def expected_run_hashes_by_round(
    config: Mapping[str, Any], manifest: Mapping[str, Any], metrics: str
) -> Callable[[int], RunHashes]:
    """Returns a function of a round number: the hashes that a checkpoint after that round must store."""
    constant_hashes, lines = compute_run_hashes(config, manifest), hash_line_prefixes(metrics)
    return lambda round_number: {**constant_hashes, "metrics": lines[round_number] if round_number < len(lines) else ""}


def check_config_unchanged(folder: Path, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raises a `UserError` if the configuration has changed, or `manifest.json` is missing or damaged."""
    if not manifest:
        raise UserError(
            f"{folder / 'manifest.json'} is missing or damaged, so that nothing says which run this is; put back a copy of "
            "it, or start another run with another out=... (--out)"
        )
    if sentence := _config_change(folder, config, manifest):
        raise UserError(sentence)


def refuse_changed_manifest(folder: Path, data_fingerprint: str) -> None:
    """Raises a `UserError` if a run is resumed with other data because `manifest.json` was changed.

    Raises an error if the checkpoints store the hash of the given data: then the manifest was changed, not the data.
    """
    if read_run_hashes_of_newest_checkpoint(folder / "checkpoint").get("data") == data_fingerprint:
        raise UserError(
            f"{folder / 'manifest.json'} was changed since the run began: its data_fingerprint is not that of the run, to "
            "which the checkpoints are bound; put back a copy of it"
        )


def _config_change(folder: Path, config: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Returns a sentence if the configuration is not the one with which the run began; "" if it is."""
    if manifest.get("config_sha256") in (None, hash_config_of_run(config, manifest)):
        return ""
    return (
        f"{folder / 'config.yaml'} was changed since the run began; put it back as it was, or start another run with it: "
        f"polyfed run {folder / 'config.yaml'} --out OTHER"
    )


def describe_changed_files(
    folder: Path, config: Mapping[str, Any], manifest: Mapping[str, Any], newest: RunHashes, include_outputs: bool
) -> list[str]:
    """Returns a sentence for each file of a run directory that was changed after the run wrote it.

    Args:
        folder: the run directory.
        config, manifest: their content.
        newest: the binding of the newest checkpoint, with "round"; empty without one.
        include_outputs: whether to check models and predictions too, which are made from the other files.
    """
    sentences = [sentence] if (sentence := _config_change(folder, config, manifest)) else []
    if newest:
        try:
            lines = hash_line_prefixes(
                read_file(folder / "metrics.jsonl", MAX_ROUNDS_BYTES).decode(errors="surrogateescape")
            )
        except OSError:
            lines = hash_line_prefixes("")  # there is none before the first round has been evaluated
        records_text = newest.get("records", "")
        number = int(records_text if records_text.isdecimal() and len(records_text) < 10 else newest["round"])
        if number >= len(lines) or lines[number] != newest.get("metrics"):
            sentences.append(
                f"{folder / 'metrics.jsonl'} was changed in rounds 1 to {number} since they were written; put back a copy "
                "of it, or make the run again"
            )
        if newest.get("config") != hash_config_of_run(config, manifest) and not sentences:
            sentences.append(
                f"the checkpoints of {folder} are of a run with another configuration; put back the run's own"
            )
    return sentences + (_file_changes(folder, manifest.get("files")) if include_outputs else [])


def check_model_unchanged(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Raises a `UserError` if a file of a client's model was changed since the run wrote it.

    Args:
        folder: the run directory.
        manifest: the content of its `manifest.json`; empty at a site, where nothing is compared.
        name: of the client's files.
    """
    files = {
        path: expected for path, expected in manifest.get("files", {}).items() if path.startswith(f"models/{name}.")
    }
    if changes := _file_changes(folder, files):
        raise UserError(changes[0])


def _file_changes(folder: Path, files: Any) -> list[str]:
    if not isinstance(files, Mapping):
        return []
    hash_by_path = {
        path: expected for name, expected in files.items() if _is_file_within(path := folder / str(name), folder)
    }
    if sum(path.stat().st_size for path in hash_by_path) > _MOST_BYTES:
        return []
    return [
        f"{path} was changed since the run wrote it; `polyfed resume {folder}` writes it again"
        for path, expected in hash_by_path.items()
        if hash_file(path) != expected
    ]


def _is_file_within(path: Path, folder: Path) -> bool:
    """Returns whether the path is a file that lies in the folder, with symbolic links resolved."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a name that is too long, or a cycle of links
        return False


def hash_files(folder: Path, subfolders: Sequence[str]) -> dict[str, str]:
    """Returns `{relative path: SHA-256 hash}` for all files in these subfolders of a run directory."""
    paths = [path for part in subfolders for path in sorted((folder / part).glob("[!.]*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in paths}


def read_checkpoint_hashes(folder: Path, section: str) -> dict[str, str]:
    """Returns `{name: hash}` of a section of `complete.json`; empty if it is missing or damaged."""
    try:
        content = parse_json(read_file(folder / COMPLETE_FILE))
    except (OSError, ValueError):
        return {}
    hashes = content.get(section) if isinstance(content, dict) else None
    sound = isinstance(hashes, dict) and all(isinstance(value, str) for value in hashes.values())
    return hashes if isinstance(hashes, dict) and sound else {}


def read_run_hashes_of_newest_checkpoint(folder: Path) -> RunHashes:
    """Returns the run's hashes in its newest checkpoint, with its "round"; empty if none stores hashes."""
    for candidate in sorted(folder.glob("round-*"), reverse=True):
        number = candidate.name.removeprefix("round-")
        if number.isdecimal() and (bound := read_checkpoint_hashes(candidate, "bound")):
            return {**bound, "round": number}
    return {}


@final
class RunningHash:
    """Computes the SHA-256 hash of a text that grows line by line."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def restart(self, text: str) -> None:
        """Discards all lines so far, and starts again with the given text."""
        self._hash = hashlib.sha256(text.encode())

    def add_line(self, line: str) -> None:
        """Adds a line to the end of the hashed text."""
        self._hash.update(line.encode())

    def hexdigest(self) -> str:
        """Returns the hash of all lines so far, in hexadecimal."""
        return self._hash.hexdigest()
