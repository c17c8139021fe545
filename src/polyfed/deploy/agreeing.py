"""Sites of tables agree on one preprocessing before round 1 (`preprocess="federated"`), by the messages of a run.

1. Each site tells a hash of its columns, categories and classes, and, where its owner lets names go, these themselves
   (`SchemaSummary`). Where the hashes differ the server needs the names, and merges them.
2. Two rounds of the method `Moments`, as a run of its own with the same checks, and secure sums if the run has them.
3. The result goes with the introduction of the run to each site, which keeps it, and prepares and codes its rows by it.

So a site that comes back, and a run that is resumed, know it already, and nothing is asked twice.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import CONSENT, Client
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder, read_file, read_text_file, write_file_atomically
from polyfed.core.io.validation import parse_json, validation_error
from polyfed.data.tabular.harmonise import count_and_sum_with_targets, merge_table_definitions, preprocessor_of
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor, preprocessor_from_json
from polyfed.data.tabular.schema import read_schema, table_schema
from polyfed.deploy.privacy import ReplyProtection
from polyfed.deploy.private import InvalidSiteStateError
from polyfed.deploy.replies import sanitize_line
from polyfed.deploy.secure import RefusalError
from polyfed.deploy.server import DeploymentServer
from polyfed.deploy.tables import short_hash
from polyfed.deploy.wire import SERVER_HEAD_BYTES, SITE_HEAD_BYTES, Envelope, PackedEnvelope, parse_head
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.federated_preprocessing import (
    Moments,
    apply_preprocessing,
    build_moments_method,
    build_moments_settings,
    run_moments_rounds,
)
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.secure_aggregation import effective_disclosures

MOMENTS_NAME = registry_name(Moments())
_MIN_ROWS = 5  # rows with a value that a sum is told of
_FILE = "preprocessing.json"
_MOST_COLUMNS, _LONGEST = 5000, 200  # of a table, characters of a name or category
_HEAD_RESERVE = 4096  # of a head, for what else it holds


class SchemaSummary(TypedDict, total=False):
    """What a site tells of its table: a hash of all; how many columns of numbers and targets it has; its schema."""

    whole: str
    numbers: int
    targets: int
    schema: dict[str, Any]


class _CommonPreprocessing(TypedDict):
    """What the server tells: columns and classes where those of the sites differ, and what was fitted."""

    columns: list[dict[str, Any]] | None
    classes: list[str] | None
    mean: list[float]
    spread: list[float]
    target: list[list[float]]


# -- site -------------------------------------------------------------------------------------------------------------


def uses_federated_preprocessing(client: Client) -> bool:
    """Whether a site's examples are of a table that is prepared by sums over all sites."""
    return isinstance(client.train.transform, TablePreprocessor) and client.train.transform.scope == "federated"


def check_table_sums_allowed(client: Client, protection: ReplyProtection, *, secure: bool) -> None:
    """Raises a `RefusalError` if sums of the site's rows are not to leave it."""
    if not uses_federated_preprocessing(client):
        raise RefusalError("its data do not ask for preprocessing from sums over all sites (preprocess='federated')")
    if protection.noise_multiplier or protection.clip_norm is not None:
        raise RefusalError(
            "its table asks for preprocess='federated', whose sums would leave it without its noise and "
            "clipping; preprocess='site' sends none"
        )
    count, _ = count_and_sum_with_targets(client.train)
    if not secure and bool(((count > 0) & (count < _MIN_ROWS)).any()):
        raise RefusalError(
            f"a column of its table has values in fewer than {_MIN_ROWS} training rows, which their sum would nearly "
            "tell; leave that column out, or take preprocess='site' or secure sums"
        )


def summarize_schema(client: Client, run: str, *, with_names: bool) -> SchemaSummary:
    """What a site tells of its table.

    Args:
        client: with examples of it.
        run: its identifier, which enters the hash.
        with_names: whether names of columns, categories and classes go up. They do not if they are too long to be read.
    """
    preprocessor = preprocessor_of(client.train)
    summary: SchemaSummary = {
        "whole": short_hash(run, table_schema(preprocessor)), "numbers": len(preprocessor.mean),
        "targets": build_moments_method(preprocessor).size - len(preprocessor.mean),
    }  # fmt: skip
    if with_names and len(json.dumps(table_schema(preprocessor))) < SITE_HEAD_BYTES - _HEAD_RESERVE:
        summary["schema"] = table_schema(preprocessor)
    return summary


def save_common_preprocessing(folder: Path, description: Any, client: Client) -> None:
    """Writes down what the server says that sites have agreed on, for the run of this folder.

    Raises:
        RefusalError: it is not that of the run, or does not suit the site's table.
    """
    file = folder / _FILE
    try:
        parse_common_preprocessing(preprocessor_of(client.train), description)
    except UserError as error:
        raise RefusalError("the common preprocessing does not suit its table (its log tells why)") from error
    text = json.dumps(description)
    if not file.exists():
        create_private_folder(folder, parents=True)
        write_file_atomically(file, text.encode())
    elif read_text_file(file) != text:
        raise RefusalError("the common preprocessing is not that with which it began this run")


def apply_common_preprocessing(client: Client, folder: Path) -> Client:
    """The client, its table prepared as the sites have agreed on for the run of this folder.

    Raises:
        InvalidSiteStateError: nothing was agreed on, or what was written is damaged.
    """
    file = folder / _FILE
    try:
        return apply_preprocessing(
            client, parse_common_preprocessing(preprocessor_of(client.train), parse_json(read_file(file)))
        )
    except (OSError, ValueError, UserError) as error:
        raise InvalidSiteStateError(
            f"the common preprocessing of this run, {folder.name}/{_FILE}, is lost or damaged"
        ) from error


def parse_common_preprocessing(preprocessor: TablePreprocessor, description: Any) -> TablePreprocessor:
    """The common preprocessing, of a site with this table.

    Raises:
        UserError: it holds what is none.

    >>> own = TablePreprocessor((Column("age"),), (61.0,), (1.0,), (), "federated", ("no", "yes"))
    >>> parse_common_preprocessing(own,
    ...     {"columns": None, "classes": None, "mean": [50.0], "spread": [9.0], "target": []}).mean
    (50.0,)
    """
    if wrong := validation_error(description, _CommonPreprocessing):
        raise UserError(f"this is no preprocessing of a table: {wrong}")
    numbers = [
        *description["mean"],
        *description["spread"],
        *(number for pair in description["target"] for number in pair),
    ]
    if not all(map(math.isfinite, numbers)) or any(len(pair) != 2 for pair in description["target"]):
        raise UserError("this is no preprocessing of a table: its numbers are not finite, or not in pairs")
    site_fields = preprocessor.to_json_dict()
    columns_and_classes = {
        name: site_fields[name] if description[name] is None else description[name] for name in ("columns", "classes")
    }
    return preprocessor_from_json({**site_fields, **description, **columns_and_classes, "scope": "federated"})


# -- server -----------------------------------------------------------------------------------------------------------


class EnvelopeEngine(Protocol):
    """An engine that carries letters besides tasks."""

    def bind_federation(self, federation: Federation) -> None:
        """Learns which federation its tasks are of."""

    def exchange(
        self, envelopes: Mapping[str, Envelope], round_number: int
    ) -> Iterator[tuple[str, PackedEnvelope | str]]:
        """Sends a letter to each site, for a round, and yields what comes of it."""


def agree_on_preprocessing(
    server: DeploymentServer,
    introductions: Mapping[str, Mapping[str, Any]],
    build_engine: Callable[[DeploymentServer], Any],
) -> DeploymentServer:
    """The server that knows the preprocessing that its sites have agreed on; itself where they ask for none.

    Args:
        server: of a run that has not begun.
        introductions: what the sites have said of themselves.
        build_engine: makes the engine (`EnvelopeEngine`) of a server.

    Raises:
        UserError: only some sites ask for it, their tables differ, one refuses, or consent is missing.
        ClientError: what a site sent cannot be used.
    """
    asking_sites = sorted(i for i in introductions if introductions[i].get("prepares") is True)
    if not asking_sites:
        return server
    if other_sites := sorted(set(introductions) - set(asking_sites)):
        raise UserError(
            f"site {asking_sites[0]!r} asks for preprocessing from sums over all sites (preprocess='federated'), and "
            f"{other_sites[0]!r} does not; all sites of a run need the same"
        )
    secure, deployment = server.settings.secure, server.deployment
    if not deployment.allow_disclosure and effective_disclosures(Moments(), secure) & CONSENT:
        raise UserError(
            "preprocess='federated' discloses counts, means and variances of the sites' columns to the server; if they "
            "agree, allow it: polyfed flower run DIR --allow-disclosure, and allow-disclosure=true at each site"
        )
    if (deployment.secure_threshold or 0) <= len(
        introductions
    ) // 2:  # it was for the sites of a round, and here are all
        deployment = replace(deployment, secure_threshold=None)
    settings = build_moments_settings(server.settings.seed, secure)
    moments_server = replace(
        server, algorithm=Moments(), settings=settings, run=f"{server.run}-tables", deployment=deployment
    )
    merged_table, sends_names = _merge_tables(
        _collect_schema_summaries(moments_server, asking_sites, build_engine(moments_server))
    )
    moments_server = replace(moments_server, algorithm=build_moments_method(merged_table))
    engine = build_engine(moments_server)
    federation = Federation(
        {}, moments_server.algorithm, settings, remote_clients=ClientRegistry(tuple(asking_sites), merged_table.task)
    )
    engine.bind_federation(federation)
    moments_result = run_moments_rounds(federation, engine, merged_table)
    fields = moments_result.prepared.to_json_dict()
    common: dict[str, Any] = {
        "columns": fields["columns"] if sends_names else None, "classes": fields["classes"] if sends_names else None,
        "mean": fields["mean"], "spread": fields["spread"], "target": fields["target"],
    }  # fmt: skip
    if (size := len(json.dumps(common))) > SERVER_HEAD_BYTES - SITE_HEAD_BYTES:
        raise UserError(
            f"the columns and categories of all sites take {size / 2**10:.0f} kB, more than a message may; agree on a "
            "schema with fewer (pf.data.split_table(..., schema=FILE), see docs/tabular.md)"
        )
    return replace(server, preprocessing=common, preprocessing_facts=moments_result.facts)


def _collect_schema_summaries(
    server: DeploymentServer, sites: list[str], engine: EnvelopeEngine
) -> dict[str, tuple[SchemaSummary, str]]:
    """What each site tells of its table, and its task."""
    summaries: dict[str, tuple[SchemaSummary, str]] = {}
    envelopes = {site: Envelope({**server.introduction_head(), "kind": "prepare", "client": site}) for site in sites}
    for site, answer in engine.exchange(envelopes, 0):
        try:
            head: dict[str, Any] = {"refused": answer} if isinstance(answer, str) else parse_head(answer.head)
            reason = sanitize_line(head["refused"]) if head.get("refused") else _schema_summary_error(head.get("table"))
        except (UserError, ValueError, TypeError, KeyError) as error:
            reason = sanitize_line(error)
        if reason:
            raise UserError(f"site {site!r} does not take part: {reason}")
        summaries[site] = head["table"], str(head.get("task"))
    return dict(sorted(summaries.items()))


def _schema_summary_error(table: Any) -> str:
    """Why what a site tells is no table; empty if it is one."""
    if wrong := validation_error(table, SchemaSummary):
        return f"what it tells of its table cannot be read: {wrong}"
    if {"whole", "numbers", "targets"} - table.keys():
        return "it does not tell what its table is like"
    if not (0 <= table["numbers"] <= _MOST_COLUMNS and 0 <= table["targets"] <= _MOST_COLUMNS):
        return f"its table has {table['numbers']} columns of numbers; at most {_MOST_COLUMNS} are read"
    if "schema" not in table:
        return ""
    schema = read_schema(table["schema"])
    if len(schema.columns) > _MOST_COLUMNS:
        return f"its table has {len(schema.columns)} columns; at most {_MOST_COLUMNS} are read"
    lists = [[column.name for column in schema.columns], schema.classes, *(c.categories or () for c in schema.columns)]
    if any(len(set(names)) < len(names) for names in lists):
        return "columns, classes or categories of its table have a name twice"
    if any(not name.isprintable() or len(name) > _LONGEST for names in lists for name in names):
        return f"a name in its table has characters that cannot be printed, or more than {_LONGEST}"
    if (len(schema.mean), build_moments_method(schema).size) != (table["numbers"], table["numbers"] + table["targets"]):
        return "its table has other columns of numbers than it tells"
    return ""


def _merge_tables(tables: Mapping[str, tuple[SchemaSummary, str]]) -> tuple[TablePreprocessor, bool]:
    """The table of all sites, and whether they must be told its names: not where all have the same."""
    summaries = {site: table for site, (table, _) in tables.items()}
    first = next(iter(summaries.values()))
    are_equal = all({**summary, "schema": 0} == {**first, "schema": 0} for summary in summaries.values())
    if not are_equal:
        if without := [site for site, summary in summaries.items() if "schema" not in summary]:
            raise UserError(
                f"the tables of the sites have other columns, categories or classes, and {without[0]!r} does not "
                "tell its own: allow-disclosure, or disclose=columns, lets it (if they take less than "
                f"{SITE_HEAD_BYTES // 2**10} kB); or agree on one schema, pf.data.split_table(..., schema=FILE), see "
                "docs/tabular.md"
            )
        return merge_table_definitions(
            {site: read_schema(summary["schema"]) for site, summary in summaries.items()}
        ), True
    columns = tuple(Column(str(number)) for number in range(first["numbers"]))
    targets = tuple(map(str, range(first["targets"])))
    task = next(iter(tables.values()))[1]
    common_table = TablePreprocessor(
        columns, (0.0,) * len(columns), (1.0,) * len(columns), (), "federated", targets, _validate_task(task)
    )
    return common_table, False


def _validate_task(task: str) -> Any:
    if task not in ("classification", "multilabel", "regression"):
        raise UserError(f"sites have one task, and one tells {task[:40]!r}")
    return task
