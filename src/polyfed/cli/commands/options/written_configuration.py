"""Writes the options of a command line to a file, which other commands then take in place of the options."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polyfed.cli.commands.argv import check_is_new_file
from polyfed.cli.commands.options.configuration_parser import DEFAULTS, parse_configuration
from polyfed.cli.commands.options.option_types import as_plain_mappings
from polyfed.core.io.atomic_files import read_file, write_file_atomically

_DECIDING_DATA = ("name", "path", "site", "layout")  # by which the other defaults of data are known

_FIRST_LINE = "# Written by polyfed look; it is replaced when the command is given again.\n"


def check_can_write_configuration(file: Path) -> None:
    """Raises a `UserError` if a file exists that `write_configuration` did not write."""
    if not (file.is_file() and read_file(file).startswith(_FIRST_LINE.encode())):
        check_is_new_file(file)


def write_configuration(config: Mapping[str, Any], file: Path) -> None:
    """Writes a complete configuration as YAML, without the values that are defaults."""
    text = _FIRST_LINE + yaml.safe_dump(select_changed_values(config), sort_keys=False, allow_unicode=True)
    write_file_atomically(file, text.encode())


def select_changed_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a complete configuration that no default gives; all of it if that is not enough.

    >>> config = parse_configuration(["--data", "heart", "--rounds", "3", "--algorithm.lr", "0.5"], {}, "polyfed run")
    >>> select_changed_values(config)
    {'data': {'name': 'heart', 'site': 'hospital'}, 'rounds': 3, 'algorithm': {'name': 'fedavg', 'lr': 0.5}}
    """
    complete: dict[str, Any] = as_plain_mappings(dict(config))
    names = {key: value["name"] for key in ("model", "algorithm") if "name" in (value := complete[key])}
    data = {key: complete["data"][key] for key in _DECIDING_DATA if complete["data"].get(key) is not None}
    if not {"site", "layout"} & data.keys():
        data["partition"] = {"name": complete["data"]["partition"]["name"]}
    defaults = as_plain_mappings(parse_configuration([], {"data": data, **names}, "polyfed run"))
    changed = {"data": data, **_select_differences(complete, defaults)}
    changed["data"] = data | changed["data"]
    if isinstance(names.get("model"), str) and names["model"] != DEFAULTS["model"]:
        changed.setdefault("model", names["model"])
    if names.get("algorithm") != DEFAULTS["algorithm"]:
        changed.setdefault("algorithm", names["algorithm"])
    restored = as_plain_mappings(parse_configuration([], changed, "polyfed run"))
    return changed if json.dumps(restored) == json.dumps(complete) else complete


def _select_differences(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that differ from the defaults, in their sections; a section keeps its name."""
    differences: dict[str, Any] = {}
    for key, value in config.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if section := _select_differences(value, default):
                differences[key] = {"name": value["name"], **section} if "name" in value else section
        elif json.dumps(value) != json.dumps(default):
            differences[key] = value
    return differences
