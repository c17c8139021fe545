"""Writes docs/defaults.md: the defaults that methods share, and an overview of each method's own, with their sources.

    python docs/tabulate_defaults.py

All of it is read from the dataclasses and their docstrings; a test sees to it that the file is up to date and that no field
of a method is without provenance.
"""

import dataclasses
import re
from functools import cache
from pathlib import Path

from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.options.configuration_parser import options_of
from polyfed.core.training.config import LocalTraining

SHARED = {field.name: field.default for field in dataclasses.fields(LocalTraining)}
SOURCES = ("paper", "authors' code", "public implementations", "polyfed's choice")
COMMON = 3  # methods that have a field with one default and one meaning, from which on it stands in a table of its own
HEAD = """# Defaults and where they come from

Which value does a field have if you do not set it, and who chose it? What every method has comes first, then what several
share, then [each method's own](#fields-of-each-method). A method's page says what its fields mean, and so does
`polyfed run --algorithm NAME --help`. The source of a default:

- **paper**: the method's own paper.
- **authors' code**: the code that the authors published, where the paper does not say.
- **public implementations**: other public code, where neither says.
- **polyfed**: a choice of this library. If the paper has another value, the method's page names it.

The recipes of a paper's tables (`polyfed list recipes`) set the values of that table.

## Local training: fields of every method

These defaults are polyfed's choice. A method whose own default differs has it in its row below.

| field | default | meaning |
|---|---|---|
"""
SHARED_HEAD = """
## Fields that several methods share

| field | default | source | meaning | methods |
|---|---|---|---|---|
"""
OWN_HEAD = """
## Fields of each method

Without those of the tables above. A method's name leads to what they mean.

| method | paper | authors' code | public implementations | polyfed |
|---|---|---|---|---|
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


@cache
def own_fields(name: str) -> list[tuple[str, str, str]]:
    """Name, default and description of the fields in which a method differs from plain local training."""
    found = []
    for option in options_of(REGISTRY[name], "algorithm"):
        field = option.key.removeprefix("algorithm.")
        if field not in SHARED or option.default != SHARED[field]:
            found.append((field, str(option.default), _cell(option.help)))
    return found


@cache
def fields_in_common() -> dict[tuple[str, str, str], list[str]]:
    """Returns the fields, as `own_fields` has them, that several methods have with one default and one meaning."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    for name in REGISTRY:
        for field in own_fields(name):
            owners.setdefault(field, []).append(name)
    return {field: names for field, names in owners.items() if len(names) >= COMMON}


def page_of(name: str) -> str:
    """Returns the page of a method, from docs."""
    return f"methods/{name.removeprefix('ca_')}.md"


def table() -> str:
    """The whole document."""
    shared = [o for o in options_of(REGISTRY["fedavg"], "algorithm") if o.key.removeprefix("algorithm.") in SHARED]
    lines = [f"| `{o.key.removeprefix('algorithm.')}` | `{_cell(o.default)}` | {_cell(o.help)} |" for o in shared]
    common = fields_in_common()
    rows = [
        f"| `{field}` | `{value}` | {source(value, text)} | {text} | {', '.join(f'`{name}`' for name in names)} |"
        for (field, value, text), names in sorted(common.items(), key=lambda item: -len(item[1]))
    ]
    overview = []
    for name in REGISTRY:
        by_source: dict[str, list[str]] = {}
        for field, value, text in own_fields(name):
            if (field, value, text) not in common:
                by_source.setdefault(source(value, text), []).append(f"`{field}: {value}`")
        if by_source:
            cells = (", ".join(by_source.get(kind.replace("'s choice", ""), ())) for kind in SOURCES)
            overview.append(f"| [`{name}`]({page_of(name)}#defaults) | {' | '.join(cells)} |")
    return HEAD + "\n".join([*lines, SHARED_HEAD + "\n".join([*rows, OWN_HEAD + "\n".join(overview)])]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("defaults.md").write_text(table(), encoding="utf-8")
