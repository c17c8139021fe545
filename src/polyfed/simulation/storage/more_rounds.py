"""Gives a run more rounds: checks that they are more, and writes them to the run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import write_file_atomically
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.simulation.storage.directory import RunDirectory


def check_more_rounds(folder: Path, config: Mapping[str, Any], rounds: int) -> None:
    """Raises a `UserError` unless `rounds` is a number of rounds that is not below that of the run in a folder.

    Args:
        folder: the run directory.
        config: the content of its `config.yaml`.
        rounds: the number of all rounds, with those that are done.
    """
    if not is_whole_number(rounds, 1):
        raise UserError(f"rounds={rounds!r} (--rounds {rounds}) must be a whole number of at least 1")
    if is_whole_number(config.get("rounds")) and rounds < config["rounds"]:
        raise UserError(
            f"the run in {folder} has {config['rounds']} rounds, and rounds={rounds} (--rounds {rounds}) would be fewer: a "
            "run only gets more; for fewer start another run"
        )


def write_more_rounds(directory: RunDirectory, config: Mapping[str, Any], rounds: int) -> None:
    """Writes the number of all rounds to `manifest.json`, then to `config.yaml`; a stop between the two harms nothing."""
    earlier = directory.read_manifest().get("rounds") or [config["rounds"]]
    directory.add_to_manifest({"rounds": [*earlier, rounds]})
    text = yaml.safe_dump({**config, "rounds": rounds}, sort_keys=False, allow_unicode=True)
    write_file_atomically(directory.path / "config.yaml", text.encode())
