"""Reads where the results on a page come from: when they were made, by which command, configuration, data and versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, final

import yaml

from polyfed.comparison.storage.comparison_directory import DESCRIPTION, RESULTS, read_description
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.tasks.task import DEFAULT_TASK
from polyfed.report.data.run_groups import RunGroup
from polyfed.simulation.settings import EXECUTION_FIELDS
from polyfed.simulation.storage.directory import read_manifest

_NAMED_CLASSES = 4  # of an outcome; more are counted
_SEEDS_OF_COMPARE = (0, 1, 2, 3, 4)  # by default


@final
@dataclass(frozen=True)
class Provenance:
    """Holds where the results of a group of runs come from; a text is empty where it is not known.

    Attributes:
        folder_name: of the run or comparison.
        date: when the last result was written, in UTC.
        command: makes the results again from the configuration, saved as config.yaml; of a comparison with the methods
            that it compared.
        configuration: as YAML, without where it ran and without folders of files.
        fingerprint: of the data.
        versions: of Python and packages, and the machine's cores.
        data_name: of the data; empty for clients made in Python.
        outcome: what is predicted: the target's column, with its classes or its time, or the classes alone.
    """

    folder_name: str = ""
    date: str = ""
    command: str = ""
    configuration: str = ""
    fingerprint: str = ""
    versions: str = ""
    data_name: str = ""
    outcome: str = ""


def read_provenance(run_group: RunGroup) -> Provenance:
    """Reads where the results of a group of runs come from, from the directory of the first run and of its comparison."""
    run = next((run for method in run_group.methods for run in method.runs if run.folder is not None), None)
    if run is None or run.folder is None:
        return Provenance()
    manifest = read_manifest(run.folder)
    comparison = next((f for f in list(run.folder.parents)[:3] if (f / DESCRIPTION).is_file()), None)
    versions = [f"{name} {version}" for name, version in (manifest.get("versions") or {}).items()]
    if cores := (manifest.get("host") or {}).get("cores"):
        versions.append(f"{cores} cores")
    if comparison is None:
        config = run.config if isinstance(run.config.get("data"), Mapping) else {}
        return Provenance(
            run.folder.resolve().name,
            _time_of_writing(run.folder / "metrics.jsonl"),
            "polyfed run config.yaml" if config else "",
            _as_yaml(config),
            str(manifest.get("data_fingerprint") or ""),
            ", ".join(versions),
            name_of_data(config),
            _name_of_outcome(config, manifest.get("class_names") or ()),
        )
    try:
        description = read_description(comparison)
    except UserError:  # the results are in another file
        description = {}
    experiment = description.get("experiment") or {}
    config = experiment.get("config") or {}
    prints = list(dict.fromkeys(map(str, (description.get("fingerprints") or {}).values())))
    return Provenance(
        comparison.resolve().name,
        _time_of_writing(comparison / RESULTS),
        _compare_command(description, experiment, run_group.comparison_results) if config else "",
        _as_yaml(config),
        join_first_and_count_rest(prints, 3),
        ", ".join(versions),
        name_of_data(config),
        _name_of_outcome(config, _class_names(run_group.comparison_results)),
    )


def _name_of_outcome(config: Mapping[str, Any], class_names: Sequence[object]) -> str:
    """Returns what is to be predicted, in words; empty if the data name neither a column nor classes.

    >>> _name_of_outcome({"data": {"target": "days", "event": "died"}}, ())
    'died (time in column days)'
    >>> _name_of_outcome({"data": {"target": "outcome"}}, ["relapse", "well"])
    'outcome (relapse or well)'
    >>> _name_of_outcome({}, ["well", "relapse"]), _name_of_outcome({}, "0123456789")
    ('relapse against well', 'one of 10 classes')
    """
    data = config.get("data")
    target, event = (data.get("target"), data.get("event")) if isinstance(data, Mapping) else (None, None)
    is_named = 1 < len(class_names) <= _NAMED_CLASSES
    if not isinstance(target, str) or not target:
        separator = " against " if len(class_names) == 2 else " or "
        classes = f"one of {len(class_names)} classes" if class_names else ""
        return separator.join(map(str, class_names[::-1])) if is_named else classes
    if isinstance(event, str) and event:
        return f"{event} (time in column {target})"
    return f"{target} ({' or '.join(map(str, class_names))})" if is_named else target


def _class_names(results: Mapping[str, Any]) -> Sequence[object]:
    """Returns the names of a comparison's classes, of classes without names their numbers; empty for other tasks."""
    if results.get("class_names") or results.get("task") != DEFAULT_TASK:
        return results.get("class_names") or ()
    counts = [entry.get("classes") or () for clients in results["data"].values() for entry in clients.values()]
    return [f"class {k}" for k in range(max(map(len, counts), default=0))]


def name_of_data(config: Mapping[str, Any]) -> str:
    """Returns the name of a configuration's data: of a table or folder the file's; empty if it names no data.

    >>> name_of_data({"data": {"name": "table", "path": "/home/me/brca.csv"}}), name_of_data({"data": {"name": "heart"}})
    ('brca', 'heart')
    """
    data = config.get("data")
    if not isinstance(data, Mapping):
        return ""
    path = data.get("path")
    return PurePath(path).stem if isinstance(path, str) and path else str(data.get("name", ""))


def _time_of_writing(path: Path) -> str:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    except OSError:
        return ""


def _as_yaml(config: Mapping[str, Any]) -> str:
    """Returns a configuration as YAML, with the last part of paths only, which names no person's machine."""
    printed_config = {name: value for name, value in config.items() if name not in EXECUTION_FIELDS}
    data = printed_config.get("data")
    if isinstance(data, Mapping):
        printed_config["data"] = {
            name: PurePath(value).name if name in ("path", "schema") and isinstance(value, str) else value
            for name, value in data.items()
        }
    return yaml.safe_dump(printed_config, sort_keys=False, allow_unicode=True) if printed_config else ""


def _compare_command(description: Mapping[str, Any], experiment: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Returns the command that compares the same methods again; empty if options cannot say which they are."""
    compared = description.get("methods") or {}  # without default methods that do not suit the clients
    methods = {k: entry for k, entry in (experiment.get("methods") or {}).items() if k in compared or not compared}
    if any(label != entry.get("name") for label, entry in methods.items()):
        return ""
    words = ["polyfed compare config.yaml", f"--algorithms {','.join(methods)}"]
    seeds, resplit = description.get("seeds") or [], experiment.get("resplit")
    if folds := experiment.get("folds"):
        words.append(f"--folds {folds}")
        if (repeats := results.get("fold_repeats") or 1) > 1:
            words.append(f"--fold-repeats {repeats}")
    elif resplit:
        words.append(f"--resplit {resplit}")
    elif tuple(seeds) != _SEEDS_OF_COMPARE:
        words.append(f"--seeds {','.join(map(str, seeds))}")
    if experiment.get("same_data") and not resplit and not folds:
        words.append("--same-data")
    search = description.get("search")
    if not search:
        words.append("--tune none")
    elif list(search) != ["lr"]:
        fields = [f"{k}={v if isinstance(v, str) else ','.join(map(str, v))}" for k, v in search.items()]
        words.append(f"--tune '{';'.join(fields)}'")
    budget = results.get("budget") or {}
    if budget.get("kind", "best") != "best":
        limit = "" if budget.get("limit") is None else f"={budget['limit']:g}"
        words.append(f"--budget {budget['kind']}{limit}")
    return " ".join(words)
