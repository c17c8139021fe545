"""`polyfed list`: the methods, data sets, networks and recipes that there are, from their own docstrings."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from polyfed.algorithms import REGISTRY
from polyfed.commands.recipes import read, recipes
from polyfed.data import PARTITIONS, SOURCES
from polyfed.errors import UserError, nearest
from polyfed.models import MODELS


def show(kinds: Sequence[str], console: Console | None = None) -> None:
    """Prints tables of the kinds asked for, all by default.

    Raises:
        UserError: an unknown kind.
    """
    tables = {"algorithms": _algorithms, "data": _data, "models": _models, "recipes": _recipes}
    for kind in kinds:
        if kind not in tables:
            raise UserError(f"cannot list {kind!r}; {nearest(kind, tables)}")
    console = console or Console()
    for kind in kinds or tables:
        for table in tables[kind]():
            console.print(table)


def summary(thing: Any) -> str:
    """The first sentence of a docstring, on one line.

    >>> summary(REGISTRY["local"])
    'Each client alone, with any architecture.'
    """
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<!et al)\. ", text)[0].rstrip(".") + "."


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*row)
    return table


def _algorithms() -> list[Table]:
    rows = [
        [
            name,
            ", ".join(sorted(method.requires - {"model"})) or "any architectures",
            ", ".join(sorted(method.discloses)) or "nothing",
            summary(method),
        ]
        for name, method in REGISTRY.items()
    ]
    return [_table("algorithms", ("name", "requires", "discloses", ""), rows)]


def _data() -> list[Table]:
    return [_documented("data", SOURCES), _documented("partitions", PARTITIONS)]


def _models() -> list[Table]:
    return [_documented("models", MODELS)]


def _documented(title: str, registry: Mapping[str, Any]) -> Table:
    return _table(title, ("name", ""), [[name, summary(thing)] for name, thing in registry.items()])


def _recipes() -> list[Table]:
    found = [read(name) for name in recipes()]
    rows = [[r.name, r.description, ", ".join(r.scales) or "–", ", ".join(r.variants) or "–"] for r in found]
    tables = [_table("recipes", ("name", "", "scales (--scale)", "variants (--variant)"), rows)]
    reduced = [[r.name, scale, r.reduced(scale)] for r in found for scale in r.scales if r.reduced(scale)]
    if reduced:
        tables.append(_table("what the scales reduce against the paper", ("name", "scale", ""), reduced))
    return tables
