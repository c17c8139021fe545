"""Describes in words which values an option accepts, for error messages."""

import inspect
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from polyfed.cli.commands.argv import option_name
from polyfed.core.io.values.validation import describe_annotation

_LISTS: Mapping[Any, str] = {
    int: "[1, 2]",
    str: "[fc1, fc2]",
    str | dict[str, Any]: "[local, {name: fedprox, mu: 0.1}]",
    tuple[int, ...]: "[[0, 1], [2, 3]]",
}


def type_on_command_line(value_type: Any) -> Any:
    """Returns a field's type on the command line: a mapping of fields for `Privacy` and the like.

    >>> from polyfed.core.training.privacy.options import Privacy
    >>> type_on_command_line(Privacy | None), type_on_command_line(int | None)
    (collections.abc.Mapping[str, typing.Any] | None, int | None)
    """
    parts = get_args(value_type) if get_origin(value_type) in (Union, UnionType) else ()
    holds_options = any(inspect.isclass(part) and part.__module__.startswith("polyfed.") for part in parts)
    return Mapping[str, Any] | None if holds_options else value_type


def describe_type(value_type: Any) -> str:
    """Describes the values that an option accepts, such as "a whole number or null".

    >>> from typing import Literal
    >>> describe_type(int | None), describe_type(Literal["sgd", "adam"]), describe_type(tuple[int, ...])
    ('a whole number or null', 'sgd or adam', 'a list such as [1, 2]')
    >>> describe_type(tuple[tuple[int, ...], ...])
    'a list such as [[0, 1], [2, 3]]'
    """
    origin, inner = get_origin(value_type), get_args(value_type)
    if origin in (Union, UnionType):
        inner = tuple(part for part in inner if part is not int or float not in inner)
        return " or ".join(describe_type(part) for part in inner)
    if origin in (dict, Mapping):
        return "a mapping such as {name: mlp, hidden: [32]}"
    if origin in (list, tuple):
        return "a list such as " + _LISTS.get(inner[0], "[{rotation: 90}]")
    return describe_annotation(value_type)


def rewrite_parser_error(message: str, type_by_key: Mapping[str, Any]) -> str:
    """Rewrites jsonargparse's error as one sentence with the option and the value.

    >>> rewrite_parser_error("argument --rounds: expected one argument", {})
    '--rounds needs a value'
    >>> rewrite_parser_error('Parser key "algorithm.lr": Expected a number. Got value:', {})
    '--algorithm.lr needs a value'
    >>> rewrite_parser_error("unrecognized arguments: -x", {})
    'unknown option -x; --help lists those there are'
    """
    text = " ".join(message.split())
    if matched := re.match(r'Parser key "([^"]+)": .*(?:Got|Given) value: ?(.*)', text):
        key, value = matched.groups()
        if not value:
            return f"{option_name(f'--{key}')} needs a value"
        expected = describe_type(type_by_key[key]) if key in type_by_key else "of another type"
        return f"{option_name(f'--{key}')} must be {expected}, got {value!r}"
    if matched := re.match(r"argument --(\S+): expected one argument", text):
        return f"{option_name(f'--{matched[1]}')} needs a value"
    if matched := re.match(r"unrecognized arguments: (.*)", text, re.IGNORECASE):
        if matched[1].startswith("-"):
            return f"unknown option {matched[1].split()[0]}; --help lists those there are"
        return (
            f"unexpected argument {matched[1]!r}; options begin with --, and a recipe or config.yaml comes before them"
        )
    if matched := re.match(r"the following arguments are required: ([\w.]+)", text):
        return f"{option_name(f'--{matched[1]}')} is missing: give it a value"
    return text


def as_plain_mappings(value: Any) -> Any:
    """Returns a value with every mapping in it as a `dict`, which YAML can write.

    >>> from types import MappingProxyType
    >>> as_plain_mappings({"shared": MappingProxyType({"hidden": (16,)})})
    {'shared': {'hidden': (16,)}}
    """
    return {key: as_plain_mappings(item) for key, item in value.items()} if isinstance(value, Mapping) else value
