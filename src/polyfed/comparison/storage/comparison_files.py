"""Creates and locks the directory of a comparison, and writes its results."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, expand_user_path, write_file_atomically
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.simulation.storage.directory import is_left_by_a_start
from polyfed.simulation.storage.directory_lock import lock_directory
from polyfed.simulation.storage.integrity import hash_file
from polyfed.simulation.storage.paths import COMPARISON_DESCRIPTION

DESCRIPTION, RESULTS = COMPARISON_DESCRIPTION, "comparison.json"


def check_can_hold_comparison(folder: Path) -> None:
    """Raises a `UserError` if a folder holds something that is not a comparison; creates nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another out=... (--out)")
    is_comparison = (folder / DESCRIPTION).exists()
    if not is_comparison and folder.exists() and not all(is_left_by_a_start(e.name) for e in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no comparison; choose another out=... (--out)")


def lock_comparison(folder: Path) -> IO[str]:
    """Creates the directory of a comparison if it does not exist, and locks it until the returned file is closed.

    Raises:
        UserError: the folder holds something else, cannot be written, or another process is writing to it.
    """
    check_can_hold_comparison(folder)
    try:
        if not folder.exists():
            create_private_folder_if_missing(folder, parents=True)
        return lock_directory(folder)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another out=... (--out)") from error


def hash_compared_files(folder: Path, results: Mapping[str, Any]) -> str:
    """Hashes the files that results were computed from: the description of the comparison, and the metrics of its runs.

    Raises:
        OSError: one of them cannot be read.
    """
    runs = [folder / str(run["path"]) for method in results["methods"].values() for run in method["runs"].values()]
    paths = (folder / DESCRIPTION, *(run / "metrics.jsonl" for run in runs))
    return hashlib.sha256("".join(map(hash_file, paths)).encode()).hexdigest()


def write_comparison_results(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes `comparison.json` atomically: a reader finds the old or the new file."""
    write_file_atomically(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False).encode())


def write_results_from_memory(out: str | Path, results: Mapping[str, Any]) -> Path:
    """Writes the results of a comparison without directory to a new one, which has no runs; returns its path.

    Raises:
        UserError: the comparison was planned only, or the folder is taken or cannot be written.
    """
    if not results["methods"]:
        raise UserError("this is a plan of a comparison, with nothing to save: compare without plan_only=True (--plan)")
    folder = expand_user_path(out, "out")
    if (folder / DESCRIPTION).exists():
        raise UserError(f"{folder} holds a comparison; choose another folder, or remove that one first")
    with lock_comparison(folder):
        names = ("title", "seeds", "reference", "same_clients", "folds", "most_repeats")
        content = to_plain_values({name: results[name] for name in names if name in results}, "comparison")
        write_file_atomically(folder / DESCRIPTION, yaml.safe_dump(content, allow_unicode=True).encode())
        write_comparison_results(folder, results)
    return folder
