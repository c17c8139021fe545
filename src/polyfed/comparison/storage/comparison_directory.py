"""Reads and writes the directory of a comparison: `comparison.yaml` describes what is compared, `comparison.json` holds
the results.

The directory holds one run directory per method and seed, `METHOD/seed-K` (`METHOD/FIELDS/seed-K` where the best of a
search diverged), `comparison.yaml`, which is written before the first run, and `comparison.json`, which is written when all
runs are finished. `polyfed.comparison.storage.results_schema` defines both files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.storage.comparison_files import DESCRIPTION as DESCRIPTION  # which many take from here
from polyfed.comparison.storage.comparison_files import RESULTS as RESULTS
from polyfed.comparison.storage.comparison_files import hash_compared_files
from polyfed.comparison.storage.continuation import find_first_difference, find_invalidating_change
from polyfed.comparison.storage.results_schema import ComparisonDescription, results_error
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import (
    expand_user_path,
    read_file,
    write_file_atomically,
)
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.machine.package_versions import package_versions
from polyfed.simulation.storage.directory import describe_changed_files_of_run, read_config, read_manifest, read_metrics
from polyfed.simulation.storage.paths import safe_file_name

RESULTS_FORMAT = 2  # of the results


def load_comparison(folder: str | Path) -> Comparison:
    """Loads the results of a finished comparison from its directory.

    Raises:
        UserError: `folder` holds no comparison, or one that is unfinished or damaged.
    """
    folder = expand_user_path(folder, "the folder of the comparison")
    path = folder / RESULTS
    if not (Path(folder) / DESCRIPTION).exists():
        raise UserError(f"{folder} is not the directory of a comparison: it has no {DESCRIPTION}")
    if not path.is_file():
        raise UserError(f"the comparison in {folder} is not finished; go on with it: {command_to_continue(folder)}")
    try:
        content = parse_json(read_file(path))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        if content.get("format") == RESULTS_FORMAT and (error_text := results_error(content)):
            raise ValueError(error_text)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); make it again: polyfed compare {folder}") from error
    if content.get("format") != RESULTS_FORMAT:
        raise UserError(
            f"{path} has format {content.get('format')}, this version of polyfed reads {RESULTS_FORMAT}; make it again: "
            f"polyfed compare {folder}"
        )
    return Comparison(content, Path(folder))


def load_unchanged_comparison(folder: Path) -> Comparison | None:
    """Loads a finished comparison of which no method failed and no file changed; None if there is something to do.

    Answers on runs of another version of polyfed are computed again, since that may compute them otherwise.
    """
    try:
        comparison = load_comparison(folder)
        methods = comparison.results["methods"].values()
        runs = [folder / str(run["path"]) for method in methods for run in method["runs"].values()]
        version_by_run = {run: read_manifest(run).get("versions", {}).get("polyfed") for run in runs}
        if {*version_by_run.values()} != {package_versions()["polyfed"]}:
            return None
        is_unchanged = comparison.results.get("computed_from") == hash_compared_files(folder, comparison.results)
    except (UserError, OSError):
        return None
    return comparison if is_unchanged and not comparison.failed else None


def read_description(folder: str | Path) -> dict[str, Any]:
    """Returns the content of `comparison.yaml`, which describes a comparison, from its directory.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = expand_user_path(folder, "the folder of the comparison") / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{folder} is not the directory of a comparison: it has no {DESCRIPTION}")
    content = read_config(path)
    if error_text := validation_error(content, ComparisonDescription):
        raise UserError(f"{path} is damaged: {error_text}; give the whole command again with another out=... (--out)")
    return content


def command_to_continue(folder: str | Path) -> str:
    """Returns the command that continues a comparison, or the call where its clients were made in Python."""
    is_from_python = read_description(folder).get("experiment") is None
    return (
        f"polyfed.compare(clients, ..., out={str(folder)!r})"
        if is_from_python
        else f"polyfed compare {quote(str(folder))}"
    )


def parse_result_criteria(description: Mapping[str, Any]) -> ResultCriteria:
    """Returns the last budget and target in the content of `comparison.yaml`."""
    stored = description.get("reading") or {}
    return ResultCriteria(Budget.from_text(stored.get("budget", "best")), stored.get("target"))


def write_description(folder: Path, description: Mapping[str, Any], criteria: ResultCriteria) -> None:
    """Writes the description of a comparison to `comparison.yaml`.

    Raises:
        UserError: `folder` holds a comparison of something else.
    """
    content = to_plain_values(description, "comparison")
    if (folder / DESCRIPTION).exists():
        before = read_description(folder)
        if "methods" not in before:
            raise UserError(
                f"{folder} holds the results of a comparison without its runs; choose another out=... (--out)"
            )
        if differs := find_invalidating_change(before, content):
            raise UserError(
                f"{folder} holds a comparison of something else: {differs}; choose another out=... (--out) for "
                f"this one, or go on with what it holds: {command_to_continue(folder)}"
            )
    content["reading"] = {"budget": str(criteria.budget), "target": criteria.target}
    write_file_atomically(folder / DESCRIPTION, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def load_history_if_finished(
    folder: Path, rounds: int, client_ids: Sequence[str], seed: int, method: Mapping[str, Any], data_fingerprint: str
) -> list[dict[str, Any]] | None:
    """Returns the records of a finished run, one per round; None if rounds, models or predictions are missing.

    Args:
        folder: the run directory.
        rounds, client_ids, seed: settings of the run that belongs there.
        method: the method with its fields, as in `config.yaml`.
        data_fingerprint: the fingerprint of the clients, as in `manifest.json`.

    Raises:
        UserError: the folder holds another run, or its configuration is damaged.
    """
    if not (folder / "config.yaml").exists():
        return None
    config = read_config(folder)
    stored_run = {"seed": config.get("seed"), "algorithm": config.get("algorithm"), "rounds": config.get("rounds")}
    expected_run = {"seed": seed, "algorithm": dict(method), "rounds": rounds}
    manifest = read_manifest(folder)
    stored_fingerprint = manifest.get("data_fingerprint", data_fingerprint)  # one that is lost is not another
    if differs := find_first_difference(
        {**stored_run, "clients": stored_fingerprint}, {**expected_run, "clients": data_fingerprint}
    ):
        raise UserError(
            f"{folder} does not hold the run that belongs there: {differs}; remove it, or choose another out=... (--out)"
        )
    if changed := describe_changed_files_of_run(folder, include_outputs=False):
        raise UserError(f"{changed[0]}. A comparison reads finished runs: make this one again by removing {folder}")
    history = read_metrics(folder / "metrics.jsonl")
    if manifest and not manifest.get("files"):
        return None  # it was stopped while it wrote models and predictions
    stopped_round = manifest.get("stopped", {}).get("round", rounds)  # where a callback stopped it
    if [record["round"] for record in history] != list(range(1, int(stopped_round) + 1)):
        return None
    if not all(isinstance(record.get(part), dict) for record in history for part in ("clients", "summary")):
        return None
    if describe_changed_files_of_run(folder):
        return None  # models or predictions, which are written again
    models = [folder / "models" / f"{safe_file_name(client)}.safetensors" for client in client_ids]
    return history if all(path.is_file() and path.stat().st_size > 0 for path in models) else None
