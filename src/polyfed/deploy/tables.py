"""Tables at different sites: whether they have the same columns, found before round 1 and said with the columns' names.

A site whose method has all sites' networks read inputs of one meaning (`polyfed.simulation.tables`) tells a hash of its
columns, categories and classes; a site whose method sends anything else, a hash of its classes. Names of columns, each with
a hash of its categories, go up only where its owner lets weights go (`allow-disclosure`), or says `disclose="columns"`.
Values never go up; but short lists of categories can be guessed from a hash, which is why it needs that word.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from polyfed.core.algorithm import Client
from polyfed.core.typed import conforms
from polyfed.simulation.tables import CURE, classes_of, columns_of, differences, odd_pair, shares_inputs, tables_of

COLUMNS = "columns"  # of `disclose`
_MOST = 400  # columns that are told


class Told(TypedDict, total=False):
    """What a site tells of its table: a hash of all, and hash of categories and whether cells may be empty by column."""

    whole: str
    columns: dict[str, list[Any]]
    classes: str


def table_of(
    client: Client,
    needs: frozenset[str],
    run: str,
    *,
    named: bool,
    noisy: bool = False,
    discloses: frozenset[str] = frozenset(),
) -> dict[str, Told]:
    """What is told of a client's table, as `table`; nothing where there is none, or where the method sends nothing.

    Args:
        client: whose examples may be of a table.
        needs, discloses: of the method.
        run: its identifier, which enters the hashes, so that they say nothing of other runs.
        named: whether the columns' names go up.
        noisy: whether what goes up is protected by noise, which a hash that depends on rows would undo: nothing is told.
    """
    shared = shares_inputs(needs, discloses)
    if not tables_of(client.train) or not (shared or discloses):
        return {}
    if noisy:
        return {"table": {}}
    classes = hashed(run, "", classes_of(client.train))
    if not shared:
        return {"table": {"classes": classes}}
    columns: dict[str, list[Any]] = {
        name: [hashed(run, name, categories), missing]
        for name, (categories, missing) in columns_of(client.train).items()
    }
    told: Told = {"whole": hashed(run, sorted(columns.items()), list(columns), classes)}
    if named and len(columns) <= _MOST:
        told |= {"columns": columns, "classes": classes}
    return {"table": told}


def hashed(*content: Any) -> str:
    """A short hash of plain content.

    >>> len(hashed("run", ["age"]))
    16
    """
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def difference_of_tables(heads: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence about the first site whose table is not that of the others; empty if there is none.

    Args:
        heads: what each site has told, whether it takes part or not.

    >>> north = {"table": {"whole": "a", "classes": "c", "columns": {"age": ["1", False], "sex": ["2", False]}}}
    >>> south = {"table": {"whole": "b", "classes": "c", "columns": {"age": ["1", True], "lab": ["3", False]}}}
    >>> difference_of_tables({"north": north, "south": south}).partition("; agree")[0]
    "site 'south' has another table than 'north': it has no column 'sex', and 'lab' more; only one of the two has empty cells
    in 'age'"
    """
    told = {i: head.get("table") for i, head in sorted(heads.items()) if head.get("table") != {}}
    sound: dict[str, Any] = {i: one for i, one in told.items() if not conforms(one, Told) and _sound(one)}
    tables = {i: one for i, one in sound.items() if "whole" in one}
    if not tables:
        pair = odd_pair({i: one["classes"] for i, one in sound.items()}) if sound else None
        return (
            ""
            if pair is None
            else f"site {pair[1]!r} has another table than {pair[0]!r}: its classes are others; {CURE}"
        )
    if without := [i for i in told if i not in tables]:
        return f"site {without[0]!r} has no table, as {next(iter(tables))!r} has; {CURE}"
    if (pair := odd_pair({i: one["whole"] for i, one in tables.items()})) is None:
        return ""
    like, other = pair
    if any("columns" not in tables[i] for i in pair):
        found = ["which columns is told where both sites allow it (allow-disclosure, or disclose=columns)"]
    else:
        found = differences(tables[like], tables[other])
    return f"site {other!r} has another table than {like!r}: {'; '.join(found)}; {CURE}"


def _sound(table: Any) -> bool:
    """Whether what a site has told is of this form; it may be anything."""
    columns = table.get("columns", {})
    return ("whole" in table or "classes" in table) and all(len(one) == 2 for one in columns.values())
