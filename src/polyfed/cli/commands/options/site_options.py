"""Parses the option that gives each site a different network, and makes each site of a table with a site column one
client.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.cli.commands.options.table_checks import describe_columns_of_table
from polyfed.cli.static_registry import MODELS
from polyfed.core.errors import UserError
from polyfed.core.io.values.validation import parse_yaml


def networks_by_site(model_section: Any) -> dict[str, Any] | None:
    """Returns {site: network} of the section `model_section`; None if it names one for all.

    >>> networks_by_site({"north": "mlp", "south": {"name": "mlp", "hidden": [8]}})
    {'north': 'mlp', 'south': {'name': 'mlp', 'hidden': [8]}}
    >>> networks_by_site({"name": "mlp", "hidden": [8]}), networks_by_site("mlp"), networks_by_site({"hidden": [8]})
    (None, None, None)
    """
    if not isinstance(model_section, Mapping) or not model_section or isinstance(model_section.get("name"), str):
        return None
    all_networks = all(_is_network(entry) for entry in model_section.values())
    return {str(site): entry for site, entry in model_section.items()} if all_networks else None


def _is_network(entry: Any) -> bool:
    if isinstance(entry, Mapping):
        return isinstance(entry.get("name"), str)
    return isinstance(entry, str) and (entry in MODELS or ":" in entry)


def parse_networks_by_site(model_option: str) -> dict[str, Any] | None:
    """Parses `--model` as {site: network}; None for one network, or several names with commas.

    Raises:
        UserError: the text begins as a mapping, and is not a mapping of networks.

    >>> parse_networks_by_site("{north: mlp, south: my_nets:make}"), parse_networks_by_site("mlp")
    ({'north': 'mlp', 'south': 'my_nets:make'}, None)
    """
    if not model_option.lstrip().startswith("{"):
        return None
    try:
        networks = networks_by_site(parse_yaml(model_option))
    except ValueError:
        networks = None
    if networks is None:
        raise UserError(
            "--model takes a network, or one for each site, such as '{north: mlp, south: my_nets:make}', got "
            f"{model_option!r}"
        )
    return networks


def find_last_option_value(option: str, argv: Sequence[str]) -> str | None:
    """Returns the last value that a command line gives an option; None if it is missing."""
    value = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        if word == option and following is not None:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def partition_options_of_site_column(
    fields: Mapping[str, Any], config_values: Mapping[str, Any], argv: Sequence[str], partition_name: str | None
) -> dict[str, Any]:
    """Returns the options that make each site one client, as {key: value}; {} if the user chose another partition.

    Args:
        fields: the options of the source, with their defaults.
        config_values: what a file says, by key.
        argv: of the command line.
        partition_name: the partition that an option or a file chooses; None if none does.

    Raises:
        UserError: neither a column nor a partition is given, so that rows would be assigned to simulated clients; or both,
            so that a site's rows would be assigned to several.
    """
    if not {"data.site", "data.layout"} & fields.keys():
        return {}
    if partition_name not in (None, "natural"):
        column = find_last_option_value("--data.site", argv)
        if "data.site" in fields and column not in (None, "null"):
            raise UserError(
                f"--data.site {column} makes a client of each site, and the partition {partition_name} assigns all rows to "
                f"simulated clients: give one of them (--data.partition natural, or --data.drop {column} for --data.site)"
            )
        return {}
    site = find_last_option_value("--data.site", argv) or config_values.get("data.site", fields.get("data.site"))
    if "data.layout" in fields:
        layout = find_last_option_value("--data.layout", argv) or config_values.get("data.layout")
        if layout in (None, "class"):
            return {}
        site = "site"  # as the source calls the column
    column = find_last_option_value("--data.partition.column", argv) or config_values.get("data.partition.column")
    if site is None and column is None:
        if {"-h", "--help"} & set(argv):
            return {"data.partition.name": "natural"}
        for name in (word.partition("=")[0] for word in argv):
            field = re.sub("^-+(data[-.])?", "", name)
            is_known = field in ("site", "target") and f"data.{field}" in fields
            if is_known and name.startswith("-") and name != f"--data.{field}":
                raise UserError(f"unknown option {name}; did you mean --data.{field}?")
        values = {
            key: find_last_option_value(f"--data.{key}", argv) or config_values.get(f"data.{key}")
            for key in ("path", "target", "delimiter", "encoding")
        }
        target = "" if values["target"] else ", and --data.target with the column to predict"
        columns = describe_columns_of_table(values) if "data.target" in fields else ""
        raise UserError(
            f"give --data.site with the column that says which client a row belongs to{target if columns else ''}; or, to "
            "divide rows among simulated clients, a partition such as --data.partition iid --data.clients 4"
            f"{f'; {columns}' if columns else ''}"
        )
    return {"data.partition.name": "natural", "data.partition.column": column or site}
