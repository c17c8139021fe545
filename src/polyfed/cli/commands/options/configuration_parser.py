"""Merges the command line's options and a YAML configuration into one complete configuration, with values of the
declared types.

A configuration is a nested mapping. The sections `data`, `data.partition`, `model` and `algorithm` each name a choice
from a registry (`name`) and hold the fields of that choice; everything else are the fields of `Settings`. The options of
the command line are the same fields, with dots: `--algorithm fedprox --algorithm.mu 0.1`.
"""

import inspect
import re
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, final, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse

from polyfed.cli.commands.argv import (
    has_help_flag,
    list_user_code_and_ray_address,
    option_name,
    put_metric_names_in_brackets,
)
from polyfed.cli.commands.options.option_hints import (
    build_changes_to_run_baseline,
    describe_unknown_key,
)
from polyfed.cli.commands.options.option_types import as_plain_mappings, rewrite_parser_error, type_on_command_line
from polyfed.cli.commands.options.site_options import (
    find_last_option_value,
    networks_by_site,
    parse_networks_by_site,
    partition_options_of_site_column,
)
from polyfed.cli.commands.short_help import find_help_group_title
from polyfed.cli.static_registry import ALGORITHMS, MODELS, PARTITIONS, SOURCES, read_value_or_outline_without_import
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.trusted_code import import_trusted_callable, trust_code
from polyfed.simulation.settings import Settings

DEFAULTS = {"data": "digits", "data.partition": "dirichlet", "model": "mlp", "algorithm": "fedavg"}
_REGISTRIES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "data": SOURCES, "data.partition": PARTITIONS, "model": MODELS, "algorithm": ALGORITHMS,
}  # fmt: skip
_KIND_OF_SECTION = {"data": "source", "data.partition": "partition", "model": "network", "algorithm": "method"}
_LISTED = dict(zip(_REGISTRIES, map("polyfed list {}".format, ("data", "data", "models", "algorithms")), strict=True))
_FROM_DATA = frozenset({"input_shape", "num_classes"})  # arguments of a network that the data decide
_EXTRA_OPTIONS: Mapping[str, tuple[Any, Any, str]] = {  # keys that belong to no class: type, default, help
    "data.shifts": (list[dict[str, float]], [], "shift of each client in turn, e.g. [{rotation: 0}, {rotation: 90}]"),
    "data.augment": (bool, False, "pad, crop and flip training images at random"),
    "loss": (
        str | None,
        None,
        "what training minimises, as module:name: a function of outputs and targets, or a class without arguments",
    ),
    "baselines": (
        list[str | dict[str, Any]],
        [],
        "methods to run as well, with the same clients, rounds and local training: names, or mappings of which the fields "
        "win over that, e.g. [local, {name: fedprox, mu: 0.1}]",
    ),
}


@final
@dataclass(frozen=True)
class Option:
    """Describes one option of the command line: its key, type, default, help text, and whether it is required."""

    key: str
    type: Any
    default: Any
    required: bool
    help: str


_parse_docstring = cache(parse)  # tries each style, and base classes of methods come again and again


def options_of(choice: Callable[..., Any], section: str) -> list[Option]:
    """Returns an `Option` per field or constructor argument, with help texts from docstrings.

    >>> [option.key for option in options_of(MODELS["mlp"], "model")]
    ['model.hidden']
    """
    hints = get_type_hints(choice.__init__ if inspect.isclass(choice) else choice)
    docs: dict[str, str] = {}
    for owner in reversed(inspect.getmro(choice)) if inspect.isclass(choice) else (choice,):
        for entry in _parse_docstring(owner.__doc__ or "").params:
            docs |= {name.strip(): " ".join((entry.description or "").split()) for name in entry.arg_name.split(",")}
    prefix = f"{section}." if section else ""
    return [
        Option(
            prefix + p.name, type_on_command_line(hints.get(p.name, Any)),
            None if p.default is p.empty else p.default, p.default is p.empty, docs.get(p.name, "").replace("%", "%%"),
        )
        for p in inspect.signature(choice).parameters.values()
        if p.name not in _FROM_DATA and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]  # fmt: skip


def parse_configuration(
    arguments: Sequence[str],
    config: Mapping[str, Any],
    program: str,
    is_offered: Callable[[str], bool] = lambda key: True,
    command_options: Sequence[str] = (),
) -> dict[str, Any]:
    """Parses options, which replace values of `config`; returns all values, with defaults.

    Args:
        arguments: options, e.g. ["--rounds", "5", "--algorithm", "fedprox"].
        config: what a recipe or file says; options win over it, and it wins over the defaults of the classes.
        program: how usage texts call this command.
        is_offered: which keys a command takes, of a part of a configuration; what else `config` says is left out.
        command_options: options of the command itself, which the hint for an unknown option names, too.

    Raises:
        UserError: an unknown name, option or key (with the nearest choices), or a value of the wrong type.
        SystemExit: after `--help` or `--print-config`.

    >>> parse_configuration(["--algorithm", "fedprox", "--algorithm.mu", "1"], {}, "polyfed run")["algorithm"]["mu"]
    1.0
    """
    networks = networks_by_site(config.get("model"))
    config = config if networks is None else {**config, "model": "mlp"}  # put back below
    config_values = {key: value for key, value in _flatten_configuration(config).items() if is_offered(key)}
    if isinstance(config_values.get("metrics"), str):
        config_values["metrics"] = config_values["metrics"].split(",")
    argv = put_metric_names_in_brackets(_normalize_options(arguments))
    print_config = "--print_config" in argv
    if valued_flags := [word for word in argv if word.startswith("--print_config=")]:
        raise UserError(f"--print-config takes no value, got {valued_flags[0]!r}")
    argv = [word for word in argv if word != "--print_config"]
    if code_names := list_user_code_and_ray_address(argv):
        trust_code(*code_names)
    names_by_option = {section: find_last_option_value(f"--{section}.name", argv) for section in DEFAULTS}
    if names_by_option["model"] is not None:
        networks = parse_networks_by_site(names_by_option["model"])
    if networks is not None:
        names_by_option["model"], argv = None, _drop_model_choice(argv)
        config_values = {key: value for key, value in config_values.items() if not key.startswith("model.")}
    promoted = build_changes_to_run_baseline(config_values, names_by_option["algorithm"], argv)
    config_values = _drop_replaced_choices(config_values, names_by_option) | promoted
    names = {
        s: _validate_choice(s, names_by_option[s] or config_values.get(f"{s}.name", default))
        for s, default in DEFAULTS.items()
    }
    if is_offered("data.partition.name"):
        source_fields = {o.key: o.default for o in options_of(_class_of_choice("data", names["data"]), "data")}
        partition_name = names_by_option["data.partition"] or config_values.get("data.partition.name")
        try:
            implied = partition_options_of_site_column(source_fields, config_values, argv, partition_name)
        except UserError:  # an unknown option may be the reason that there is no column of the site
            options = _all_options(names | {"data.partition": partition_name or "natural"}, with_model=True)
            _check_keys_are_known({option.key: option for option in options}, config_values, argv, command_options)
            raise
        names["data.partition"] = implied.pop("data.partition.name", names["data.partition"])
        config_values |= implied
    mixture = config_values.pop("model", None)
    if "," in names["model"]:
        mixture, argv = names["model"].split(","), _drop_model_choice(argv)
    single_network = mixture is None and networks is None
    options = [option for option in _all_options(names, with_model=single_network) if is_offered(option.key)]
    resolved = _parse_values(options, config_values, argv, program, command_options)
    if mixture is not None:
        resolved["model"] = [_complete_model(entry, program) for entry in mixture]
    if networks is not None:
        resolved["model"] = {site: _complete_model(entry, program) for site, entry in networks.items()}
    if "baselines" in resolved:
        resolved["baselines"] = [_complete_baseline(entry, program) for entry in resolved["baselines"]]
    if print_config:
        print(yaml.safe_dump(as_plain_mappings(resolved), sort_keys=False, allow_unicode=True), end="")
        raise SystemExit(0)
    return resolved


def _drop_model_choice(argv: Sequence[str]) -> list[str]:
    """Returns the words without the option that chooses a network."""
    remaining = [w for w, before in zip(argv, ["", *argv], strict=False) if "--model.name" not in (w, before)]
    return [word for word in remaining if not word.startswith("--model.name=")]


def _all_options(names: Mapping[str, str], *, with_model: bool) -> list[Option]:
    options = [*options_of(Settings, "")]
    for section, registry in _REGISTRIES.items():
        if section == "model" and not with_model:
            continue
        name = names[section]
        text = "a network of the zoo, several separated by commas, or module:factory" if section == "model" else ""
        options.append(Option(f"{section}.name", str, name, False, text or f"one of {', '.join(registry)}"))
        options += options_of(_class_of_choice(section, name), section)
        if section == "data":
            options += options_of(_split_class(), "data")
    return options + [Option(key, kind, value, False, text) for key, (kind, value, text) in _EXTRA_OPTIONS.items()]


def _split_class() -> Any:
    return read_value_or_outline_without_import("polyfed.data.partitioning.split", "Split")


def _class_of_choice(section: str, name: str) -> Callable[..., Any]:
    """Returns the class of a choice: an outline of a registry's entry, or the user's own class, which is imported."""
    if name in _REGISTRIES[section]:
        return _REGISTRIES[section][name]
    choice, kind = import_trusted_callable(name, _KIND_OF_SECTION[section]), _KIND_OF_SECTION[section]
    if section != "model" and not inspect.isclass(choice):
        raise UserError(f"{kind} {name!r}: it must be a dataclass on {kind.title()}, got {type(choice).__name__}")
    return choice


def _parse_values(
    options: Sequence[Option], config_values: Mapping[str, Any], argv: Sequence[str], program: str,
    command_options: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Parses all options' values; the configuration's come first, so that both are checked alike."""
    option_by_key = {option.key: option for option in options}
    _check_keys_are_known(option_by_key, config_values, argv, command_options)
    from jsonargparse import ArgumentError, ArgumentParser  # which takes as long as all before

    about = "Options of the choices made; choose others (--model NAME ...) to see theirs; --print-config shows all."
    parser = ArgumentParser(prog=program, usage=SUPPRESS, exit_on_error=False, description=about)
    is_help = has_help_flag(argv)
    given_keys = {word.partition("=")[0].removeprefix("--").rstrip("+") for word in argv if word.startswith("--")}
    given_keys |= config_values.keys() | {key.rpartition(".")[0] for key in given_keys}  # an entry gives its mapping
    groups: dict[str, Any] = {}
    for option in options:
        if is_help and (title := find_help_group_title(option.key)) not in groups:
            groups[title] = parser.add_argument_group(title)
        place = groups[find_help_group_title(option.key)] if is_help else parser
        if is_help or option.required or option.key in given_keys:  # the others' defaults need no check
            place.add_argument(f"--{option.key}", type=option.type, default=option.default, required=option.required,
                               help=option.help or None)  # fmt: skip
    if is_help:
        print(re.sub(r"(?<!\S)--[\w.]+", lambda match: option_name(match[0]), parser.format_help()), end="")
        raise SystemExit(0)
    try:
        parsed = parser.parse_args([*(f"--{key}={_as_text(value)}" for key, value in config_values.items()), *argv])
    except (ArgumentError, TypeError, ValueError, KeyError) as error:
        raise UserError(
            rewrite_parser_error(str(error), {key: option.type for key, option in option_by_key.items()})
        ) from error
    values: dict[str, Any] = {}
    for option in options:
        section = values
        *path, field = option.key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[field] = parsed[option.key] if option.key in parsed else deepcopy(option.default)
    return values


def _check_keys_are_known(
    option_by_key: Mapping[str, Option], config_values: Mapping[str, Any], argv: Sequence[str],
    command_options: Sequence[str],
) -> None:  # fmt: skip
    """Raises a `UserError` that names the nearest choices if a key of the file or an option is none of the choices made."""
    option_defaults = {key: option.default for key, option in option_by_key.items()}
    if unknown := sorted(config_values.keys() - option_by_key):
        raise UserError(f"unknown key {describe_unknown_key(unknown[0], option_defaults, _choices_with)}")
    for word in argv:
        key = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and key != "help" and not _is_option_or_entry(key.rstrip("+"), option_by_key):
            names_data = "data.name" in config_values or find_last_option_value("--data.name", argv) is not None
            hint = describe_unknown_key(
                key, option_defaults, _choices_with, "--", command_options, names_data=names_data
            )
            raise UserError(f"unknown option {hint}")


def _is_option_or_entry(key: str, option_by_key: Mapping[str, Option]) -> bool:
    """Returns whether a key is an option, or an entry of an option that is a mapping, such as `algorithm.teacher.name`."""
    owner = option_by_key.get(key.rpartition(".")[0])
    return key in option_by_key or (owner is not None and _is_mapping(owner.type))


def _is_mapping(kind: Any) -> bool:
    return any(get_origin(part) in (dict, Mapping) for part in (kind, *get_args(kind)))


def _choices_with(section: str, key: str) -> list[str]:
    return [n for n, c in _REGISTRIES[section].items() if key in {option.key for option in options_of(c, section)}]


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return str(text).split("\n...")[0].strip()


def _normalize_options(arguments: Sequence[str]) -> list[str]:
    """Expands `--algorithm fedprox` to `--algorithm.name fedprox`, and `--ray-address` to `--ray_address`.

    >>> _normalize_options(["--algorithm=fedavg", "--evaluate-every", "2"])
    ['--algorithm.name=fedavg', '--evaluate_every', '2']
    """
    argv = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            option = f"--{option[2:].replace('-', '_')}"
        long = f"{option}.name" if option.removeprefix("--") in _REGISTRIES else option
        argv.append(long + equals + value)
    return argv


def _flatten_configuration(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Joins keys of sections by dots; a text is short for a section's name, other mappings are values.

    >>> _flatten_configuration({"rounds": 3, "algorithm": "fedprox", "data": {"partition": {"alpha": 0.1}}})
    {'rounds': 3, 'algorithm.name': 'fedprox', 'data.partition.alpha': 0.1}
    >>> _flatten_configuration({"algorithm": {"name": "fedavg_kd", "teacher": {"name": "mlp"}}})
    {'algorithm.name': 'fedavg_kd', 'algorithm.teacher': {'name': 'mlp'}}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name in _REGISTRIES:
            flat |= _flatten_configuration(value, f"{name}.")
        elif name in _REGISTRIES and not (isinstance(value, str) or (name == "model" and isinstance(value, list))):
            raise UserError(f"{name} must be a name, or a mapping with a name, got {value!r}")
        else:
            flat[f"{name}.name" if name in _REGISTRIES and isinstance(value, str) else name] = value
    return flat


def _validate_choice(section: str, name: Any) -> str:
    """Returns the name of a choice if there is such a choice, and raises a `UserError` otherwise."""
    for part in str(name).split(",") if section == "model" else [str(name)]:
        if part not in _REGISTRIES[section] and ":" not in part:
            raise UserError(f"unknown {section} {part!r}; {did_you_mean(part, _REGISTRIES[section], _LISTED[section])}")
    return str(name)


def _drop_replaced_choices(config_values: Mapping[str, Any], choices: Mapping[str, str | None]) -> dict[str, Any]:
    """Removes from a configuration the fields of choices that the command line replaces; local training and split stay."""
    training = read_value_or_outline_without_import("polyfed.core.training.config", "LocalTraining")
    shared = {
        "algorithm": {f.name for f in fields(training)} - {"buffers"},
        "data": {f.name for f in fields(_split_class())},
    }
    remaining = dict(config_values)
    for section, name in choices.items():
        mixture = section in config_values  # `model` as a list, which any name replaces
        if name is None or (not mixture and name == config_values.get(f"{section}.name", DEFAULTS[section])):
            continue
        remaining.pop(section, None)
        for key in config_values:
            owner, _, field = key.rpartition(".")
            if owner == section and field not in shared.get(section, set()):
                remaining.pop(key)
    return remaining


def _complete_model(entry: Any, program: str) -> dict[str, Any]:
    """Completes the fields of one network of a mixture."""
    entry = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise UserError(f"each entry of `model` is a name or a mapping with a name, got {entry!r}")
    config_values = _flatten_configuration({"model": dict(entry)})
    name = _validate_choice("model", config_values["model.name"])
    options = [Option("model.name", str, name, False, "")]
    options += options_of(_class_of_choice("model", name), "model")
    model: dict[str, Any] = _parse_values(options, config_values, [], program)["model"]
    return model


def _complete_baseline(entry: Any, program: str) -> Any:
    """Completes a baseline given by its name, or by a mapping of some fields, in the types that the method declares."""
    if isinstance(entry, str):
        return _validate_choice("algorithm", entry)
    if "name" not in entry:
        raise UserError(f"each entry of `baselines` is a name or a mapping with a name, got {entry!r}")
    config_values = _flatten_configuration({"algorithm": entry})
    name = _validate_choice("algorithm", config_values["algorithm.name"])
    options = [Option("algorithm.name", str, name, False, "")]
    options += options_of(_class_of_choice("algorithm", name), "algorithm")
    try:
        typed = _parse_values(options, config_values, [], program)["algorithm"]
    except UserError as error:
        raise UserError(f"baseline {name}: {error}") from error
    return {field: typed[field] for field in entry}
