"""Finds what a word of the command line means: a field without its section, or a method that is a baseline of a recipe."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from polyfed.cli.commands.argv import option_name
from polyfed.cli.static_registry import SOURCES
from polyfed.core.errors import did_you_mean
from polyfed.core.io.values.keyword_names import OTHER_NAMES

_SECTIONS = ("algorithm", "data", "data.partition", "model")
_ROLES_OF_COLUMNS = {
    "label": "target", "labels": "target", "outcome": "target", "class": "target", "y": "target",
    "duration": "target and --data.event", "followup": "target and --data.event", "status": "event", "died": "event",
    "hospital": "site", "clinic": "site", "centre": "site", "center": "site", "institution": "site",
    "patient": "group", "subject": "group", "person": "group", "id": "group", "groups": "group",
    "visit": "time or --data.group", "date": "time", "year": "time",
    "features": "columns", "ignore": "drop", "exclude": "drop", "na": "missing", "sep": "delimiter",
}  # fmt: skip
"""What a column of a table is called elsewhere -> the option of a table that takes it, for suggestions."""


def describe_unknown_key(
    key: str, defaults: Mapping[str, Any], choices_with: Callable[[str, str], Sequence[str]], prefix: str = "",
    command_options: Sequence[str] = (), *, names_data: bool = True,
) -> str:  # fmt: skip
    """Returns an unknown key, and a hint: other choices that have it, or similar keys.

    Args:
        key: its name, with its section.
        defaults: {key of an option of the choices made: its default, which of a section's name is the choice}.
        choices_with: from a section and a key to the choices of the section that have it.
        prefix: "--" on the command line; empty in a file.
        command_options: options of the command itself.
        names_data: whether the command line or the file chooses the data.

    >>> describe_unknown_key("data.hospital", {"data.name": "table", "data.site": None}, lambda section, key: [], "--")
    "--data.hospital; table has no 'hospital': did you mean --data.site?"
    """
    key_name = option_name(f"{prefix}{key}")
    section, _, field = key.rpartition(".")
    if section not in _SECTIONS or (section != "model" and f"{section}.name" not in defaults):
        other = OTHER_NAMES.get(key, key)
        hint = None if section else suggest_section_for_field(other, defaults, choices_with, prefix)
        return f"{key_name}; {hint or suggest_option(key, defaults, prefix, command_options)}"
    if f"{section}.name" not in defaults:
        return f"{key_name}; a mixture of networks takes its fields from a YAML file, where `model` is a list"
    name, others = defaults[f"{section}.name"], choices_with(section, key)
    section_fields = {k.rpartition(".")[2] for k in defaults if k.rpartition(".")[0] == section}
    if section == "data" and field != "path":
        role = _ROLES_OF_COLUMNS.get(field.replace("_", ""))
        if name == "table" and role:
            return f"{key_name}; table has no {field!r}: did you mean {option_name(f'{prefix}data.{role}')}?"
        if not names_data:
            return f"{key_name}; {_ask_for_data(field, role, name, section_fields, others, prefix)}"
        if "table" in others:
            return (
                f"{key_name}; {name} has no {field!r}, since its columns are known; for a file of your own give --data "
                "table --data.path FILE"
            )
    if others:
        example = f"--{section} {others[0]}" if prefix else f"{section}: {{name: {others[0]}}}"
        verb = "have" if others[1:] else "has"
        return f"{key_name}; {name} has no {field!r}, but {', '.join(others)} {verb}: give {example}, for example"
    return f"{key_name}; {name} has no {field!r}: {did_you_mean(field, section_fields)}"


def _ask_for_data(
    field: str, role: str | None, default_data: str, own_fields: Collection[str], owners: Sequence[str], prefix: str
) -> str:
    """Returns the hint for a field of data where none are named: whose field it is, or the nearest one of a table."""
    table_fields = SOURCES["table"].__dataclass_fields__
    nearest = difflib.get_close_matches(field, sorted({*own_fields, *table_fields}), n=1)
    word = role or (nearest[0] if nearest else "")
    option = option_name(f"{prefix}data.{word}")
    if word in own_fields and not owners:
        return f"did you mean {option}?"
    meaning = f"did you mean {option}, an option of a table? No" if word else "it is an option of no data, and no"
    if owners:
        meaning = f"it is an option of {', '.join(owners)}, and no"
    return (
        f"{meaning} data are named ({default_data} is the default): name them first, as a file (FILE.csv --data.target "
        "COLUMN --data.site COLUMN) or with --data NAME (polyfed list data)"
    )


def suggest_section_for_field(
    field: str, keys: Iterable[str], choices_with: Callable[[str, str], Sequence[str]], prefix: str
) -> str | None:
    """Returns a hint for a field that was given without its section, such as `--lr`; None if no section has it.

    Args:
        field: its name.
        keys: of all options of the choices made.
        choices_with: from a section and a key to the choices of the section that have it.
        prefix: "--" on the command line; empty in a file.

    >>> suggest_section_for_field("lr", ["rounds", "algorithm.lr"], lambda section, key: [], "--")
    'did you mean --algorithm.lr?'
    >>> def choices_with(section, key): return ["fedprox"] if section == "algorithm" else []
    >>> suggest_section_for_field("mu", ["algorithm.name"], choices_with, "--")
    'fedprox has it: --algorithm fedprox --algorithm.mu VALUE'
    """
    if field == "name":
        return None
    if fitting := [key for key in keys if key.endswith(f".{field}")]:
        return f"did you mean {' or '.join(option_name(prefix + key) for key in fitting)}?"
    for section in ("algorithm", "data", "data.partition", "model"):
        names = choices_with(section, f"{section}.{field}") if f"{section}.name" in keys else ()
        if names:
            choice = "table" if "table" in names else names[0]
            example = f"--{section} {choice} {option_name(f'--{section}.{field}')} VALUE"
            return f"{', '.join(names)} {'have' if names[1:] else 'has'} it: {example}"
    return None


def suggest_option(key: str, keys: Iterable[str], prefix: str, command_options: Sequence[str] = ()) -> str:
    """Returns a hint for an unknown option or key of no section.

    Args:
        key: its name.
        keys: of all options of the choices made.
        prefix: "--" on the command line; empty in a file.
        command_options: options of the command itself.

    >>> suggest_option("method", ["rounds", "algorithm.lr"], "--", ["--algorithms"])
    'did you mean --algorithms?'
    >>> suggest_option("methods", ["rounds", "algorithm.lr"], ""), suggest_option("rund", ["rounds", "seed"], "--")
    ('did you mean algorithm?', 'did you mean --rounds? Choices: --rounds, --seed')
    """
    for name in keys:
        if "." in name and name.replace(".", "_") == key.replace("-", "_"):
            return f"did you mean {option_name(f'{prefix}{name}')}?"
    top = {option_name(f"{prefix}{name.partition('.')[0]}") for name in keys}
    choices = top.union(command_options)
    other = option_name(f"{prefix}{OTHER_NAMES.get(key, key)}")
    for name in (f"{other}s", other):
        if name in choices:
            return f"did you mean {name}?"
    nearest = difflib.get_close_matches(option_name(f"{prefix}{key}"), choices, n=1)
    listing = f"polyfed {'compare' if '--algorithms' in command_options else 'run'} --help-all"  # others have run's
    return did_you_mean(option_name(f"{prefix}{key}"), top if top.intersection(nearest) else choices, listing)


def describe_promotion(recipe_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns a note if the method of a run was a baseline of its recipe, and is no longer one; else "".

    >>> describe_promotion({"baselines": ["local", {"name": "fedprox"}]},
    ...                    {"algorithm": {"name": "fedprox"}, "baselines": ["local"]})
    'fedprox is the method of this run, and so no baseline'
    """
    before, now = (_baseline_names(part.get("baselines") or ()) for part in (recipe_config, config))
    name = config["algorithm"]["name"]
    return f"{name} is the method of this run, and so no baseline" if name in before and name not in now else ""


def describe_untuned_defaults(recipe_config: Mapping[str, Any], config: Mapping[str, Any], argv: Sequence[str]) -> str:
    """Returns a note on rounds and learning rate if neither the recipe nor the command line gives them; else "".

    >>> describe_untuned_defaults({"data": "heart"}, {"rounds": 10, "algorithm": {"lr": 0.01}}, ["--rounds", "10"])
    'learning rate 0.01 is a default, untuned for these data: --algorithm.lr; polyfed compare searches it'
    """
    words = {word.partition("=")[0] for word in argv}
    algorithm = recipe_config.get("algorithm")
    values, options = [], []
    if "rounds" not in recipe_config and "--rounds" not in words:
        values, options = [f"{config['rounds']} rounds"], ["--rounds"]
    has_rate = isinstance(algorithm, Mapping) and "lr" in algorithm
    if not has_rate and "--algorithm.lr" not in words and "lr" in config["algorithm"]:
        values.append(f"learning rate {config['algorithm']['lr']}")
        options.append("--algorithm.lr")
    if not values:
        return ""
    verb = "are defaults" if "--rounds" in options else "is a default"
    searched = (
        "; polyfed compare searches it" if options == ["--algorithm.lr"] else "; polyfed compare searches the rate"
    )
    return f"{' and '.join(values)} {verb}, untuned for these data: {', '.join(options)}{searched}"


def _baseline_names(baselines: Iterable[Any]) -> list[Any]:
    return [entry.get("name") if isinstance(entry, Mapping) else entry for entry in baselines]


def build_changes_to_run_baseline(
    config_values: Mapping[str, Any], algorithm: str | None, argv: Sequence[str]
) -> dict[str, Any]:
    """Returns the changes to a configuration whose baseline `algorithm` becomes the method of the run.

    It keeps the fields that it has among the baselines, and is no longer one of them. The changes are empty where the
    configuration has no such baseline, or the command line gives the baselines.

    >>> build_changes_to_run_baseline({"baselines": ["local", {"name": "fedprox", "mu": 1}]}, "fedprox", [])
    {'baselines': ['local'], 'algorithm.mu': 1}
    """
    baselines = config_values.get("baselines")
    is_given = any(word.partition("=")[0].rstrip("+") == "--baselines" for word in argv)
    if algorithm in (None, config_values.get("algorithm.name")) or is_given or not isinstance(baselines, list):
        return {}
    names = _baseline_names(baselines)
    if names.count(algorithm) != 1:
        return {}
    entry = baselines[names.index(algorithm)]
    fields = entry if isinstance(entry, Mapping) else {}
    return {
        "baselines": [other for other, name in zip(baselines, names, strict=True) if name != algorithm],
        **{f"algorithm.{field}": value for field, value in fields.items() if field != "name"},
    }
