"""Tables at different sites: whether they have the same columns, found before round 1 and said with the columns' names.

A site whose method has all sites' networks read inputs of one meaning (`polyfed.simulation.checks.table_schemas`) tells a hash of its
columns, categories and classes; a site whose method sends anything else, a hash of its classes. Names of columns, each with
a hash of its categories, go up only where its owner lets weights go (`allow-disclosure`), or says `disclose="columns"`.
Values never go up; but short lists of categories can be guessed from a hash, which is why it needs that word.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from polyfed.core.algorithm import Client
from polyfed.core.io.validation import validation_error
from polyfed.simulation.checks.table_schemas import (
    SCHEMA_ADVICE,
    class_names_of,
    columns_by_name,
    describe_table_differences,
    find_deviating_pair,
    needs_common_inputs,
    tables_by_part,
)

COLUMNS = "columns"  # of `disclose`
_MAX_COLUMNS = 400  # columns that are told


class TableSummary(TypedDict, total=False):
    """What a site tells of its table: a hash of all, and hash of categories and whether cells may be empty by column."""

    whole: str
    columns: dict[str, list[Any]]
    classes: str


class SchemaSummary(TypedDict, total=False):
    """What a site tells of its table: a hash of all; how many columns of numbers and targets it has; its schema."""

    whole: str
    numbers: int
    targets: int
    schema: dict[str, Any]


def summarize_table(
    client: Client,
    needs: frozenset[str],
    run: str,
    *,
    with_names: bool,
    adds_noise: bool = False,
    discloses: frozenset[str] = frozenset(),
) -> dict[str, TableSummary]:
    """What is told of a client's table, as `table`; nothing where there is none, or where the method sends nothing.

    Args:
        client: whose examples may be of a table.
        needs, discloses: of the method.
        run: its identifier, which enters the hashes, so that they say nothing of other runs.
        with_names: whether the columns' names go up.
        adds_noise: whether what goes up is protected by noise, which a hash that depends on rows would undo: nothing
            is told.
    """
    shared = needs_common_inputs(needs, discloses)
    if not tables_by_part(client.train) or not (shared or discloses):
        return {}
    if adds_noise:
        return {"table": {}}
    classes = short_hash(run, "", class_names_of(client.train))
    if not shared:
        return {"table": {"classes": classes}}
    columns: dict[str, list[Any]] = {
        name: [short_hash(run, name, categories), missing]
        for name, (categories, missing) in columns_by_name(client.train).items()
    }
    summary: TableSummary = {"whole": short_hash(run, sorted(columns.items()), list(columns), classes)}
    if with_names and len(columns) <= _MAX_COLUMNS:
        summary |= {"columns": columns, "classes": classes}
    return {"table": summary}


def short_hash(*content: Any) -> str:
    """A short hash of plain content.

    >>> len(short_hash("run", ["age"]))
    16
    """
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def describe_table_difference(heads: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence about the first site whose table is not that of the others; empty if there is none.

    Args:
        heads: what each site has told, whether it takes part or not.

    >>> north = {"table": {"whole": "a", "classes": "c", "columns": {"age": ["1", False], "sex": ["2", False]}}}
    >>> south = {"table": {"whole": "b", "classes": "c", "columns": {"age": ["1", True], "lab": ["3", False]}}}
    >>> describe_table_difference({"north": north, "south": south}).partition("; agree")[0]
    "site 'south' has another table than 'north': it has no column 'sex', and 'lab' more; only one of the two has empty cells
    in 'age'"
    """
    table_by_site = {i: head.get("table") for i, head in sorted(heads.items()) if head.get("table") != {}}
    valid_summaries: dict[str, Any] = {
        i: summary
        for i, summary in table_by_site.items()
        if not validation_error(summary, TableSummary) and _is_complete_summary(summary)
    }
    full_summaries = {i: summary for i, summary in valid_summaries.items() if "whole" in summary}
    if not full_summaries:
        pair = (
            find_deviating_pair({i: summary["classes"] for i, summary in valid_summaries.items()})
            if valid_summaries
            else None
        )
        return (
            ""
            if pair is None
            else f"site {pair[1]!r} has another table than {pair[0]!r}: its classes are others; {SCHEMA_ADVICE}"
        )
    if without := [i for i in table_by_site if i not in full_summaries]:
        return f"site {without[0]!r} has no table, as {next(iter(full_summaries))!r} has; {SCHEMA_ADVICE}"
    if (pair := find_deviating_pair({i: summary["whole"] for i, summary in full_summaries.items()})) is None:
        return ""
    first_site, second_site = pair
    if any("columns" not in full_summaries[i] for i in pair):
        sentences = ["which columns is told where both sites allow it (allow-disclosure, or disclose=columns)"]
    else:
        sentences = describe_table_differences(full_summaries[first_site], full_summaries[second_site])
    return f"site {second_site!r} has another table than {first_site!r}: {'; '.join(sentences)}; {SCHEMA_ADVICE}"


def _is_complete_summary(table: Any) -> bool:
    """Whether what a site has told is of this form; it may be anything."""
    columns = table.get("columns", {})
    return ("whole" in table or "classes" in table) and all(len(column) == 2 for column in columns.values())
