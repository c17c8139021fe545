"""Implements `polyfed list`: prints the available methods, data sets, networks and recipes."""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Required, TypedDict

from rich.console import Console

from polyfed.cli.commands.options.configuration_parser import options_of
from polyfed.cli.commands.options.recipes import read_recipe, shipped_recipe_files
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.cli.static_registry import ALGORITHMS, MODELS, PARTITIONS, SOURCES
from polyfed.core.errors import UserError, did_you_mean

_KINDS = ("algorithms", "data", "models", "recipes")
_SYNONYMS = {"methods": "algorithms", "networks": "models"}
_LOG_WIDTH = 1000


class ListedChoices(TypedDict, total=False):
    """Describes what `polyfed list --json` prints: the kinds that were asked for, each a list of choices."""

    format: Required[int]
    algorithms: list[dict[str, Any]]
    """`name`, `family`, `summary`, and the words that it `requires` and `discloses`."""
    data: list[dict[str, Any]]
    """`name` and `summary`, as of `partitions` and `models`."""
    partitions: list[dict[str, Any]]
    models: list[dict[str, Any]]
    recipes: list[dict[str, Any]]
    """`name`, `summary`, `scales` and `variants`."""


def describe_choices(kinds: Sequence[str]) -> ListedChoices:
    """Returns the choices of the given kinds, or of all; where methods are named, these alone.

    Raises:
        UserError: an unknown kind.
    """
    kinds, method_names = _split_kinds_and_methods(kinds)
    choices: ListedChoices = {"format": 1}
    if not kinds or "algorithms" in kinds:
        choices["algorithms"] = [
            {
                "name": name, "family": title.partition(": ")[2], "summary": method.card.summary,
                "requires": sorted(method.requires), "discloses": sorted(method.discloses),
            }
            for title, methods in _methods_by_family().items()
            for name, method in methods.items()
            if name in method_names or not method_names
        ]  # fmt: skip
    if not kinds or "data" in kinds:
        choices["data"], choices["partitions"] = _names_and_summaries(SOURCES), _names_and_summaries(PARTITIONS)
    if not kinds or "models" in kinds:
        choices["models"] = _names_and_summaries(MODELS)
    if not kinds or "recipes" in kinds:
        all_recipes = map(read_recipe, shipped_recipe_files())
        choices["recipes"] = [
            {"name": r.name, "summary": r.description, "scales": list(r.scales), "variants": list(r.variants)}
            for r in all_recipes
        ]
    return choices


def _names_and_summaries(registry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "summary": first_docstring_sentence(thing)} for name, thing in registry.items()]


def _split_kinds_and_methods(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the kinds among the words, and the methods; raises a `UserError` for another word."""
    kinds = [_SYNONYMS.get(word, word) for word in words if word not in ALGORITHMS]
    methods = [word for word in words if word in ALGORITHMS]
    for kind in kinds:
        if kind not in _KINDS:
            choices = ALGORITHMS if get_close_matches(kind, ALGORITHMS, cutoff=0.8) else _KINDS
            raise UserError(f"cannot list {kind!r}; {did_you_mean(kind, choices, 'polyfed list algorithms')}")
    return kinds or (["algorithms"] if methods else []), methods


def show_choices(kinds: Sequence[str], console: Console | None = None) -> None:
    """Prints an overview of all methods, data sets, networks and recipes, the details of kinds, or the cards of methods.

    Raises:
        UserError: an unknown kind.
    """
    details = {
        "algorithms": _algorithm_tables,
        "data": _data_tables,
        "models": _model_tables,
        "recipes": _recipe_tables,
    }
    kinds, method_names = _split_kinds_and_methods(kinds)
    if console is None:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:  # `polyfed list | grep` reads whole lines
            console = Console(width=_LOG_WIDTH)
    for name in method_names:
        _print_card(name, console)
    if method_names:
        return
    for table in [table for kind in kinds for table in details[kind]()] if kinds else [_build_overview()]:
        console.print(table)
    if not kinds:
        print_line(console, f"What each is: polyfed list {'|'.join(details)}, or a method's name", style="cyan")


def _print_card(name: str, console: Console) -> None:
    """Prints what a method does, its paper, what it needs and discloses, and its fields with their defaults."""
    method = ALGORITHMS[name]
    shared = {field.name for base in method.__mro__ if base.__name__ == "LocalTraining" for field in fields(base)}
    paper = f" ({method.card.paper})" if method.card.paper else ""
    print_line(console, f"{name}: {method.card.summary}{paper}", style="bold")
    print_line(console, _needs_and_discloses(method))
    options = {option.key.partition(".")[2]: option for option in options_of(method, "algorithm")}
    own_fields = [[key, f"{o.default}", o.help.replace("%%", "%")] for key, o in options.items() if key not in shared]
    if own_fields:
        console.print(_build_table("", ("field", "default", ""), own_fields))
    if trained := [f"{key} {option.default}" for key, option in options.items() if key in shared]:
        print_line(console, f"local training: {', '.join(trained)}")
    print_line(console, f"More: polyfed run --algorithm {name} --help", style="cyan")


def first_docstring_sentence(thing: Any) -> str:
    """Returns the first sentence of an object's docstring as one line of text.

    >>> first_docstring_sentence(ALGORITHMS["local"])
    "Trains each client's network..."
    >>> def method(): "Weights, e.g. by Adam (eq. 3 of Smith et al. 2020; cf. Fig. 2). And more."
    >>> first_docstring_sentence(method)
    'Weights, e.g. by Adam (eq. 3 of Smith et al. 2020; cf. Fig. 2).'
    """
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    for stop in re.finditer(r"\. ", text):
        last = re.split(r"[\s(\[]", text[: stop.start()])[-1]
        if last.lower() not in _ABBREVIATIONS:
            return text[: stop.start() + 1]
    return text.rstrip(".") + "."


_ABBREVIATIONS = frozenset({"al", "app", "cf", "e.g", "eq", "eqs", "fig", "figs", "i.e", "resp", "sec", "tab", "vs"})


def _build_overview() -> PlainTable:
    """Returns a table of all names: methods by family, recipes by paper."""
    groups = {title.partition(": ")[2]: list(methods) for title, methods in _methods_by_family().items()}
    recipe_groups: dict[str, list[str]] = {}
    for name in shipped_recipe_files():
        recipe_groups.setdefault(name.split("_")[0], []).append(name)
    single_names = [names[0] for names in recipe_groups.values() if len(names) == 1]
    groups |= {"data": list(SOURCES), "partitions": list(PARTITIONS), "models": list(MODELS), "recipes": single_names}
    groups |= {f"of {paper}": names for paper, names in recipe_groups.items() if len(names) > 1}
    table = PlainTable(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    table.add_row("methods", "by family")
    for title, names in groups.items():
        if title in ("data", "models", "recipes"):
            table.add_row("", "")
        table.add_row(f"{'  ' if names[0] in ALGORITHMS else ''}{title.replace('_', ' ')}", " ".join(names))
    return table


def _methods_by_family() -> dict[str, dict[str, Any]]:
    """Returns the methods by the title of their family, which is the folder of their files."""
    families: dict[str, dict[str, Any]] = {}
    for name, method in ALGORITHMS.items():
        families.setdefault(f"algorithms: {method.__module__.split('.')[2]}", {})[name] = method
    return families


def _build_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> PlainTable:
    table = PlainTable(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*row)
    return table


def _algorithm_tables() -> list[PlainTable]:
    """Returns a table of methods, with what they require and disclose, for each kind of clients' networks."""
    groups: dict[str, dict[str, Any]] = {title: {} for title in _GROUPS.values()}
    for family, methods in _methods_by_family().items():
        for name, method in methods.items():
            key = "nas" if family.endswith("nas") else "one" if "one_architecture" in method.requires else "any"
            groups[_GROUPS[key]][name] = method
    tables = []
    for title, methods in groups.items():
        table = PlainTable(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for name in sorted(methods):
            method = methods[name]
            table.add_row(name, method.card.summary)
            table.add_row("", _needs_and_discloses(method), style="dim")
        tables.append(table)
    return tables


_GROUPS = {
    "one": "methods for one architecture",
    "any": "methods for different architectures (and for one)",
    "nas": "methods that search for an architecture",
}


def _needs_and_discloses(method: Any) -> str:
    """Describes in words what a method requires of the clients, and what it discloses to the server."""
    needs = sorted(word for word in method.requires - {"model", "one_architecture"})
    parts = [f"needs {_join_words(needs)}"] if needs else []
    return "; ".join([*parts, f"discloses {_join_words(sorted(method.discloses)) or 'nothing'}"])


def _join_words(words: Sequence[str]) -> str:
    return ", ".join(word.replace("_", " ") for word in words)


def _data_tables() -> list[PlainTable]:
    return [_registry_table("data", SOURCES), _registry_table("partitions", PARTITIONS)]


def _model_tables() -> list[PlainTable]:
    return [_registry_table("models", MODELS)]


def _registry_table(title: str, registry: Mapping[str, Any]) -> PlainTable:
    return _build_table(
        title, ("name", ""), [[name, first_docstring_sentence(thing)] for name, thing in registry.items()]
    )


def _recipe_tables() -> list[PlainTable]:
    """Returns a table of the recipes, with scales and variants, and one of what the scales reduce."""
    all_recipes = [read_recipe(name) for name in shipped_recipe_files()]
    table = _build_table("recipes", ("name", ""), [])
    for recipe in all_recipes:
        table.add_row(recipe.name, recipe.description)
        for option, choices in (("--scale", recipe.scales), ("--variant", recipe.variants)):
            if choices:
                table.add_row("", f"{option}: {', '.join(choices)}", style="dim")
    reduced = [
        [r.name, scale, r.reduction_note(scale)] for r in all_recipes for scale in r.scales if r.reduction_note(scale)
    ]
    reductions = _build_table("what the scales reduce against the paper", ("name", "scale", ""), reduced)
    return [table, reductions] if reduced else [table]
