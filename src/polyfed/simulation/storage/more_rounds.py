"""Gives a run more rounds: checks that they are more, and writes them to the run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import write_file_atomically
from polyfed.core.io.values.number_checks import check_whole_number, is_whole_number
from polyfed.simulation.storage.directory import RunDirectory
from polyfed.simulation.storage.paths import find_comparison_of_run


def check_more_rounds(folder: Path, config: Mapping[str, Any], rounds: int) -> None:
    """Raises a `UserError` if `rounds` is below the rounds of the run in a folder, or the run belongs to a comparison.

    Args:
        folder: the run directory.
        config: the content of its `config.yaml`.
        rounds: the number of all rounds, with those that are done.
    """
    check_whole_number(f"rounds={rounds!r} (--rounds {rounds})", rounds, 1)
    if is_whole_number(config.get("rounds")) and rounds < config["rounds"]:
        raise UserError(
            f"the run in {folder} has {config['rounds']} rounds, and rounds={rounds} (--rounds {rounds}) would be fewer: a "
            "run only gets more; for fewer start another run"
        )
    if (comparison := find_comparison_of_run(folder)) is not None:
        raise UserError(
            f"{folder} is a run of a comparison, whose runs all have the same rounds, so that it gets no others; compare "
            f"again with rounds={rounds} (--rounds {rounds}) and another out=... (--out) than {comparison}"
        )


def write_more_rounds(directory: RunDirectory, config: Mapping[str, Any], rounds: int) -> None:
    """Writes the number of all rounds to `manifest.json`, then to `config.yaml`; a stop between the two harms nothing."""
    earlier = directory.read_manifest().get("rounds") or [config["rounds"]]
    directory.add_to_manifest({"rounds": [*earlier, rounds]})
    text = yaml.safe_dump({**config, "rounds": rounds}, sort_keys=False, allow_unicode=True)
    write_file_atomically(directory.path / "config.yaml", text.encode())
