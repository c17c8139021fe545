"""Writes docs/defaults.md: every hyper-parameter of every method, its default and where that comes from.

    python docs/tabulate_defaults.py

All of it is read from the dataclasses and their docstrings; a test sees to it that the file is up to date and that no field
of a method is without provenance.
"""

import dataclasses
import re
from pathlib import Path

from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.options.configuration_parser import options_of
from polyfed.core.training.config import LocalTraining

SHARED = {field.name: field.default for field in dataclasses.fields(LocalTraining)}
SOURCES = ("paper", "authors' code", "public implementations", "polyfed's choice")
HEAD = """# Defaults and where they come from

Written by `docs/tabulate_defaults.py` from the methods' dataclasses. The column *source* says where the default comes from:

- **paper**: the method's own paper.
- **authors' code**: the code that the authors published, where the paper does not say.
- **public implementations**: other public code, where neither says.
- **polyfed**: a choice of this library. If the paper has another value, the text names it.

The recipes of a paper's tables (`polyfed list recipes`) set the values of that table.

## Local training: fields of every method

These defaults are polyfed's choice.

| field | default | meaning |
|---|---|---|
"""


def _cell(value: object) -> str:
    return str(value).replace("%%", "%").replace("|", "\\|").replace("\n", " ")


def provenance(default: object, text: str) -> str:
    """The source that a field's description gives for this default: the first after the default is mentioned, or else the
    first of all; empty if it names none.

    >>> provenance(False, "weighs by examples, as the authors' code has it; False counts each client the same (paper).")
    'paper'
    """
    mentioned = re.search(rf"(?<![\w.]){re.escape(str(default))}(?![\w.]*\w)", text)
    for part in (text[mentioned.end() :] if mentioned else "", text):
        named = [one for one in SOURCES if one in part]
        if named:
            return min(named, key=part.index)
    return ""


def source(default: object, text: str) -> str:
    """The same for readers."""
    return provenance(default, text).replace("polyfed's choice", "polyfed")


def own_fields(name: str) -> list[tuple[str, object, str]]:
    """Name, default and description of the fields in which a method differs from plain local training."""
    found = []
    for option in options_of(REGISTRY[name], "algorithm"):
        field = option.key.removeprefix("algorithm.")
        if field not in SHARED or option.default != SHARED[field]:
            found.append((field, option.default, _cell(option.help)))
    return found


def table() -> str:
    """The whole document."""
    shared = [o for o in options_of(REGISTRY["fedavg"], "algorithm") if o.key.removeprefix("algorithm.") in SHARED]
    lines = [f"| `{o.key.removeprefix('algorithm.')}` | `{_cell(o.default)}` | {_cell(o.help)} |" for o in shared]
    for name in REGISTRY:
        fields = own_fields(name)
        if fields:
            lines += ["", f"## `{name}`", "", "| field | default | source | meaning |", "|---|---|---|---|"]
            lines += [f"| `{field}` | `{value}` | {source(value, text)} | {(text)} |" for field, value, text in fields]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("defaults.md").write_text(table(), encoding="utf-8")
