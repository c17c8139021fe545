"""Compares the tables of different sites before round 1 by hashes of their columns, categories and classes.

If a method's networks must all read the same inputs (`polyfed.simulation.checks.clients.table_schemas`), a site sends a
hash of its columns, categories and classes; for any other method that discloses something, a hash of its classes. It sends
the columns' names, each with a hash of its categories, only if its owner allows the disclosure of weights
(`allow-disclosure`) or sets `disclose="columns"`. It never sends values; but short lists of categories can be guessed from a
hash, hence this consent.

A site whose inputs were a pandas frame sends a hash of the names of its columns, in their order, where networks must read
the same inputs, and with the same consent the names. Sites without such names (tensors, or a version of polyfed that does
not send them) are not compared.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from polyfed.core.algorithm import Client
from polyfed.core.io.values.validation import validation_error
from polyfed.simulation.checks.clients.table_schemas import (
    FRAME_ADVICE,
    SCHEMA_ADVICE,
    column_definitions_by_name,
    describe_table_differences,
    find_deviating_pair,
    needs_common_inputs,
    table_class_names,
    table_preprocessors_by_part,
)

COLUMNS = "columns"  # an entry of `disclose`
_MAX_COLUMNS, _MAX_CHARACTERS = 400, 2**15  # columns whose names are sent; half of a site's header


class TableSummary(TypedDict, total=False):
    """Describes a site's table by hashes of columns, categories and classes, for comparison."""

    whole: str  # hash of columns, categories and classes
    columns: dict[str, list[Any]]  # column -> hash of its categories, and whether cells may be empty
    classes: str  # hash of the classes


class FrameSummary(TypedDict, total=False):
    """Describes the columns of a site's pandas frame by a hash of their names in their order."""

    whole: str
    names: list[str]  # if the site's owner allows it


class SchemaSummary(TypedDict, total=False):
    """Describes the columns of a site's table, so that the server can compute one preprocessing for all sites."""

    whole: str  # hash of the schema
    numbers: int  # numeric columns
    targets: int  # numeric targets
    schema: dict[str, Any]  # the schema, if its owner allows it


def build_table_hashes_for_header(
    client: Client,
    method_requires: frozenset[str],
    run_id: str,
    *,
    with_names: bool,
    adds_noise: bool = False,
    method_discloses: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Returns {"table": hashes} of a client's table, {"frame": hash of column names} of a frame, or {}.

    It is {} too if the method discloses nothing and does not need equal inputs.

    Args:
        client: the client, whose examples may come from a table.
        method_requires: `Algorithm.requires` of the method.
        run_id: identifier of the run, which enters the hashes, so that hashes of different runs cannot be compared.
        with_names: whether the columns' names are sent.
        adds_noise: whether the site adds noise, whose guarantee a hash that depends on rows would break: then the summary
            is empty.
        method_discloses: `Algorithm.discloses` of the method.
    """
    shared = needs_common_inputs(method_requires, method_discloses)
    if not table_preprocessors_by_part(client.train):
        frame = _summarize_frame(client, run_id, with_names=with_names, adds_noise=adds_noise)
        return {"frame": frame} if shared and client.train.features else {}
    if not (shared or method_discloses):
        return {}
    if adds_noise:
        return {"table": {}}
    classes = hash_json_values(run_id, "", table_class_names(client.train))
    if not shared:
        return {"table": {"classes": classes}}
    columns: dict[str, list[Any]] = {
        name: [hash_json_values(run_id, name, categories), missing]
        for name, (categories, missing) in column_definitions_by_name(client.train).items()
    }
    summary: TableSummary = {"whole": hash_json_values(run_id, sorted(columns.items()), list(columns), classes)}
    if with_names and _is_short(columns):
        summary |= {"columns": columns, "classes": classes}
    return {"table": summary}


def _summarize_frame(client: Client, run_id: str, *, with_names: bool, adds_noise: bool) -> FrameSummary:
    """Returns the summary of a frame's columns; an empty one under noise, since rows may have made their names."""
    if adds_noise:
        return {}
    names = list(client.train.features or ())
    summary: FrameSummary = {"whole": hash_json_values(run_id, "frame", names)}
    return summary | {"names": names} if with_names and _is_short(names) else summary


def _is_short(content: Sequence[str] | Mapping[str, Any]) -> bool:
    return len(content) <= _MAX_COLUMNS and len(json.dumps(content)) <= _MAX_CHARACTERS


def hash_json_values(*content: Any) -> str:
    """Returns a hash of JSON-compatible values, as 16 hexadecimal digits.

    >>> len(hash_json_values("run", ["age"]))
    16
    """
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def describe_table_difference(head_by_site: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Returns a sentence on the first site whose table differs from another's; None without one.

    Args:
        head_by_site: header of each site's introduction, also of sites that refuse.

    >>> north = {"table": {"whole": "a", "classes": "c", "columns": {"age": ["1", False], "sex": ["2", False]}}}
    >>> south = {"table": {"whole": "b", "classes": "c", "columns": {"age": ["1", True], "lab": ["3", False]}}}
    >>> describe_table_difference({"north": north, "south": south}).partition("; agree")[0]
    "site 'south' has another table than 'north': it has no column 'sex', and 'lab' more; only one of the two has empty cells
    in 'age'"
    """
    table_by_site = {i: head.get("table") for i, head in sorted(head_by_site.items()) if head.get("table") != {}}
    valid_summaries: dict[str, Any] = {
        i: summary
        for i, summary in table_by_site.items()
        if not validation_error(summary, TableSummary) and _is_complete_summary(summary)
    }
    full_summaries = {i: summary for i, summary in valid_summaries.items() if "whole" in summary}
    if not full_summaries and (frame_difference := _describe_frame_difference(_frames_by_site(head_by_site))):
        return frame_difference
    if not full_summaries:
        classes = {i: summary["classes"] for i, summary in valid_summaries.items()}
        if not classes or (pair := find_deviating_pair(classes)) is None:
            return None
        return f"site {pair[1]!r} has another table than {pair[0]!r}: its classes are others; {SCHEMA_ADVICE}"
    if without := [i for i in table_by_site if i not in full_summaries]:
        return f"site {without[0]!r} has no table, as {next(iter(full_summaries))!r} has; {SCHEMA_ADVICE}"
    if (pair := find_deviating_pair({i: summary["whole"] for i, summary in full_summaries.items()})) is None:
        return None
    first_site, second_site = pair
    if any("columns" not in full_summaries[i] for i in pair):
        sentences = ["the columns are named if both sites allow it (allow-disclosure, or disclose=columns)"]
    else:
        sentences = describe_table_differences(full_summaries[first_site], full_summaries[second_site])
    return f"site {second_site!r} has another table than {first_site!r}: {'; '.join(sentences)}; {SCHEMA_ADVICE}"


def sites_without_column_names(head_by_site: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the sites whose columns cannot be compared with the names that others report.

    >>> sites_without_column_names({"north": {"frame": {"whole": "a"}}, "south": {}})
    ['south']
    """
    frames = _frames_by_site(head_by_site)
    return [i for i in sorted(head_by_site) if i not in frames] if frames else []


def _frames_by_site(head_by_site: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    frames = {i: head.get("frame") for i, head in sorted(head_by_site.items())}
    return {
        i: frame
        for i, frame in frames.items()
        if frame and not validation_error(frame, FrameSummary) and "whole" in frame
    }


def _describe_frame_difference(frame_by_site: Mapping[str, Any]) -> str | None:
    """Names the first site whose frame has other columns, or another order, than another site's; or None."""
    if (
        not frame_by_site
        or (pair := find_deviating_pair({i: frame["whole"] for i, frame in frame_by_site.items()})) is None
    ):
        return None
    names_by_site = [frame_by_site[i].get("names") for i in pair]
    if None in names_by_site:
        sentences = ["the columns are named if both sites allow it (allow-disclosure, or disclose=columns)"]
    else:
        reference, deviant = ({"columns": dict.fromkeys(names, (None, False))} for names in names_by_site)
        sentences = describe_table_differences(reference, deviant)
    return (
        f"the frame of site {pair.deviating!r} has other columns than that of {pair.typical!r}, or another order: "
        f"{'; '.join(sentences)}; {FRAME_ADVICE}"
    )


def _is_complete_summary(table: Any) -> bool:
    """Returns whether a table summary that a site sent has all required fields."""
    columns = table.get("columns", {})
    return ("whole" in table or "classes" in table) and all(len(column) == 2 for column in columns.values())
