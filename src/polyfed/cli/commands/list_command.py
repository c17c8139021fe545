"""`polyfed list`: the methods, data sets, networks and recipes that there are, from their own docstrings."""

import inspect
import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from rich.console import Console

from polyfed.cli.commands.options.recipes import read_recipe, recipe_files
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.cli.static_registry import ALGORITHMS, MODELS, PARTITIONS, SOURCES
from polyfed.core.errors import UserError, did_you_mean


def show_choices(kinds: Sequence[str], console: Console | None = None) -> None:
    """Prints an overview of everything, or the details of the kinds asked for.

    Raises:
        UserError: an unknown kind.
    """
    details = {
        "algorithms": _algorithm_tables,
        "data": _data_tables,
        "models": _model_tables,
        "recipes": _recipe_tables,
    }
    for kind in kinds:
        if kind not in details:
            raise UserError(f"cannot list {kind!r}; {did_you_mean(kind, details)}")
    console = console or Console()
    for table in [table for kind in kinds for table in details[kind]()] if kinds else _overview_tables(console.width):
        console.print(table)
    if not kinds:
        more = ", ".join(f"polyfed list {kind}" for kind in details)
        print_line(console, f"More of each: {more}")


def first_sentence(thing: Any) -> str:
    """The first sentence of a docstring, on one line.

    >>> first_sentence(ALGORITHMS["local"])
    'Each client alone, with any architecture.'
    >>> def method(): "Weights, e.g. by Adam (eq. 3 of Smith et al. 2020; cf. Fig. 2). And more."
    >>> first_sentence(method)
    'Weights, e.g. by Adam (eq. 3 of Smith et al. 2020; cf. Fig. 2).'
    """
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    for stop in re.finditer(r"\. ", text):
        last = re.split(r"[\s(\[]", text[: stop.start()])[-1]
        if last.lower() not in _ABBREVIATIONS:
            return text[: stop.start() + 1]
    return text.rstrip(".") + "."


_ABBREVIATIONS = frozenset({"al", "app", "cf", "e.g", "eq", "eqs", "fig", "figs", "i.e", "resp", "sec", "tab", "vs"})
_SHORT_DESCRIPTIONS: Mapping[str, str] = {  # where the first sentence of the docstring is a formula, or long
    "fedavg": "The average of the clients' models, weighted by examples",
    "fedavg_ft": "FedAvg, then fine-tuning on the client's data",
    "fedprox": "FedAvg with a proximal term in the local loss",
    "fedrep": "A shared body, a head for each client",
    "fedbn": "FedAvg; norm layers stay with the client",
    "per_fedavg": "Meta-learning: a model that is good after one step",
    "pfedme": "Personal models near a global one, by Moreau envelopes",
    "pfedhn": "A hypernetwork on the server generates every client's weights",
    "fedfomo": "Each client mixes others' models that do well on its data",
    "fedavg_kd": "A teacher by FedAvg, distilled into each client's network",
    "flha_ghn": "A graph hypernetwork generates weights for any network",
    "fedhenn": "Networks learn to see public examples as the others do",
    "fedhenn_homo": "FedAvg whose clients see public examples as its model does",
    "pfedla": "Hypernetworks weigh every layer of every client",
    "heur_pfedla": "pFedLA; each client keeps its k most own layers",
    "feddsnas": "Search: one architecture for all, weights shared",
    "ca_feddsnas": "The same, with operations chosen for each image",
    "fedpnas": "Search of an architecture that each client adapts",
    "ca_fedpnas": "The same, with operations chosen for each image",
    "lg_fedavg": "A shared head, a body for each client",
    "fedproto": "Clients share each class's mean representation",
    "fedgh": "The server trains a head on class means",
    "fedtgp": "FedProto, with prototypes that the server trains",
    "fml": "Each client's network and a common one teach each other",
    "fedkd": "The same by how well each does, updates in low rank",
    "fd": "Clients share each class's mean output",
    "fedopt": "FedAvg with momentum, Adagrad, Adam or Yogi at the server",
    "ditto": "Personal models pulled to the global one beside them",
    "scaffold": "Control variates take the drift out of local steps",
    "feddyn": "A regulariser that makes the clients' optima agree",
    "moon": "FedAvg with a contrast of representations",
    "apfl": "A learnt mixture of a local model and the global one",
    "fedamp": "Each client is pulled to the models near to its own",
    "ifca": "k models; each client trains the one that suits it best",
    "fedala": "Each client learns what to take of the global model",
    "knn_per": "FedAvg mixed with votes of the client's own examples",
    "fedmd": "Networks learn their mean outputs on public examples",
    "feddf": "FedAvg by architecture, distilled on public examples",
    "heterofl": "Clients train corners of one model, of different widths",
    "fedpac": "A shared body, and heads mixed for each client",
}


def _overview_tables(width: int) -> list[PlainTable]:
    """Every name with a line of so many characters, of recipes the names alone, those of one paper together."""
    tables = []
    registries: Mapping[str, Mapping[str, Any]] = {
        "algorithms": ALGORITHMS,
        "data": SOURCES,
        "partitions": PARTITIONS,
        "models": MODELS,
    }
    for title, registry in registries.items():
        table = PlainTable(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        line_width = max(20, width - max(map(len, registry)) - 2)
        for name, thing in registry.items():
            table.add_row(
                name,
                shorten(
                    _SHORT_DESCRIPTIONS.get(name) or first_sentence(thing),
                    line_width,
                    placeholder=" …",
                    break_on_hyphens=False,
                ),
            )
        tables.append(table)
    groups: dict[str, list[str]] = {}
    for name in recipe_files():
        groups.setdefault(name.split("_")[0], []).append(name)
    single_names = [names[0] for names in groups.values() if len(names) == 1]
    recipes_table = PlainTable(title="recipes", title_justify="left", box=None, pad_edge=False, show_header=False)
    for names in [single_names, *(names for names in groups.values() if len(names) > 1)]:
        recipes_table.add_row("  ".join(names))
    return [*tables, recipes_table]


def _build_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> PlainTable:
    table = PlainTable(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*row)
    return table


def _algorithm_tables() -> list[PlainTable]:
    rows = [
        [
            name,
            ", ".join(sorted(method.requires - {"model"})) or "any architectures",
            ", ".join(sorted(method.discloses)) or "nothing",
            first_sentence(method),
        ]
        for name, method in ALGORITHMS.items()
    ]
    return [_build_table("algorithms", ("name", "requires", "discloses", ""), rows)]


def _data_tables() -> list[PlainTable]:
    return [_registry_table("data", SOURCES), _registry_table("partitions", PARTITIONS)]


def _model_tables() -> list[PlainTable]:
    return [_registry_table("models", MODELS)]


def _registry_table(title: str, registry: Mapping[str, Any]) -> PlainTable:
    return _build_table(title, ("name", ""), [[name, first_sentence(thing)] for name, thing in registry.items()])


def _recipe_tables() -> list[PlainTable]:
    all_recipes = [read_recipe(name) for name in recipe_files()]
    rows = [[r.name, r.description, ", ".join(r.scales) or "–", ", ".join(r.variants) or "–"] for r in all_recipes]
    tables = [_build_table("recipes", ("name", "", "scales (--scale)", "variants (--variant)"), rows)]
    reduced = [
        [r.name, scale, r.reduction_note(scale)] for r in all_recipes for scale in r.scales if r.reduction_note(scale)
    ]
    if reduced:
        tables.append(_build_table("what the scales reduce against the paper", ("name", "scale", ""), reduced))
    return tables
