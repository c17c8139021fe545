"""Finds what a word of the command line means: a field without its section, or a method that is a baseline of a recipe."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyfed.cli.commands.argv import option_name
from polyfed.core.errors import did_you_mean
from polyfed.core.io.values.keyword_names import OTHER_NAMES


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
