"""Refuses what a command line gets wrong before torch is imported, which takes seconds.

Nothing here replaces the checks of the library: it only asks some of them earlier.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml

from polyfed.cli.commands.argv import option_name
from polyfed.cli.commands.options.table_checks import check_data_section, count_clients_at_most
from polyfed.cli.static_registry import ALGORITHMS, MODELS, SOURCES, StaticRegistry, list_least_values
from polyfed.comparison.storage.comparison_directory import DESCRIPTION
from polyfed.core.errors import UserError, check_extra_installed, did_you_mean
from polyfed.core.evaluation.metric_names import check_metric_names
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.values.number_checks import is_number, is_whole_number
from polyfed.core.training.field_ranges import check_field_ranges
from polyfed.simulation.settings import Settings, unknown_device_error
from polyfed.simulation.storage.directory import check_directory_exists, read_config
from polyfed.simulation.storage.paths import describe_missing_hypernetwork, find_comparison_of_run

_LOGGERS = StaticRegistry("polyfed.simulation.monitoring.trackers", "LOGGERS")
_SAMPLERS = StaticRegistry("polyfed.simulation.scheduling.sampling.registry", "SAMPLERS")
_TASKS = StaticRegistry("polyfed.tasks", "REGISTRY")
_DEVICES = frozenset(
    ("auto", "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "mkldnn", "mps", "mtia", "opencl",
     "opengl", "privateuseone", "ve", "vulkan", "xla", "xpu")
)  # fmt: skip  # the kinds that torch.device takes
_KEY = re.compile(r"(?:unknown key |--)([\w.-]+)")


def check_settings(config: Mapping[str, Any], words: Sequence[str] = ()) -> None:
    """Raises a `UserError` if a field of `Settings` is out of range; names the option if it was given.

    A table without a path, that does not exist, or without a column that is named, is refused, too.

    Args:
        config: a complete configuration.
        words: the options of the command line.

    Raises:
        UserError: a value out of range, or what `check_data_section` refuses.
    """
    data = config.get("data")
    source = data if isinstance(data, Mapping) else {}
    if source.get("name") in SOURCES:  # data of one's own may have a task with other metrics
        task = source.get("task", "auto")
        name = task.get("name") if isinstance(task, Mapping) else task
        if isinstance(name, str) and name != "auto" and ":" not in name and name not in _TASKS:
            raise UserError(f"unknown task {name!r}; {did_you_mean(name, _TASKS)}")
        if ":" not in str(name):
            check_metric_names(config.get("metrics") or ())
    check_data_section(data)
    for name, value in {"regions": config.get("regions"), **{f"data.{key}": source[key] for key in source}}.items():
        if is_whole_number(value, 2**63):
            raise UserError(f"{option_name(f'--{name}')} must be below 2^63, got {value}")
    _check_names_and_ranges(config)
    names = [field.name for field in fields(Settings)]
    values = {name: config[name] for name in names if name in config and not name.startswith("compress")}
    try:
        settings = Settings(**{**values, "metrics": tuple(values.get("metrics") or ())})
        is_bounded = is_whole_number(settings.clients_per_round) or settings.min_replies > 1
        if is_bounded and (num_clients := count_clients_at_most(source)) is not None:
            settings.count_round_clients(num_clients)
    except UserError as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        option = option_name(f"--{name}")
        option_keys = name in names and option in map(option_name, words)
        raise UserError(str(error).replace(name, option, 1) if option_keys else str(error)) from error


def _check_names_and_ranges(config: Mapping[str, Any]) -> None:
    """Raises a `UserError` for an impossible loss, sampler or device, and for local training with numbers out of range."""
    loss, sampler, fields = config.get("loss"), config.get("sampler"), config.get("algorithm")
    device = str(config.get("device", "auto"))
    if device.partition(":")[0] not in _DEVICES and not entry_points(group="torch.backends"):  # which may name others
        raise UserError(unknown_device_error(device))
    if isinstance(loss, str) and ":" not in loss:
        raise UserError(f"{loss!r} does not name a loss; write it as module:name, for example my_code:Mine")
    if isinstance(sampler, str) and ":" not in sampler and sampler not in _SAMPLERS:
        raise UserError(f"unknown sampler {sampler!r}; {did_you_mean(sampler, _SAMPLERS)}; power_of_choice:CANDIDATES and "
                        "module:Class of your own are possible, too")  # fmt: skip
    name = str(fields.get("name")) if isinstance(fields, Mapping) else ""
    if name in ALGORITHMS and "LocalTraining" in {base.__name__ for base in ALGORITHMS[name].__mro__}:
        method, values = ALGORITHMS[name], dict(fields or {})
        check_field_ranges(method.__name__, values)
        for field, least in list_least_values(method):
            value, hint = values.get(field), method.__dataclass_fields__[field].type
            if is_number(value) and not (value > 0 if least is None else value >= least):
                requirement = "positive" if least is None else f"at least {least}"
                none = ", or none" if NoneType in get_args(hint) else ""
                raise UserError(f"{method.__name__}: {field} must be {requirement}{none}, got {value!r}")


def check_logger_names(names: Sequence[str]) -> None:
    """Raises a `UserError` if a tracking service is unknown or its package is not installed."""
    for name in names:
        if name not in _LOGGERS:
            raise UserError(f"cannot track with {name!r}; {did_you_mean(name, _LOGGERS)}")
        check_extra_installed(name, "tracking", f"--logger {name}")


def check_algorithm_names(names: Sequence[str]) -> None:
    """Raises a `UserError` if a name is not a method of polyfed and not MODULE:NAME."""
    for name in names:
        if name not in ALGORITHMS and ":" not in name:
            raise UserError(f"unknown algorithm {name!r}; {did_you_mean(name, ALGORITHMS, 'polyfed list algorithms')}")


def check_model_name(name: str) -> None:
    """Raises a `UserError` if a name is not a network of polyfed and not MODULE:FACTORY."""
    if name not in MODELS and ":" not in name:
        raise UserError(f"there is no model {name!r}; {did_you_mean(name, MODELS, 'polyfed list models')}. A network of "
                        "your own is given as module:factory")  # fmt: skip


def check_run_directory(folder: Path, *, allows_comparison: bool = False) -> None:
    """Raises a `UserError` unless a folder is a run directory, or a comparison's where that is taken, too."""
    check_directory_exists(folder)
    if allows_comparison and (folder / DESCRIPTION).exists():
        return
    check_is_no_comparison(folder)
    if not (folder / "config.yaml").exists():
        more = f" (nor {DESCRIPTION}, of a comparison)" if allows_comparison else ""
        raise UserError(f"{folder} is not a run directory: it has no config.yaml{more}")


def check_gives_weights(folder: Path) -> None:
    """Raises a `UserError` if the method of a run generates no weights for clients that took no part."""
    section = read_config(folder).get("algorithm")
    name = str(section.get("name")) if isinstance(section, Mapping) else ""
    if name in ALGORITHMS and "FLHAGHN" not in {base.__name__ for base in ALGORITHMS[name].__mro__}:
        raise UserError(describe_missing_hypernetwork(folder, name))


def check_is_no_comparison(folder: Path) -> None:
    """Raises a `UserError` that names one of its runs if a folder is a comparison."""
    if (folder / DESCRIPTION).exists():
        runs = sorted(file.parent for file in folder.glob("[!.]*/seed-*/config.yaml") if file.parts[-3] != "trial")
        example = runs[0] if runs else f"{folder}/METHOD/seed-0"
        raise UserError(f"{folder} is a comparison; give one of its runs, such as {example}")


def check_is_no_part_of_comparison(folder: Path) -> None:
    """Raises a `UserError` that says how to go on if a run belongs to a comparison."""
    if (comparison := find_comparison_of_run(folder)) is not None:
        raise UserError(f"{folder} is a run of a comparison; go on with all of it: polyfed resume {comparison}")


def check_has_models(folder: Path) -> None:
    """Raises a `UserError` if a folder has no trained networks."""
    check_is_no_comparison(folder)
    check_directory_exists(folder)
    if not (folder / "models").is_dir() and not (folder / "config.yaml").exists():
        raise UserError(f"{folder} has no models; give the directory of a run that has ended")


@contextmanager
def name_file_in_errors(name_or_path: str | None, words: Sequence[str]) -> Iterator[None]:
    """Adds the file and the line to an error about a key of a configuration file that the command line does not have.

    Args:
        name_or_path: the recipe or file; nothing is added for recipes that polyfed ships, and for None.
        words: the options of the command line.
    """
    try:
        yield
    except UserError as error:
        match = _KEY.match(str(error))
        path = None if name_or_path is None else Path(name_or_path).expanduser()
        path = path / "config.yaml" if path is not None and path.is_dir() else path
        key = match[1].replace("-", "_") if match else ""
        option_keys = {option_name(word).removeprefix("--").replace("-", "_") for word in words}
        if not match or path is None or not path.is_file() or key in option_keys:
            raise
        line = _find_line(path, key.split("."))
        place = f"{path}, line {line}" if line else str(path)
        raise UserError(f"{place}: {str(error).replace(f'--{match[1]}', key, 1)}") from error


def _find_line(path: Path, keys: Sequence[str]) -> int | None:
    """Returns the line (from 1) of a nested key in YAML, or of the nearest key above it; None without any."""
    node: Any = yaml.compose(read_file(path).decode(), Loader=yaml.SafeLoader)
    line = None
    for key in keys:
        entries = node.value if isinstance(node, yaml.MappingNode) else ()
        pair = next(((k, value) for k, value in entries if k.value == key), None)
        if pair is None:
            return line
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line
